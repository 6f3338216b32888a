"""What a layout reader is told, and what it hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from ibot_eval.errors import CheckpointError
from ibot_eval.models.positions import Grid, ResizeRule

Tensors = dict[str, Tensor]
Triple = tuple[float, float, float]


HALF = (0.5, 0.5, 0.5)
HALF_NOTE = "inputs are normalised with 0.5 / 0.5 as in BEiT; for BEiT v2 give ImageNet's --mean and --std"


@dataclass(frozen=True)
class Hints:
    """What is known besides the tensors: from flags, a config.json beside the file, or the file's metadata."""

    heads: int | None = None
    patch_size: int | None = None
    grid: Grid | None = None
    eps: float | None = None
    """Of every LayerNorm."""
    mean: Triple | None = None
    std: Triple | None = None
    family: str | None = None
    arch: str | None = None
    """timm name of the network."""

    def over(self, other: Hints) -> Hints:
        """These hints, completed by ``other``."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        return replace(other, **own)


@dataclass
class Blueprint:
    """A network without weights, and the tensors to fill it with."""

    net: nn.Module
    """On the meta device; no classifier."""
    tensors: Tensors
    """Named as in ``net``; may hold names that ``net`` does not know."""
    family: str
    grid: Grid | None = None
    """Rows and columns of patches it was trained with, where known."""
    mean: Triple | None = None
    std: Triple | None = None
    notes: list[str] = field(default_factory=list)
    resize: ResizeRule | None = None
    """How position embeddings are resized, where the file tells more than its family."""


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio from which timm, which multiplies and truncates, gets ``hidden`` again.

    A hundredth keeps rounding from losing a unit, at eight times the width too (Swin's last stage).
    """
    return (hidden + 0.01) / width


def in_beits_layout(tensors: Mapping[str, Tensor]) -> bool:
    """Whether query and value have biases of their own: BEiT's code, whose inputs are normalised with 0.5 / 0.5."""
    return any(name.endswith(".attn.q_bias") for name in tensors)


def need(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """``tensors[name]``; raises CheckpointError where it is missing."""
    if name not in tensors:
        raise CheckpointError(f"{name} is missing from the checkpoint", todo="use the whole file, or another --key")
    return tensors[name]


def number_of(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """How many consecutive ``prefix.0, prefix.1 …`` there are.

    Raises:
        CheckpointError: one in between is missing.
    """
    found = {int(name[len(prefix) :].split(".")[0]) for name in tensors if _numbered(name, prefix)}
    gaps = sorted(set(range(max(found, default=-1) + 1)) - found)
    if gaps:
        raise CheckpointError(
            f"block {gaps[0]} of {max(found) + 1} is missing from the checkpoint",
            where=f"{prefix}{gaps[0]}",
            todo="use the whole file; part of it was lost or left out",
        )
    return len(found)


def _numbered(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].split(".")[0].isdigit()


def factor_pairs(count: int) -> list[Grid]:
    """All (rows, columns) with ``rows * columns == count``."""
    return [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]


def square(count: int) -> Grid | None:
    """(n, n) when ``count`` is n * n, else None."""
    side = round(count**0.5)
    return (side, side) if side and side * side == count else None
