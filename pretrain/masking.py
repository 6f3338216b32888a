"""Which patch tokens of a crop are hidden from the student, and the padded lists by which the losses find them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ibot_eval.errors import ConfigError

_ATTEMPTS = 10
_LOWEST_ASPECT = 0.3


@dataclass(frozen=True)
class Masking:
    """Random masks with the distribution of the iBOT code (blockwise as in BEiT, or scattered)."""

    ratios: tuple[float, ...] = (0.0, 0.3)
    """Fractions of the tokens to mask; each crop takes one of them at random."""
    variances: tuple[float, ...] = (0.0, 0.2)
    """Half-width of the uniform range around each ratio: 0.3 with 0.2 masks 0.1 to 0.5 of the tokens."""
    shape: Literal["block", "random"] = "block"
    """block: rectangles until the ratio is reached; random: single tokens."""
    start_epoch: int = 0
    """Epochs before this one (counted from 0) mask nothing."""
    at_least_one: bool = False
    """Mask one token where blocks found no room although the ratio drawn is above 0; small ratios often leave none."""

    def __post_init__(self) -> None:
        if not self.ratios or len(self.ratios) != len(self.variances):
            raise ConfigError(
                f"{len(self.ratios)} mask ratios with {len(self.variances)} variances",
                todo="give as many variances as ratios, at least one",
            )
        for ratio, variance in zip(self.ratios, self.variances, strict=True):
            if not (variance >= 0 and ratio - variance >= 0 and ratio + variance <= 1):
                raise ConfigError(
                    f"mask ratio {ratio:g} with variance {variance:g} leaves the range 0 to 1",
                    todo="keep ratio - variance at or above 0 and ratio + variance at or below 1",
                )
        if self.shape not in ("block", "random"):
            raise ConfigError(f"unknown mask shape {self.shape!r}", todo="use block or random")
        if self.start_epoch < 0:
            raise ConfigError(f"masking cannot start at epoch {self.start_epoch}", todo="use 0 or more")

    def sample(self, rng: np.random.Generator, grid: tuple[int, int], epoch: int) -> np.ndarray:
        """The mask of one crop.

        Args:
            rng: where all its randomness comes from.
            grid: tokens per column and per row.
            epoch: counted from 0, for ``start_epoch``.

        Returns:
            ``grid`` bool, True where the token is masked.
        """
        if epoch < self.start_epoch:
            return np.zeros(grid, bool)
        pair = int(rng.integers(len(self.ratios)))
        ratio = self.ratios[pair] + self.variances[pair] * (2 * rng.random() - 1)
        budget = ratio * grid[0] * grid[1]
        mask = _scattered(rng, grid, int(budget)) if self.shape == "random" else _blocks(rng, grid, budget)
        if self.at_least_one and ratio > 0 and not mask.any():
            mask.flat[rng.integers(mask.size)] = True
        return mask


def _scattered(rng: np.random.Generator, grid: tuple[int, int], count: int) -> np.ndarray:
    mask = np.zeros(grid, bool)
    mask.flat[rng.permutation(mask.size)[:count]] = True
    return mask


def _blocks(rng: np.random.Generator, grid: tuple[int, int], budget: float) -> np.ndarray:
    height, width = grid
    mask = np.zeros(grid, bool)
    # Below this area the published code draws between the room left and this, so that small remainders are often
    # given up: part of the distribution.
    smallest = (min(grid) // 3) ** 2
    count = 0
    while count < budget:
        for _ in range(_ATTEMPTS):
            area = smallest + (budget - count - smallest) * rng.random()
            aspect = math.exp(math.log(_LOWEST_ASPECT) * (2 * rng.random() - 1))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h >= height or w >= width:
                continue
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            block = mask[top : top + h, left : left + w]
            new = h * w - int(np.count_nonzero(block))
            if 0 < new <= budget - count:
                block[:] = True
                count += new
                break
        else:
            break
    return mask


class Masked(NamedTuple):
    """The masked tokens of several crops as a list of padded length, so that no device has to count them."""

    index: Tensor
    """(M,) int64, places in the flattened (crops, h, w), ascending; 0 in the padding."""
    weight: Tensor
    """(M,) float32: 1 / (masked tokens of the crop × crops), 0 in the padding. A sum of token losses with these weights
    is the mean over a crop's masked tokens, then over crops, where a crop without any counts as zero (iBOT, eq. 2 with
    the average of its code)."""
    count: int
    """Masked tokens without the padding."""


def masked_positions(masks: np.ndarray, multiple: int) -> Masked:
    """Where ``masks`` are True, padded to a multiple of ``multiple`` and to one multiple at least.

    The length is never 0, so that a batch without a masked token still runs through the head and gives its parameters
    gradients; and it takes few values, so that compiled code is seldom compiled anew.

    Args:
        masks: (crops, h, w) bool.
        multiple: at least 1.
    """
    places = np.flatnonzero(masks)
    per_crop = np.count_nonzero(masks.reshape(len(masks), -1), axis=1)
    length = max(1, -(-len(places) // multiple)) * multiple
    index = np.zeros(length, np.int64)
    weight = np.zeros(length, np.float32)
    index[: len(places)] = places
    weight[: len(places)] = np.repeat(1 / (np.maximum(per_crop, 1) * len(masks)), per_crop)
    return Masked(torch.from_numpy(index), torch.from_numpy(weight), len(places))
