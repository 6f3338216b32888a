"""Random numbers of an image: functions of the seeds and the image's index, whatever batch or process it is in.

Generators of torch and numpy draw for one image at a time, on the host; a counter-based generator draws for a whole
batch at once where the images lie. This one is SplitMix64's finaliser (Steele, Lea and Flood 2014, figure 12, with
Stafford's constants), applied to one number after the other and at last to a counter. Integers, so that every device
gives the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 2^64 over the golden ratio, and Stafford's 13th pair of multipliers, as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def bits(indices: Tensor, count: int, *seeds: int) -> Tensor:
    """(B, count) int64 over their whole range.

    Args:
        indices: (B,) int64 of the images in their split.
        count: numbers of an image.
        seeds: 0 to 2^63 - 1 each; other seeds, or the same in another order, give other numbers.
    """
    key = torch.zeros(1, dtype=torch.int64, device=indices.device)
    for seed in seeds:
        key = _folded(key, torch.tensor(seed, dtype=torch.int64, device=indices.device))
    counter = torch.arange(count, device=indices.device)
    return _folded(_folded(key, indices)[:, None], counter)


def permutations(indices: Tensor, count: int, *seeds: int) -> Tensor:
    """(B, count) int64: an order of 0 … count - 1 for each image. Arguments as for :func:`bits`."""
    return bits(indices, count, *seeds).argsort(dim=1, stable=True)


def uniform(indices: Tensor, count: int, *seeds: int) -> Tensor:
    """(B, count) float32 strictly between 0 and 1, in steps of 2^-23. Arguments as for :func:`bits`."""
    # Of 24 bits the half step next to 1 would round to it.
    return (_shifted(bits(indices, count, *seeds), 41).float() + 0.5) / (1 << 23)


def normal(indices: Tensor, count: int, *seeds: int) -> Tensor:
    """(B, count) float32, normally distributed, mean 0 and deviation 1, below 5.3. Arguments as for :func:`bits`."""
    return torch.special.ndtri(uniform(indices, count, *seeds))


def _folded(key: Tensor, number: Tensor) -> Tensor:
    x = key + (number + 1) * _GAMMA
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """To the right, zeros moving in from the left; torch has signed integers only."""
    return (x >> places) & ((1 << (64 - places)) - 1)
