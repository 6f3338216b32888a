"""Batches of a training run: which image belongs to which of them, and their way out of the worker processes.

Every epoch visits the images in an order of its own, the same for all ranks, each of which takes its part of every
batch. What is random about an image is drawn from numbers of its own, so nothing depends on the number of workers, on
the step that a run was resumed from, or on how many ranks share a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from ibot_eval.data.loading import explain_worker_death, outlast_signals, stop_workers
from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import BadImage, ConfigError, DataError, UserError

# First numbers of the seeds, which keep the kinds of randomness apart.
ORDER, SAMPLE, MASKS, REPLACEMENT, MIXING = range(5)

_REPLACEMENT_ATTEMPTS = 100

Key = tuple[int, int]
"""Number of the view, index into the split. Views are numbered through all epochs; one per epoch, unless repeated."""

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)


class Packed(Protocol[BatchOut]):
    """A batch as it comes through the pipe, of which nothing is a tensor: see :mod:`ibot_eval.data.loading`."""

    def unpack(self) -> BatchOut:
        """The same as tensors."""
        ...

    def pin_memory(self) -> BatchOut:
        """The same in page-locked memory; called by torch, in a thread of its own."""
        ...


def steps_per_epoch(images: int, batch_size: int, world_size: int) -> int:
    """Full batches of all ranks in one pass; what is left over sits this epoch out.

    Raises:
        ConfigError: fewer images than one batch of all ranks.
    """
    steps = images // (batch_size * world_size)
    if steps == 0:
        each = f"{batch_size} images" + (f" on each of {world_size} processes" if world_size > 1 else "")
        raise ConfigError(
            f"the training split has {images} images, fewer than one batch of {each}",
            todo=f"use --batch-size {images // world_size} or less"
            if images >= world_size
            else "give more images, or start fewer processes",
        )
    return steps


class EpochOrder:
    """Keys of one rank's batches, one list per batch.

    Args:
        images: of the split.
        steps: batches per epoch.
        batch_size: images per rank and batch.
        seed: at least 0.
        remaining: numbers of the batches to give, counted from the beginning of the run.
        rank: of this process.
        world_size: number of processes.
        repeats: views of an image in the epochs that have it, one after the other; an epoch stays as long, so it has
            only one image of as many (repeated augmentation, Berman et al. 2019, as DeiT samples it).
    """

    def __init__(
        self,
        images: int,
        steps: int,
        batch_size: int,
        seed: int,
        remaining: range,
        rank: int,
        world_size: int,
        repeats: int = 1,
    ) -> None:
        self.images, self.steps, self.batch_size, self.seed = images, steps, batch_size, seed
        self.remaining, self.rank, self.world_size, self.repeats = remaining, rank, world_size, repeats

    def __len__(self) -> int:
        return len(self.remaining)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, order = -1, np.empty(0, np.int64)
        for step in self.remaining:
            if step // self.steps != epoch:
                epoch = step // self.steps
                order = np.random.default_rng((ORDER, self.seed, epoch)).permutation(self.images)
            start = (step % self.steps * self.world_size + self.rank) * self.batch_size
            yield [
                (epoch * self.repeats + place % self.repeats, int(order[place // self.repeats]))
                for place in range(start, start + self.batch_size)
            ]


def load_or_replace(split: ImageSplit, key: Key, seed: int, skip: bool) -> tuple[Image.Image, int]:
    """The image that a key asks for; with ``skip`` another one where it cannot be decoded, always the same one.

    Returns:
        an RGB image, and its index.

    Raises:
        BadImage: without ``skip``; names the image.
        DataError: a file that may not be read, or no image to be found that can be decoded.
    """
    view, asked = key
    try:
        return split.load(asked), asked
    except BadImage:
        if not skip:
            raise
    others = np.random.default_rng((REPLACEMENT, seed, view, asked))
    for _ in range(_REPLACEMENT_ATTEMPTS):
        index = int(others.integers(len(split)))
        with contextlib.suppress(BadImage):
            return split.load(index), index
    raise DataError(
        f"of {_REPLACEMENT_ATTEMPTS} images drawn to replace {split.image_ids[asked]!r}, none can be decoded",
        todo="look at the data set: most of its files seem to be damaged",
    )


def stream_batches(
    samples: Dataset[Any],
    order: EpochOrder,
    pack: Callable[[list[Any]], Packed[Batch] | UserError],
    *,
    workers: int = 0,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """The batches of ``order``, made by one set of workers until the end of the run.

    Wrap the loop in :func:`ibot_eval.data.loading.explain_worker_death`.

    Args:
        samples: by key; errors for people are to be given as values, since the loader turns exceptions of workers into
            text with their traceback.
        pack: samples -> batch, in the worker; or one of the errors.
        workers: processes, each of one thread; 0 makes the batches here.
        pin_memory: page-locked memory, for faster copies to a GPU; ignored without one.

    Raises:
        UserError: the errors that samples gave, in this process.
        DataError: a worker process that was killed.
    """
    pinned = pin_memory and torch.cuda.is_available()
    loader = DataLoader(
        samples,
        batch_sampler=order,  # pyright: ignore[reportArgumentType]
        num_workers=min(workers, len(order)),
        collate_fn=pack,
        worker_init_fn=outlast_signals,
        # Without a generator of its own the loader draws from the global one and changes what follows.
        generator=torch.Generator(),
        pin_memory=pinned,
    )
    return _batches(loader, pinned)


def _batches(loader: DataLoader[Any], pinned: bool) -> Generator[Any, None, None]:
    stream = iter(loader)
    try:
        with explain_worker_death():
            for item in stream:
                if isinstance(item, UserError):
                    raise item
                yield item if pinned else item.unpack()
    finally:
        stop_workers(stream)
