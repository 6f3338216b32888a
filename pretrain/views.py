"""From a loader's batch to what the networks see, on the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ibot_eval import distributed
from ibot_eval.errors import UserError
from ibot_eval.files import atomic_write_text
from pretrain.augment import Augmentation
from pretrain.ibot import Views
from pretrain.loader import CropBatch, finish


def views_of(batch: CropBatch, augmentation: Augmentation, device: torch.device) -> Views:
    """Copies the batch to the device and finishes its crops there."""
    batch = batch.to(device, non_blocking=True)
    global_images, local_images = finish(batch, augmentation)
    masked, local = batch.global_masked, batch.local_masked
    return Views(
        global_images,
        batch.globals.shape[1],
        local_images,
        batch.global_masks,
        None if masked is None else masked.index,
        None if masked is None else masked.weight,
        batch.local_masks,
        None if local is None else local.index,
        None if local is None else local.weight,
        batch.boxes,
    )


def mask_fraction(batch: CropBatch) -> float:
    """Share of the global crops' patches that are masked; known on the host."""
    if batch.global_masks is None or batch.global_masked is None:
        return 0.0
    return batch.global_masked.count / batch.global_masks.numel()


def next_batch(batches: Iterator[CropBatch], folder: Path) -> CropBatch:
    """The next batch; an error of one rank's loader is told here, since the others only see that rank vanish.

    Raises:
        UserError: as the loader does, once the error has been printed and left in the run's folder for the record.
    """
    try:
        return next(batches)
    except UserError as error:
        if not distributed.is_main():
            print(f"ibot-eval: error on rank {distributed.rank()}: {error}", file=sys.stderr)
            atomic_write_text(rank_error(folder, distributed.rank()), str(error))
        raise


def rank_error(folder: Path, rank: int) -> Path:
    """Where a rank other than 0 leaves the error that ended it."""
    return folder / f"error_of_rank_{rank}.txt"
