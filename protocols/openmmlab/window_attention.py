"""Blocks of a plain Transformer at any size of image, with attention over all of it or inside of windows.

Windows make the cost of large images linear in their area (Li et al. 2022, ViTDet). Only the attention is split: drop
path still takes whole images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ibot_eval.models import BeitBackbone
from ibot_eval.models.positions import Grid
from ibot_eval.models.relative_bias import CLS_ENTRIES, resize_bias_table
from ibot_eval.models.transformer import TransformerBackbone


class BlocksAtSize:
    """The blocks of ``backbone`` for one pass over images of one size.

    In windows, patches see the patches of their own window and every prefix token ([CLS], registers). A prefix token
    sees each window by itself, and takes the mean of what the windows make of it, weighted by their patches. One window
    that covers the image is the plain block.

    Unlike in :meth:`Backbone.outputs`, gradients reach BEiT's tables of relative positions at every size.

    Args:
        backbone: a ViT family's.
        grid: rows and columns of patches.
    """

    def __init__(self, backbone: TransformerBackbone, grid: Grid) -> None:
        self.blocks: Any = backbone.net.blocks
        self.grid = grid
        self.prefix = int(backbone.has_cls) + backbone.num_registers
        self.trained_grid = backbone.trained_grid
        self.relative = isinstance(backbone, BeitBackbone)
        self.arguments = [{}] * backbone.depth if self.relative else backbone._arguments(grid)
        self.shared: Any = backbone.net.rel_pos_bias if self.relative else None
        # The same for all blocks, which would otherwise each send or keep their own.
        self._windows: dict[Grid, Windows] = {}
        self._indices: dict[Grid, Tensor] = {}
        self._matrices: tuple[Tensor, Tensor] | None = None

    def run(self, index: int, tokens: Tensor, window: int = 0) -> Tensor:
        """Tokens (B, T, D) after block ``index``; ``window`` is the side of the windows in patches, 0 for none."""
        block = self.blocks[index]
        whole = not window or (window >= self.grid[0] and window >= self.grid[1])
        if whole and not self.relative:
            return block(tokens, **self.arguments[index])
        attention = block.attn
        inner = self._biased(attention) if self.relative else self._rotated(attention)
        shape = self.grid if whole else (window, window)
        if shape not in self._windows:
            self._windows[shape] = Windows(self.grid, shape, tokens.device)
        windows = self._windows[shape]

        def split(x: Tensor, **arguments: Any) -> Tensor:
            return windows.attend(x, self.prefix, lambda *part: inner(*part, arguments))

        # For this pass only, and inside of what activation checkpointing repeats: parameters keep their names, and
        # copies of the network do not share the replacement.
        attention.forward = split
        try:
            return block(tokens, **self.arguments[index])
        finally:
            del attention.forward

    def _rotated(self, attention: Any) -> Callable[..., Tensor]:
        """Attention of a window whose patches are rotated by their places in the image (DINOv3)."""
        forward = type(attention).forward

        def run(x: Tensor, patches: Tensor, shape: Grid, arguments: dict[str, Any]) -> Tensor:
            rope = arguments.get("rope")
            if rope is None:
                return forward(attention, x, **arguments)
            parts = rope[..., patches, :]
            parts = parts.transpose(0, 1) if rope.ndim == 3 else parts.unsqueeze(1)
            repeated = parts.repeat(len(x) // len(parts), 1, 1, 1)
            return forward(attention, x, **{**arguments, "rope": repeated})

        return run

    def _biased(self, attention: Any) -> Callable[..., Tensor]:
        """Attention of a window with BEiT's relative position bias at the size of the image."""
        forward = type(attention).forward
        own = self._resized(attention.relative_position_bias_table)
        shared = None if self.shared is None else self._resized(self.shared.relative_position_bias_table)

        def run(x: Tensor, patches: Tensor, shape: Grid, arguments: dict[str, Any]) -> Tensor:
            if shape not in self._indices:
                self._indices[shape] = relative_index(self.grid, shape, x.device)
            index = self._indices[shape]
            if own is not None:
                bias = _looked_up(own, index)
                attention._get_rel_pos_bias = lambda: bias
            try:
                return forward(attention, x, shared_rel_pos_bias=None if shared is None else _looked_up(shared, index))
            finally:
                attention.__dict__.pop("_get_rel_pos_bias", None)

        return run

    def _resized(self, table: Tensor | None) -> Tensor | None:
        """:func:`resize_bias_table` as the matrix products that it amounts to, through which gradients flow."""
        if table is None or self.grid == self.trained_grid:
            return table
        if self._matrices is None:
            sides = zip(self.trained_grid, self.grid, strict=True)
            down, across = (torch.from_numpy(bias_matrix(old, new)).to(table) for old, new in sides)
            self._matrices = (down, across)
        down, across = self._matrices
        planes = table[:-CLS_ENTRIES].unflatten(0, (down.shape[1], across.shape[1]))
        resized = torch.einsum("ai,bj,ijh->abh", down, across, planes)
        return torch.cat([resized.flatten(0, 1), table[-CLS_ENTRIES:]])


class Windows:
    """Windows over a grid of patches; those at its right and bottom edge are smaller where they do not divide it.

    Args:
        grid: rows h and columns w.
        size: rows and columns of a window.
        device: of the tokens.
    """

    def __init__(self, grid: Grid, size: Grid, device: torch.device) -> None:
        self.groups = [(shape, torch.from_numpy(numbers).to(device)) for shape, numbers in _groups(grid, size)]
        self.back = torch.argsort(torch.cat([numbers.flatten() for _, numbers in self.groups]))

    def attend(self, x: Tensor, prefix: int, attention: Callable[[Tensor, Tensor, Grid], Tensor]) -> Tensor:
        """``attention`` over the patches of each window together with the prefix tokens.

        Args:
            x: (B, P + h * w, D): prefix tokens, then the patches, rows first.
            prefix: P.
            attention: takes (B * n, P + a * b, D) tokens of n windows of each image, (n, a * b) numbers of their
                patches, and (a, b); returns as many tokens.

        Returns:
            (B, P + h * w, D); prefix tokens are the mean over windows, weighted by their patches.
        """
        patches = x[:, prefix:]
        prefixed, pieces = torch.zeros_like(x[:, :prefix]), []
        for shape, numbers in self.groups:
            count, area = numbers.shape
            first = x[:, None, :prefix].expand(-1, count, -1, -1)
            tokens = torch.cat([first, patches[:, numbers]], dim=2).flatten(0, 1)
            result = attention(tokens, numbers, shape).unflatten(0, (len(x), count))
            prefixed = prefixed + result[:, :, :prefix].sum(dim=1) * (area / patches.shape[1])
            pieces.append(result[:, :, prefix:].flatten(1, 2))
        return torch.cat([prefixed, torch.cat(pieces, dim=1)[:, self.back]], dim=1)


@lru_cache(maxsize=64)
def _groups(grid: Grid, size: Grid) -> tuple[tuple[Grid, np.ndarray], ...]:
    """The windows of a grid by shape, at most four: (rows, columns) and (n, rows * columns) numbers of patches."""
    numbers = np.arange(grid[0] * grid[1]).reshape(grid)
    found: dict[Grid, list[np.ndarray]] = {}
    for top in range(0, grid[0], size[0]):
        for left in range(0, grid[1], size[1]):
            part = numbers[top : top + size[0], left : left + size[1]]
            found.setdefault((part.shape[0], part.shape[1]), []).append(part.flatten())
    return tuple((shape, np.stack(parts)) for shape, parts in found.items())


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    """(1, heads, T, T) bias from (rows, heads) and (T, T)."""
    return table[index].permute(2, 0, 1).unsqueeze(0)


def relative_index(grid: Grid, window: Grid, device: torch.device) -> Tensor:
    """Rows of a bias table of ``grid`` for [CLS] and the patches of one window: (1 + a * b, 1 + a * b) int64.

    The table is BEiT's: vertical, then horizontal distances, then [CLS] to patch, patch to [CLS], and [CLS] to itself.
    """
    rows, columns = (
        places.flatten() for places in torch.meshgrid(*(torch.arange(n, device=device) for n in window), indexing="ij")
    )
    down = rows[:, None] - rows[None] + grid[0] - 1
    across = columns[:, None] - columns[None] + grid[1] - 1
    distances = (2 * grid[0] - 1) * (2 * grid[1] - 1)
    index = torch.empty(len(rows) + 1, len(rows) + 1, dtype=torch.int64, device=device)
    index[1:, 1:] = down * (2 * grid[1] - 1) + across
    index[0, :], index[:, 0], index[0, 0] = distances, distances + 1, distances + 2
    return index


@lru_cache(maxsize=64)
def bias_matrix(old: int, new: int) -> np.ndarray:
    """(2 new - 1, 2 old - 1) float64: what BEiT's interpolation does along one side of ``old`` patches.

    Interpolating splines are linear in the values they pass through, and those over a grid are one spline per side.
    """
    # A unit step at each place in turn, constant across. The other side changes, since equal grids are left alone.
    before, across = 2 * old - 1, (2, 3)
    planes = torch.eye(before, dtype=torch.float64)[:, None].expand(-1, 2 * across[0] - 1, -1).flatten(0, 1)
    table = torch.cat([planes, torch.zeros(CLS_ENTRIES, before, dtype=torch.float64)])
    resized = resize_bias_table(table, (old, across[0]), (new, across[1]))
    return resized[:-CLS_ENTRIES].unflatten(0, (2 * new - 1, 2 * across[1] - 1))[:, 0].numpy()
