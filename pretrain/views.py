"""From a loader's batch to what the networks see, on the device."""

from __future__ import annotations

import torch

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
