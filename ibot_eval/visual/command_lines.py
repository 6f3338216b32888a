"""The command line that draws a view again, as one line that a shell takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from ibot_eval.settings import CheckpointSettings, DataSettings
from ibot_eval.visual.attention import MASS
from ibot_eval.visual.correspondence import TOP, Similarity
from ibot_eval.visual.pattern_bank import PatternBank
from ibot_eval.visual.pictures import WHOLE, Box, Source

SIDE = 224


def draw_attention(
    checkpoint: CheckpointSettings,
    sources: Sequence[Source],
    *,
    side: int = SIDE,
    block: int = -1,
    query: tuple[int, int] | None = None,
    mass: float = MASS,
    heads: Sequence[int] | None = None,
    style: Literal["heads", "overlay", "activation"] = "heads",
    smooth: bool = False,
) -> str:
    """`ibot-eval draw attention …`. Uploads are called by their names: they have to be saved first."""
    flags = _view_flags(side, block) | {
        "query": query,
        "mass": None if mass == MASS else mass,
        "show-heads": None if heads is None else tuple(heads),
        "style": None if style == "heads" else style,
        "smooth": smooth,
    }
    return _line("draw attention", _named(sources), flags | changed(checkpoint))


def draw_correspondence(
    checkpoint: CheckpointSettings,
    left: Source,
    right: Source,
    *,
    side: int = SIDE,
    block: int = -1,
    similarity: Similarity = "dot",
    mutual: bool = False,
    top: int = TOP,
    left_box: Box | None = None,
    right_box: Box | None = None,
    flip: bool = False,
    patch: tuple[int, int] | None = None,
) -> str:
    """`ibot-eval draw correspondence …`; two views where both sources are one picture.

    Args:
        left_box, right_box: parts of the pictures; None or all of it for the whole.
        flip: whether the right view is mirrored.
        patch: only the match of this left patch.
    """
    boxes = {
        name: None if box is None or tuple(box) == WHOLE else tuple(round(value, 4) for value in box)
        for name, box in (("left-box", left_box), ("right-box", right_box))
    }
    flags = _view_flags(side, block) | {
        "similarity": None if similarity == "dot" else similarity,
        "mutual": mutual,
        "top": None if top == TOP else top,
        **boxes,
        "flip": flip,
        "query": patch,
    }
    return _line("draw correspondence", _named([left, right]), flags | changed(checkpoint))


def draw_pca(
    checkpoint: CheckpointSettings,
    sources: Sequence[Source],
    *,
    side: int = SIDE,
    block: int = -1,
    foreground: bool = True,
) -> str:
    """`ibot-eval draw pca …`."""
    flags = _view_flags(side, block) | {"no-foreground": not foreground}
    return _line("draw pca", _named(sources), flags | changed(checkpoint))


def draw_patterns(
    checkpoint: CheckpointSettings, bank: PatternBank, prototypes: Sequence[int] | None = None, **settings: Any
) -> str:
    """`ibot-eval draw patterns …`.

    Args:
        prototypes: those drawn; None for the largest.
        settings: other flags by name, underscores for dashes; None and False leave one out.
    """
    flags: dict[str, Any] = {"patterns": bank.path or "patterns.safetensors"}
    flags["prototypes"] = None if prototypes is None else tuple(int(p) for p in prototypes)
    flags |= {name.replace("_", "-"): value for name, value in settings.items()}
    return _line("draw patterns", (), flags | changed(checkpoint))


def make_patterns(
    checkpoint: CheckpointSettings,
    data: DataSettings,
    *,
    level: Literal["patch", "cls"] = "patch",
    output: Path = Path("patterns.safetensors"),
) -> str:
    """`ibot-eval patterns …`."""
    flags = {**changed(checkpoint), **changed(data), "level": None if level == "patch" else level, "output": output}
    return _line("patterns", (), flags)


def changed(settings: Any) -> dict[str, Any]:
    """Flags for the fields of a group of settings that differ from their defaults."""
    return {
        f.name.replace("_", "-"): getattr(settings, f.name)
        for f in fields(settings)
        if getattr(settings, f.name) != f.default
    }


def _view_flags(side: int, block: int) -> dict[str, Any]:
    return {"side": None if side == SIDE else side, "block": None if block == -1 else block}


def _named(sources: Iterable[Source]) -> list[str]:
    names = [source.name if source.path is None else str(source.path) for source in sources]
    # One that begins with a dash would be read as a flag.
    return [f"./{name}" if name.startswith("-") else name for name in names]


def _line(command: str, positional: Sequence[str], flags: dict[str, Any]) -> str:
    words = ["ibot-eval", *command.split(), *positional]
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [
                f"{v:g}" if isinstance(v, float) else str(v) for v in (value if isinstance(value, tuple) else (value,))
            ]
    return shlex.join(words)
