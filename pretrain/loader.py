"""Batches of crops and masks for every step of a run, made by worker processes.

What a sample looks like depends on (seed, epoch, sample, crop) alone: not on the number of workers, on the step that a
run was resumed from, or on how many ranks share the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ibot_eval.data.epochs import EpochOrder, steps_per_epoch, stream_batches
from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import UserError
from pretrain.augment import Augmentation
from pretrain.device_augment import Changes, apply
from pretrain.masking import Masked, Masking, masked_positions
from pretrain.samples import Arrays, MaskCrops, Samples, collate

# Lists of masked tokens are padded to multiples of this: little work for nothing even in small batches.
_MASKED_MULTIPLE = 16


@dataclass(frozen=True)
class CropBatch:
    """What one rank needs for one step, G global and L local crops of B images. Crops come before images."""

    globals: Tensor
    """(G, B, 3, S, S) uint8."""
    locals: Tensor
    """(L, B, 3, s, s) uint8; L may be 0."""
    global_changes: Changes
    """Of the G * B global crops, for :func:`finish`."""
    local_changes: Changes
    global_masks: Tensor | None
    """(G * B, h, w) bool; None without masking."""
    global_masked: Masked | None
    """The True places of ``global_masks``."""
    local_masks: Tensor | None
    """(L * B, h', w') bool, only where local crops are masked too."""
    local_masked: Masked | None
    boxes: Tensor
    """(G * B, 5) float32: left, top, width and height of the global crops in pixels of their image; 1 if flipped."""
    indices: Tensor
    """(B,) int64, indices into the split of the images seen, replacements among them."""
    labels: Tensor
    """(B,) int64 of these images, -1 where unlabelled."""
    replaced: int
    """Images of the batch that could not be decoded and that others stand for."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CropBatch:
        """The same on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> CropBatch:
        """The same in page-locked memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> CropBatch:
        def mapped(value: Any) -> Any:
            if isinstance(value, Masked):
                return Masked(function(value.index), function(value.weight), value.count)
            if isinstance(value, Changes):
                return value.map(function)
            return function(value) if isinstance(value, Tensor) else value

        return CropBatch(**{f.name: mapped(getattr(self, f.name)) for f in fields(self)})


def crop_loader(
    split: ImageSplit,
    augmentation: Augmentation,
    masking: Masking | None,
    *,
    mask_crops: MaskCrops = "global",
    mask_cell: int = 16,
    batch_size: int,
    accumulate: int = 1,
    seed: int,
    epochs: int,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    bad_images: Literal["stop", "skip"] = "stop",
    pin_memory: bool = False,
) -> Generator[CropBatch, None, None]:
    """One rank's batches from number ``start_step`` to the end of the run, by one set of workers.

    Every epoch visits the images in an order of its own, the same for all ranks, each of which takes its part of every
    batch. Wrap the loop in :func:`ibot_eval.data.loading.explain_worker_death`.

    Args:
        split: where images come from; labels are not needed.
        augmentation: the crops.
        masking: None for no masks at all.
        mask_crops: 'global' masks all global crops, 'one-global' the first of each image, 'all' the local ones too.
        mask_cell: side of a mask's cell, pixels; must divide the sides of the crops that are masked.
        batch_size: images per rank and batch.
        accumulate: batches that make one optimiser step; an epoch has a whole number of such steps.
        seed: at least 0; of order, crops and masks.
        epochs: of the whole run.
        start_step: batches already done, those of earlier epochs included.
        rank: of this process.
        world_size: number of processes.
        workers: decoding processes, each of one thread; 0 decodes here.
        bad_images: 'stop' raises at the first image that cannot be decoded; 'skip' puts another image in its place,
            always the same one for this seed, epoch and image.
        pin_memory: page-locked memory, for faster copies to a GPU; ignored without one.

    Raises:
        ConfigError: fewer images than a batch, or a crop that does not divide into cells.
        BadImage: with 'stop'; raised in this process and names the file.
        DataError: a file that may not be read, a worker process that was killed, or with 'skip' no image to be found
            that can be decoded.
    """
    steps = accumulate * steps_per_epoch(len(split), batch_size * accumulate, world_size)
    samples = Samples(split, augmentation, masking, mask_crops, mask_cell, seed, skip=bad_images == "skip")
    order = EpochOrder(len(split), steps, batch_size, seed, range(start_step, epochs * steps), rank, world_size)
    return stream_batches(samples, order, _pack, workers=workers, pin_memory=pin_memory)


def finish(batch: CropBatch, augmentation: Augmentation) -> tuple[Tensor, Tensor | None]:
    """The crops as the networks take them; all arithmetic is on the device of the batch, and nothing waits for it.

    Args:
        batch: from :func:`crop_loader`.
        augmentation: the one that the loader had.

    Returns:
        (G * B, 3, S, S) and (L * B, 3, s, s) float32, normalised, all images of the first crop first; None for no local
        crops.
    """
    # Blurring is a convolution, and autocast would round its results to the 8 bits of bfloat16.
    with torch.no_grad(), torch.autocast(batch.globals.device.type, enabled=False):
        images = apply(batch.globals.flatten(0, 1), batch.global_changes, augmentation)
        if not len(batch.locals):
            return images, None
        return images, apply(batch.locals.flatten(0, 1), batch.local_changes, augmentation)


@dataclass(frozen=True)
class _Packed:
    """A batch as it comes through the pipe, of which nothing is a tensor."""

    arrays: Arrays

    def pin_memory(self) -> CropBatch:
        return self.unpack().pin()

    def unpack(self) -> CropBatch:
        a = self.arrays
        global_masks, global_masked = _masks(a.global_masks)
        local_masks, local_masked = _masks(a.local_masks)
        return CropBatch(
            globals=torch.from_numpy(a.globals),
            locals=torch.from_numpy(a.locals),
            global_changes=Changes.plan(a.global_changes),
            local_changes=Changes.plan(a.local_changes),
            global_masks=global_masks,
            global_masked=global_masked,
            local_masks=local_masks,
            local_masked=local_masked,
            boxes=torch.from_numpy(a.boxes.reshape(-1, a.boxes.shape[-1])),
            indices=torch.from_numpy(a.index),
            labels=torch.from_numpy(a.label),
            replaced=int(a.replaced.sum()),
        )


def _pack(samples: list[Arrays | UserError]) -> _Packed | UserError:
    collated = collate(samples)
    return collated if isinstance(collated, UserError) else _Packed(collated)


def _masks(masks: np.ndarray) -> tuple[Tensor | None, Masked | None]:
    if not masks.size:
        return None, None
    flat = masks.reshape(-1, *masks.shape[-2:])
    return torch.from_numpy(flat), masked_positions(flat, _MASKED_MULTIPLE)
