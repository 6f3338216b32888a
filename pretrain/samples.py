"""Samples as worker processes make them: all crops of one image with what was drawn for them, and masks.

Everything about a sample is drawn from (seed, epoch, sample, crop), so nothing depends on which process makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from torch.utils.data import Dataset

from ibot_eval.data.epochs import MASKS, SAMPLE, Key, load_or_replace
from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import ConfigError, UserError
from pretrain.augment import Augmentation, crop
from pretrain.masking import Masking

MaskCrops = Literal["global", "one-global", "all"]


@dataclass(frozen=True)
class Arrays:
    """Of one image, or of a batch, where images are the second axis of crops and masks. Arrays, since they come through
    a pipe: see ibot_eval.data.loading."""

    globals: np.ndarray
    locals: np.ndarray
    global_changes: np.ndarray
    local_changes: np.ndarray
    global_masks: np.ndarray
    local_masks: np.ndarray
    boxes: np.ndarray
    index: np.ndarray
    """int64, of the image that is seen."""
    label: np.ndarray
    """int64, its label."""
    replaced: np.ndarray
    """bool, whether it stands for another one."""


class Samples(Dataset[Arrays | UserError]):
    """Errors travel as values, since the loader turns exceptions of workers into text with their traceback."""

    def __init__(
        self,
        split: ImageSplit,
        augmentation: Augmentation,
        masking: Masking | None,
        mask_crops: MaskCrops,
        mask_cell: int,
        seed: int,
        skip: bool,
    ) -> None:
        self.split, self.augmentation, self.masking, self.seed, self.skip = split, augmentation, masking, seed, skip
        self.masked_globals = self.masked_locals = 0
        self.global_grid = self.local_grid = (0, 0)
        if masking is not None:
            self.masked_globals = 1 if mask_crops == "one-global" else augmentation.global_crops
            self.global_grid = _grid("global", augmentation.global_size, mask_cell)
            if mask_crops == "all" and augmentation.local_crops:
                self.masked_locals = augmentation.local_crops
                self.local_grid = _grid("local", augmentation.local_size, mask_cell)

    def __getitem__(self, key: Key) -> Arrays | UserError:
        epoch, asked = key
        try:
            image, index = load_or_replace(self.split, key, self.seed, self.skip)
        except UserError as error:
            return error
        a = self.augmentation
        cropped = crop(image, a, [self._rng(SAMPLE, epoch, asked, i) for i in range(a.crops)])
        return Arrays(
            cropped.globals,
            cropped.locals,
            cropped.changes[: a.global_crops],
            cropped.changes[a.global_crops :],
            self._masks(epoch, asked, range(a.global_crops), self.masked_globals, self.global_grid),
            self._masks(epoch, asked, range(a.global_crops, a.crops), self.masked_locals, self.local_grid),
            cropped.boxes,
            np.array(index, np.int64),
            np.array(self.split.labels[index], np.int64),
            np.array(index != asked),
        )

    def _masks(self, epoch: int, asked: int, crops: range, masked: int, grid: tuple[int, int]) -> np.ndarray:
        masks = np.zeros((len(crops), *grid), bool)
        if self.masking is not None:
            for place, i in enumerate(crops[:masked]):
                masks[place] = self.masking.sample(self._rng(MASKS, epoch, asked, i), grid, epoch)
        return masks

    def _rng(self, kind: int, *numbers: int) -> np.random.Generator:
        return np.random.default_rng((kind, self.seed, *numbers))


def _grid(kind: str, size: int, cell: int) -> tuple[int, int]:
    if size % cell:
        raise ConfigError(
            f"{kind} crops of {size} pixels do not divide into mask cells of {cell}",
            todo=f"use a multiple of {cell} for the size of {kind} crops",
        )
    return size // cell, size // cell


def collate(samples: list[Arrays | UserError]) -> Arrays | UserError:
    good = []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        good.append(sample)
    parts = {field.name: [getattr(sample, field.name) for sample in good] for field in fields(Arrays)}
    # Numbers have no axis of crops before that of images.
    return Arrays(**{name: np.stack(arrays, axis=min(1, arrays[0].ndim)) for name, arrays in parts.items()})
