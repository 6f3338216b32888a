"""Alarm when a run learns nothing: collapsed outputs, told from the entropy of the targets, the KL and the losses.

The cross-entropy that is minimised is h + KL: the entropy h of the teacher's targets plus the divergence of the student
from them (DINO, section 5.3). Where h goes to ln K, all prototypes get the same share of every image; where it goes to
0, one prototype gets all; and where KL goes to 0, the output is the same for every image, whatever h is.

A healthy run starts near ln K too: new weights give all images nearly the same output, and the centre removes what they
share. So the rule is:

- no alarm in the first ``FIRST_STEP`` steps;
- nor, for a uniform or constant output, before the learning rate has warmed up or a quarter of the run is over (no run
  starts with one-hot targets, so those are an alarm earlier);
- a sign must be there in ``PATIENCE`` reports in a row;
- each alarm is given once, and may come again after the sign has been absent in ``PATIENCE`` reports in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FIRST_STEP = 200
PATIENCE = 3
NEAR = 0.01
"""Share of ln K within which an entropy or a loss counts as being at its end."""
KL_NEAR_ZERO = 0.01
"""Nats. Views differ, so a network that tells images apart is well above it."""

Row = Mapping[str, float | int | str | None]


@dataclass(frozen=True)
class _Part:
    """[CLS] or patches: fields of the log, and what there is to know about their outputs."""

    name: str
    entropy: str
    kl: str
    loss: str
    prototypes: int
    hard_targets: bool

    @property
    def uniform(self) -> float:
        """ln K, nats."""
        return math.log(self.prototypes)


class CollapseAlarm:
    """Watches the lines of log.jsonl.

    Args:
        cls_prototypes: K of the [CLS] outputs; None where they are not trained (their loss has weight 0).
        patch_prototypes: K of the patch outputs; None where they are not trained.
        warmup_end: step at which the learning rate has warmed up.
        steps: of the whole run, where known; a short one may warm up until its end.
        hard_patch_targets: whether a patch's target is one prototype, whose entropy is 0 by definition.
    """

    def __init__(
        self,
        *,
        cls_prototypes: int | None,
        patch_prototypes: int | None,
        warmup_end: int,
        steps: int | None = None,
        hard_patch_targets: bool = False,
    ) -> None:
        warm = warmup_end if steps is None else min(warmup_end, steps // 4)
        self._first = {kind: FIRST_STEP if kind == "one-hot" else max(warm, FIRST_STEP) for kind in _SIGNS}
        self._parts = [
            _Part(name, entropy, kl, loss, prototypes, hard)
            for name, entropy, kl, loss, prototypes, hard in (
                ("[CLS]", "teacher_entropy", "kl", "cls_loss", cls_prototypes, False),
                ("patch", "patch_entropy", "patch_kl", "patch_loss_per_token", patch_prototypes, hard_patch_targets),
            )
            # A single prototype has an entropy of 0 and a loss of 0, always.
            if prototypes is not None and prototypes > 1
        ]
        self._streak: dict[tuple[str, str], int] = {}
        self._sounded: set[tuple[str, str]] = set()

    def check(self, row: Row) -> list[str]:
        """Diagnoses that ``row`` gives rise to, most often none. Each says what is wrong and what to change.

        Args:
            row: a line of the log: ``step``, and where measured
                ``teacher_entropy``, ``kl``, ``cls_loss``, ``patch_entropy``, ``patch_kl``, ``patch_loss_per_token``,
                ``patch_loss`` (nats; losses without their weights). What is absent, None or not finite is not judged.
        """
        step = _number(row, "step")
        if step is None:
            return []
        found = []
        for part in self._parts:
            for kind, (sign, diagnosis) in _SIGNS.items():
                present = sign(part, row) if step >= self._first[kind] else None
                if present is not None and self._due((part.name, kind), present):
                    found.append(f"step {step:.0f}: {diagnosis(part, row)}")
        return found

    def _due(self, key: tuple[str, str], present: bool) -> bool:
        # Positive: reports in a row with the sign; negative: without it.
        before = self._streak.get(key, 0)
        self._streak[key] = streak = max(before, 0) + 1 if present else min(before, 0) - 1
        if streak <= -PATIENCE:
            self._sounded.discard(key)
        if streak < PATIENCE or key in self._sounded:
            return False
        self._sounded.add(key)
        return True


def _is_uniform(part: _Part, row: Row) -> bool | None:
    # The loss as well: it stands at ln K where the student has given up, even if the teacher's output still varies.
    values = [_number(row, part.loss)] if part.hard_targets else [_number(row, part.entropy), _number(row, part.loss)]
    known = [value for value in values if value is not None]
    return any(value >= (1 - NEAR) * part.uniform for value in known) if known else None


def _say_uniform(part: _Part, row: Row) -> str:
    read = f"teacher's entropy {_text(row, part.entropy)} and loss {_text(row, part.loss)}"
    patch = "" if part.name == "[CLS]" else "patch-"
    text = (
        f"the {part.name} output is uniform, nothing is being learnt from it: {read}, where "
        f"ln K = {part.uniform:.3g} for K = {part.prototypes}"
    )
    mean = _number(row, "patch_loss")
    if part.name == "patch" and mean is not None:
        text += (
            f" (loss per masked token; averaged over crops it reads {mean:.3g}, and about half of ln K is what a "
            "collapsed run shows there, since half of the masks are empty)"
        )
    return (
        f"{text}. To do: a sharper teacher at the start (--{patch}teacher-temp-start, lower), a slower centre "
        f"(--{patch}centre-momentum, nearer 1), more and smaller steps (--batch-size), fewer prototypes (--prototypes)"
    )


def _is_one_hot(part: _Part, row: Row) -> bool | None:
    entropy = _number(row, part.entropy)
    return None if part.hard_targets or entropy is None else entropy <= NEAR * part.uniform


def _say_one_hot(part: _Part, row: Row) -> str:
    kl = _number(row, part.kl)
    patch = "" if part.name == "[CLS]" else "patch-"
    reading = (
        "one prototype takes every image"
        if kl is not None and kl <= KL_NEAR_ZERO
        else "every target is a single prototype, which is how one of them comes to take all"
    )
    return (
        f"the {part.name} output of the teacher is one-hot, {reading}: entropy {_text(row, part.entropy)} of at "
        f"most {part.uniform:.3g}. To do: centring on (--centring), a faster centre (--{patch}centre-momentum, lower), "
        f"a softer teacher (--{patch}teacher-temp and --{patch}teacher-temp-start, higher), prototypes of one length "
        "(--norm-last-layer)"
    )


def _is_constant(part: _Part, row: Row) -> bool | None:
    kl = _number(row, part.kl)
    if kl is None:
        return None
    # At either end of the entropy the KL is near 0 too, and the diagnosis of that end says more.
    return kl <= KL_NEAR_ZERO and not _is_uniform(part, row) and not _is_one_hot(part, row)


def _say_constant(part: _Part, row: Row) -> str:
    return (
        f"the {part.name} output is the same for every image, so the student has nothing left to match: KL "
        f"{_text(row, part.kl)} at entropy {_text(row, part.entropy)} of at most {part.uniform:.3g}. To do: "
        "towards ln K a sharper teacher (--teacher-temp, lower), towards 0 a faster centre (--centre-momentum, lower); "
        "in either case a lower --lr, or the prototypes frozen for longer (--freeze-last-layer)"
    )


_SIGNS: dict[str, tuple[Callable[[_Part, Row], bool | None], Callable[[_Part, Row], str]]] = {
    "uniform": (_is_uniform, _say_uniform),
    "one-hot": (_is_one_hot, _say_one_hot),
    "constant": (_is_constant, _say_constant),
}


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _text(row: Row, name: str) -> str:
    value = _number(row, name)
    return "not measured" if value is None else f"{value:.3g}"
