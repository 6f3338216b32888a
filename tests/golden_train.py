"""Six steps of the published training loop, three times (../shared/golden/train_*; the copy is in tests/golden).

The copy keeps what the variants share (crops, masks, start weights) once, and end weights as differences from the
start: in half precision where that costs at most 5e-6, else in single. ``python -m tests.golden_train`` makes it anew.

``separate_student_head`` starts from a teacher whose one last layer holds the student's *patch* layer: the published
code loads the student's state into a teacher whose two last layers are one tensor, and the second load wins.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = ("shared_head", "separate_student_head", "mim_only_weight")
ROUNDING = 5e-6

State = dict[str, Tensor]


class GoldenStep(NamedTuple):
    global_crops: list[Tensor]
    """Two of float32 (3, 3, 64, 64)."""
    local_crops: list[Tensor]
    """Four of float32 (3, 3, 32, 32)."""
    masks: list[Tensor]
    """Of the two global crops: bool (3, 8, 8)."""
    centre_cls: Tensor
    """(1, 64), after the step."""
    centre_patch: Tensor
    """(1, 1, 64), after the step."""


@dataclass(frozen=True)
class GoldenTrajectory:
    """Weights by published name (``backbone.*``, ``head.*``); ``head.last_layer2`` only where it is one of its own.

    ``rows`` hold each step's losses (weighted), schedules and largest gradient norm; ``settings`` is golden.json's
    ``train`` with ``cls_weight`` and ``heads`` added. Tensors are copies, free to be changed.
    """

    start_student: State
    start_teacher: State
    steps: list[GoldenStep]
    end_student: State
    end_teacher: State
    rows: list[dict[str, float]]
    settings: dict[str, Any]


def golden(variant: str) -> GoldenTrajectory:
    """One of :data:`VARIANTS`."""
    tensors, text = _copy()
    start = _under(tensors, "start/")
    states = {}
    for role in ("student", "teacher"):
        change = _under(tensors, f"{variant}/{role}6/")
        first = {name: start[name] for name in change if name in start} | _under(tensors, f"{variant}/{role}0/")
        states[role] = first, {name: first[name] + change[name] for name in change}
    steps = []
    for i in range(text["settings"]["steps"]):
        crops = [tensors[f"step{i}/crop{j}"].float() for j in range(2 + text["settings"]["local_crops"])]
        masks = [tensors[f"step{i}/mask{j}"].clone() for j in range(2)]
        centres = [tensors[f"{variant}/step{i}/center_{token}"].clone() for token in ("cls", "patch")]
        steps.append(GoldenStep(crops[:2], crops[2:], masks, *centres))
    return GoldenTrajectory(
        start_student=states["student"][0],
        start_teacher=states["teacher"][0],
        steps=steps,
        end_student=states["student"][1],
        end_teacher=states["teacher"][1],
        rows=[dict(row) for row in text["rows"][variant]],
        settings=text["settings"] | {"cls_weight": 0.0 if variant == "mim_only_weight" else 1.0, "heads": 3},
    )


def unaliased(state: State) -> State:
    """Without a ``head.last_layer2`` that only repeats ``head.last_layer``."""
    pairs = [(f"head.last_layer.{part}", f"head.last_layer2.{part}") for part in ("weight_g", "weight_v")]
    if all(torch.equal(state[one], state[two]) for one, two in pairs):
        return {name: tensor for name, tensor in state.items() if not name.startswith("head.last_layer2.")}
    return state


def make(shared: Path) -> tuple[State, dict[str, Any]]:
    """The copy's tensors and text from the folder of the whole files."""
    text = json.loads((shared / "golden.json").read_text())
    files = {variant: load_file(shared / f"train_{variant}.safetensors") for variant in VARIANTS}
    first = files[VARIANTS[0]]
    start = unaliased(_under(first, "student0/"))
    made = {f"start/{name}": tensor for name, tensor in start.items()}
    inputs = {name: tensor for name, tensor in first.items() if "/crop" in name or "/mask" in name}
    made |= inputs
    for variant, tensors in files.items():
        assert all(tensors[name].equal(tensor) for name, tensor in inputs.items())
        made |= {f"{variant}/{name}": tensor for name, tensor in tensors.items() if "/center_" in name}
        for role in ("student", "teacher"):
            before, after = (unaliased(_under(tensors, f"{role}{i}/")) for i in (0, 6))
            for name, tensor in before.items():
                if name not in start or not torch.equal(tensor, start[name]):
                    made[f"{variant}/{role}0/{name}"] = tensor
                change = after[name] - tensor
                rounded = change.half()
                exact = (rounded.float() - change).abs().max() > ROUNDING
                made[f"{variant}/{role}6/{name}"] = change if exact else rounded
    rows = {variant: text[f"train_{variant}"] for variant in VARIANTS}
    return made, {"settings": text["train"], "rows": rows}


@cache
def _copy() -> tuple[State, dict[str, Any]]:
    return load_file(GOLDEN / "train.safetensors"), json.loads((GOLDEN / "train.json").read_text())


def _under(tensors: State, prefix: str) -> State:
    return {name[len(prefix) :]: tensor.clone() for name, tensor in tensors.items() if name.startswith(prefix)}


if __name__ == "__main__":
    tensors, text = make(Path(__file__).parent.parent.parent / "shared" / "golden")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, GOLDEN / "train.safetensors")
    (GOLDEN / "train.json").write_text(json.dumps(text, indent=1) + "\n")
