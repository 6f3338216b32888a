"""Cells of an image that change places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ibot_eval.robustness import draws
from ibot_eval.robustness.config import Grid
from ibot_eval.robustness.sweep import Damaged


def shuffled(images: Tensor, grid: Grid, orders: Tensor) -> Tensor:
    """Images whose cells have changed places.

    Args:
        images: (B, C, H, W); the grid's rows divide H and its columns W.
        grid: rows and columns.
        orders: (B, rows * columns) int64, a permutation for each image: which cell comes to each place, rows first.

    Returns:
        of the same shape, the same pixels.

    Raises:
        ValueError: a grid that does not divide the image.
    """
    b, c, height, width = images.shape
    rows, columns = grid
    if height % rows or width % columns:
        raise ValueError(f"{height}x{width} pixels cannot be cut into {rows}x{columns} equal cells")
    cells = images.unflatten(3, (columns, -1)).unflatten(2, (rows, -1)).permute(0, 2, 4, 1, 3, 5).flatten(3)
    moved = cells.flatten(1, 2)[torch.arange(b, device=images.device)[:, None], orders]
    moved = moved.view(b, rows, columns, c, height // rows, width // columns)
    return moved.permute(0, 3, 1, 4, 2, 5).reshape(b, c, height, width)


def fitting_size(side: int, grid: Grid) -> tuple[int, int]:
    """Height and width nearest to ``side`` that the grid divides; of two equally near, the larger."""
    rows, columns = (max(1, (2 * side + n) // (2 * n)) * n for n in grid)
    return rows, columns


def shuffle(images: Tensor, grid: Grid, indices: Tensor, *seeds: int) -> Tensor:
    """Images shuffled each by its own draw. 1x1 gives ``images`` itself.

    An image that the grid does not divide is resized to the nearest size that it does, shuffled, and resized back
    (bilinear, antialiased), so that the network gets the size it is tested at.

    Args:
        images: (B, C, H, H) float.
        grid: rows and columns.
        indices: (B,) int64 of the images in their split.
        seeds: of the draw; the grid is one more.
    """
    if grid == (1, 1):
        return images
    orders = draws.permutations(indices, grid[0] * grid[1], *seeds, *grid).to(images.device)
    size = fitting_size(images.shape[-1], grid)
    if size == tuple(images.shape[-2:]):
        return shuffled(images, grid, orders)
    resized = F.interpolate(images, size, mode="bilinear", antialias=True)
    return F.interpolate(shuffled(resized, grid, orders), images.shape[-2:], mode="bilinear", antialias=True)


@dataclass(frozen=True)
class Shuffles:
    """As :class:`ibot_eval.robustness.sweep.Damage`: grids within repeats."""

    grids: Sequence[Grid]
    seed: int = 0
    repeats: int = 1

    def __len__(self) -> int:
        return self.repeats * len(self.grids)

    def __call__(self, images: Tensor, indices: Tensor) -> Iterator[Damaged]:
        """Each grid of each repeat. Arguments as for :func:`shuffle`."""
        for repeat in range(self.repeats):
            for grid in self.grids:
                yield Damaged(shuffle(images, grid, indices, self.seed, repeat))
