"""Batches of training images for every step of a fine-tuning run, made by worker processes.

What an image looks like depends on (seed, epoch, image) alone: not on the number of workers, on the step that a run
was resumed from, or on how many ranks share the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ibot_eval.data.epochs import SAMPLE, EpochOrder, Key, load_or_replace, steps_per_epoch, stream_batches
from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import ConfigError, UserError
from ibot_eval.finetuning.augmentation import Augmented, TrainTransform
from ibot_eval.training.random_states import drawing_from


@dataclass(frozen=True)
class Batch:
    """What one rank needs for one forward pass."""

    images: Tensor
    """(B, 3, S, S) uint8, for :func:`finish`."""
    boxes: tuple[tuple[int, int, int, int, int], ...]
    """Erased ones: image in the batch, top, left, height, width. Always on the host."""
    noise: Tensor
    """(n,) float32, what the boxes are filled with, one after the other, each (3, height, width)."""
    labels: Tensor
    """(B,) int64, as the split has them."""
    indices: Tensor
    """(B,) int64, indices into the split of the images seen, replacements among them."""
    replaced: int
    """Images of the batch that could not be decoded and that others stand for."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> Batch:
        """The same in page-locked memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        names = ("images", "noise", "labels", "indices")
        return replace(self, **{name: function(getattr(self, name)) for name in names})


def fitted_batch_size(images: int, batch_size: int, accumulate: int, world_size: int) -> int:
    """``batch_size`` images per rank and forward pass, or as many as a split of fewer images than one step has.

    Raises:
        ConfigError: fewer images than forward passes in a step.
    """
    passes = accumulate * world_size
    if images < passes:
        raise ConfigError(
            f"the training split has {images} images, fewer than the {passes} forward passes of one step "
            f"({accumulate} accumulated, on {world_size} {'process' if world_size == 1 else 'processes'})",
            todo="give more images, accumulate fewer passes, or start fewer processes",
        )
    return min(batch_size, images // passes)


def training_loader(
    split: ImageSplit,
    transform: TrainTransform,
    *,
    batch_size: int,
    accumulate: int = 1,
    repeats: int = 1,
    seed: int,
    epochs: int,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    bad_images: Literal["stop", "skip"] = "stop",
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """One rank's batches from number ``start_step`` to the end of the run, by one set of workers.

    Every epoch visits the images in an order of its own; what does not fill a step sits the epoch out, as in the
    published code, but a split smaller than one step makes a smaller step. Wrap the loop in
    :func:`ibot_eval.data.loading.explain_worker_death`.

    Args:
        split: images with labels.
        transform: the augmentation.
        batch_size: images per rank and batch; see :func:`fitted_batch_size`.
        accumulate: batches that make one optimiser step; an epoch has a whole number of such steps.
        repeats: views of an image in the epochs that have it, of which DeiT's repeated augmentation has 3.
        seed: at least 0; of order and augmentation.
        epochs: of the whole run.
        start_step: batches already done, those of earlier epochs included.
        rank: of this process.
        world_size: number of processes.
        workers: decoding processes, each of one thread; 0 decodes here.
        bad_images: 'stop' raises at the first image that cannot be decoded; 'skip' puts another image in its place,
            always the same one for this seed, epoch and image.
        pin_memory: page-locked memory, for faster copies to a GPU; ignored without one.

    Raises:
        ConfigError: fewer images than forward passes in a step.
        BadImage: with 'stop'; raised in this process and names the file.
        DataError: a file that may not be read, a worker process that was killed, or with 'skip' no image to be found
            that can be decoded.
    """
    n = len(split)
    batch_size = fitted_batch_size(n, batch_size, accumulate, world_size)
    steps = accumulate * steps_per_epoch(n, batch_size * accumulate, world_size)
    order = EpochOrder(n, steps, batch_size, seed, range(start_step, epochs * steps), rank, world_size, repeats)
    samples = _Samples(split, transform, seed, skip=bad_images == "skip")
    return stream_batches(samples, order, _pack, workers=workers, pin_memory=pin_memory)


def finish(batch: Batch, transform: TrainTransform) -> Tensor:
    """The images as the network takes them; arithmetic is on the device of the batch, and nothing waits for it.

    Args:
        batch: from :func:`training_loader`.
        transform: the one that the loader had.

    Returns:
        (B, 3, S, S) float32, normalised, with the erased boxes.
    """
    images = transform.normalize(batch.images)
    start = 0
    for i, top, left, height, width in batch.boxes:
        noise = batch.noise[start : start + 3 * height * width]
        images[i, :, top : top + height, left : left + width] = noise.view(3, height, width)
        start += len(noise)
    return images


class _Sample(NamedTuple):
    augmented: Augmented
    index: int
    label: int
    replaced: bool


class _Samples(Dataset[_Sample | UserError]):
    def __init__(self, split: ImageSplit, transform: TrainTransform, seed: int, skip: bool) -> None:
        self.split, self.transform, self.seed, self.skip = split, transform, seed, skip

    def __getitem__(self, key: Key) -> _Sample | UserError:
        view, asked = key
        try:
            image, index = load_or_replace(self.split, key, self.seed, self.skip)
        except UserError as error:
            return error
        with drawing_from(SAMPLE, self.seed, view, asked):
            augmented = self.transform(image)
        return _Sample(augmented, index, int(self.split.labels[index]), index != asked)


@dataclass(frozen=True)
class _Packed:
    images: np.ndarray
    boxes: tuple[tuple[int, int, int, int, int], ...]
    noise: np.ndarray
    labels: np.ndarray
    indices: np.ndarray
    replaced: int

    def unpack(self) -> Batch:
        images, noise, labels, indices = map(torch.from_numpy, (self.images, self.noise, self.labels, self.indices))
        return Batch(images, self.boxes, noise, labels, indices, self.replaced)

    def pin_memory(self) -> Batch:
        return self.unpack().pin()


def _pack(samples: list[_Sample | UserError]) -> _Packed | UserError:
    good = []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        good.append(sample)
    boxes, noise = [], [np.empty(0, np.float32)]
    for i, sample in enumerate(good):
        augmented = sample.augmented
        if augmented.noise.size:
            boxes.append((i, augmented.top, augmented.left, *augmented.noise.shape[1:]))
            noise.append(augmented.noise.ravel())
    return _Packed(
        # Contiguous, as it comes out of a pipe: another layout in memory would round convolutions in another way.
        images=np.ascontiguousarray(np.stack([sample.augmented.pixels for sample in good])),
        boxes=tuple(boxes),
        noise=np.concatenate(noise),
        labels=np.array([sample.label for sample in good], np.int64),
        indices=np.array([sample.index for sample in good], np.int64),
        replaced=sum(sample.replaced for sample in good),
    )
