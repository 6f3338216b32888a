"""Which squares of an image are dropped: any of them, those of most attention, or those of least.

A mask is bool, True where a square is dropped. Masks are nested: a level drops what all lower levels drop. Squares lie
on a grid that may be shifted against the image's corner; what a shift pushes over one border comes in at the opposite
one, so that every square has its full number of pixels and shares of squares are shares of the image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def random_masks(ranks: Tensor, levels: Sequence[int]) -> Tensor:
    """(L, B, N) bool. At level p, floor(p N / 100) squares are dropped, as published (tenths of 196).

    Args:
        ranks: (B, N) int64, when each square's turn comes: a permutation per image.
        levels: percent of the squares.
    """
    counts = [level * ranks.shape[1] // 100 for level in levels]
    return ranks < torch.tensor(counts, device=ranks.device)[:, None, None]


def attention_masks(attention: Tensor, levels: Sequence[int], *, most: bool) -> Tensor:
    """(L, B, N) bool, by attention's mass.

    Squares are sorted by attention, and their shares of it added up from the least. At level p, ``most`` drops squares
    whose sum is above 1 - p / 100 (the published 'salient' at lambda = p / 100); otherwise those whose sum is at most
    p / 100 are dropped (the published 'non-salient' at lambda = 1 - p / 100). The share of squares that this takes is
    another, :func:`information_loss`.

    Args:
        attention: (B, N) float, not negative, with a positive sum.
        levels: percent of the mass.
        most: whether squares of most attention go, else those of least.
    """
    # Sums of many small shares; MPS has no float64.
    exact = attention.to(torch.float32 if attention.device.type == "mps" else torch.float64)
    ordered, order = (exact / exact.sum(1, keepdim=True)).sort(dim=1, stable=True)
    # Rounding must not lift the last sum above all of the mass.
    reached = torch.empty_like(ordered).scatter_(1, order, ordered.cumsum(1).clamp(max=1))
    shares = [1 - level / 100 if most else level / 100 for level in levels]
    above = reached > reached.new_tensor(shares)[:, None, None]
    # At level 0 nothing goes, not even squares without attention.
    return above if most else ~above & (torch.tensor(levels, device=above.device) > 0)[:, None, None]


def information_loss(masks: Tensor) -> Tensor:
    """(…, N) bool -> (…) float32: the share of the image that is dropped, 0 to 1."""
    return masks.float().mean(-1)


def shifted_attention(attention: Tensor, offsets: Tensor, side: int) -> Tensor:
    """Attention on the squares of a shifted grid: each has parts of up to four squares of the unshifted one.

    Args:
        attention: (B, h, w) float.
        offsets: (B, 2) int64, rows and columns in pixels, 0 to ``side`` - 1.
        side: of a square, in pixels.

    Returns:
        (B, h, w) with the same sums.
    """
    down, right = (offsets[:, axis, None, None].to(attention) / side for axis in (0, 1))
    attention = (1 - down) * attention + down * attention.roll(-1, 1)
    return (1 - right) * attention + right * attention.roll(-1, 2)


def to_pixels(masks: Tensor, side: int, offsets: Tensor | None = None) -> Tensor:
    """(B, h, w) bool of squares -> (B, 1, H, W) of pixels, H = h * ``side``.

    Args:
        side: of a square, in pixels.
        offsets: (B, 2) int64, how many pixels each image's grid is shifted down and right.
    """
    if offsets is None:
        return masks.repeat_interleave(side, 1).repeat_interleave(side, 2)[:, None]
    height, width = masks.shape[1] * side, masks.shape[2] * side
    rows, columns = (
        (torch.arange(length, device=masks.device) - offsets[:, axis, None]) % length // side
        for axis, length in enumerate((height, width))
    )
    images = torch.arange(len(masks), device=masks.device)
    return masks[images[:, None, None], rows[:, :, None], columns[:, None, :]][:, None]


def resampled(attention: Tensor, rows: int, columns: int) -> Tensor:
    """Attention on another grid over the same image: each square gets its share of the mass of those it overlaps.

    Args:
        attention: (B, h, w) float.

    Returns:
        (B, rows, columns) with the same sums; ``attention`` itself where the grid is the same.
    """
    if tuple(attention.shape[1:]) == (rows, columns):
        return attention
    down, across = (_overlaps(a, b, attention) for a, b in ((attention.shape[1], rows), (attention.shape[2], columns)))
    return down @ attention @ across.T


def _overlaps(old: int, new: int, like: Tensor) -> Tensor:
    """(new, old): which share of each of ``old`` equal intervals lies in each of ``new`` equal ones."""
    # In units of 1 / (old * new) of the whole all ends are integers.
    a, b = torch.arange(old, device=like.device) * new, torch.arange(new, device=like.device) * old
    common = torch.minimum(a + new, b[:, None] + old) - torch.maximum(a, b[:, None])
    return common.clamp(min=0).to(like) / new
