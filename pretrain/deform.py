"""Geometric deformation of crops in batch on the device: for drawings such as digits, which keep their meaning when
they are turned, sheared or bent a little. Photographs need none of it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

ELASTIC_GRID = 4
"""Displacements are drawn on a grid of this side and interpolated between (after Simard et al. 2003)."""

DEFORMATION = np.dtype(
    [
        ("angle", "f4"),  # degrees, counter-clockwise
        ("shift", "f4", (2,)),  # to the right and down, fractions of the side
        ("shear", "f4"),  # rows' shift to the right per unit down
        ("hidden", "f4", (2,)),  # what is not shown of width and height, fractions; below 0 there is room around
        ("place", "f4", (2,)),  # where in the crop that part lies, -1 to 1
        ("bend", "f4", (2, ELASTIC_GRID, ELASTIC_GRID)),  # where pixels are looked up, to the right and down, fractions
    ]
)
"""What is drawn for one crop."""


class Moves(NamedTuple):
    """Of n crops."""

    matrices: Tensor
    """(n, 2, 3) float32: from places in the result to places in the crop, both from -1 to 1."""
    bends: Tensor | None
    """(n, 2, ELASTIC_GRID, ELASTIC_GRID) float32 in the same units; None where nothing is bent."""

    @classmethod
    def plan(cls, drawn: np.ndarray) -> Moves | None:
        """From (n,) DEFORMATION; None where no crop is deformed."""
        bent = bool(drawn["bend"].any())
        if not bent and not any(drawn[name].any() for name in ("angle", "shift", "shear", "hidden")):
            return None
        return cls(torch.from_numpy(_matrices(drawn)), torch.from_numpy(2 * drawn["bend"]) if bent else None)


def move(x: Tensor, moves: Moves) -> Tensor:
    """Deforms crops, bilinear; beyond the border the border's own pixels go on.

    Args:
        x: (n, 3, S, S) values 0 to 255.
        moves: of these crops, on the device of ``x``.

    Returns:
        Whole values.
    """
    grid = F.affine_grid(moves.matrices, list(x.shape), align_corners=False)
    if moves.bends is not None:
        field = F.interpolate(moves.bends, size=x.shape[-2:], mode="bicubic", align_corners=False)
        grid = grid + field.permute(0, 2, 3, 1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False).add_(0.5).floor_()


def _matrices(drawn: np.ndarray) -> np.ndarray:
    angle = drawn["angle"] * (math.pi / 180)
    cos, sin = np.cos(angle), np.sin(angle)
    # Rows point down, so this looks the pixels up clockwise, which turns the picture counter-clockwise.
    turn = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)
    lean = np.broadcast_to(np.eye(2, dtype=np.float32), turn.shape).copy()
    lean[:, 0, 1] = -drawn["shear"]
    look_up = turn @ lean * (1 - drawn["hidden"][:, :, None])
    offset = (np.maximum(drawn["hidden"], 0) * drawn["place"])[..., None] - look_up @ (2 * drawn["shift"])[..., None]
    return np.concatenate([look_up, offset], -1).astype(np.float32)
