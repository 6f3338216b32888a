"""Index batches -> uint8 image batches, decoded by worker processes, in order."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import BadImage, DataError, UserError
from ibot_eval.orphans import end_with


class LoadedBatch(NamedTuple):
    """Images of one index batch; those that could not be decoded are in ``bad`` and nowhere else."""

    images: Tensor
    """(B, 3, H, W) uint8; B is 0 when all are bad."""
    indices: Tensor
    """(B,) int64, indices into the split, in the order asked for."""
    bad: list[tuple[int, str]]
    """(index, what is wrong with it), B + len(bad) being the length of the index batch."""


def image_loader(
    split: ImageSplit,
    transform: Callable[[Image.Image], Tensor],
    batches: Sequence[Sequence[int]],
    workers: int,
    *,
    bad_images: Literal["stop", "skip"] = "stop",
    pin_memory: bool = False,
    outlast: bool = False,
) -> Generator[LoadedBatch, None, None]:
    """One :class:`LoadedBatch` per element of ``batches``, in their order.

    Args:
        split: where images come from.
        transform: RGB image -> (3, H, W) uint8, the same size for every image; both must be picklable.
        batches: indices into ``split``; any lengths above 0.
        workers: decoding processes, each of one thread, two batches ahead; 0 decodes here.
        bad_images: 'stop' raises at the first image that cannot be decoded, 'skip' lists it in the batch.
        pin_memory: page-locked memory, for faster copies to a GPU; ignored without one.
        outlast: whether workers go on when they are sent SIGINT or SIGTERM: see :func:`outlast_signals`.

    Raises:
        BadImage: with 'stop'; raised in this process and names the file.
        DataError: an image file that may not be read, or a worker process that was killed.
    """
    workers = min(workers, len(batches))
    loader = DataLoader(
        _Items(split, transform),
        batch_sampler=[list(map(int, batch)) for batch in batches],
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=outlast_signals if outlast else end_with_parent,
        # Without a generator of its own the loader draws from the global one and changes what follows.
        generator=torch.Generator(),
    )
    stream = iter(loader)
    try:
        for _ in range(len(batches)):
            pixels, indices, errors = _next(stream, workers)
            for _, error in errors:
                if bad_images == "stop" or not isinstance(error, BadImage):
                    raise error
            images = torch.from_numpy(pixels)
            if pin_memory and torch.cuda.is_available():
                images = images.pin_memory()
            yield LoadedBatch(images, torch.from_numpy(indices), [(i, error.what) for i, error in errors])
    finally:
        stop_workers(stream)


def stop_workers(stream: Iterator[Any]) -> None:
    """Ends the loading processes of ``iter(DataLoader)`` at once, for which torch has no public way.

    Left to the collector they live as long as the traceback of an error, and while a killed one is on torch's list it
    raises anew whenever any child process ends.
    """
    stop = getattr(stream, "_shutdown_workers", None)
    if stop is not None:
        with contextlib.suppress(RuntimeError):
            stop()


def end_with_parent(_: int) -> None:
    """For the ``worker_init_fn`` of a loader: the worker ends with the process that it loads for, whatever ends that.

    Torch's own watch is idle while a worker waits for its batch to be taken.
    """
    end_with(os.getppid())


def outlast_signals(worker: int) -> None:
    """For the ``worker_init_fn`` of a loader in a loop that ends its step and saves before it stops.

    Terminals and schedulers send these signals to all processes of a run. The main one decides what follows, and to
    save its state it needs the workers, whose death is an error; they end with it, as of :func:`end_with_parent`.
    """
    end_with_parent(worker)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


_Item = tuple[int, Tensor | None, UserError | None]
# Arrays, since they come through a pipe. Tensors come through shared memory, which containers have little of; when it
# is full, torch loses the batch and waits for it for ever.
_Batch = tuple[np.ndarray, np.ndarray, list[tuple[int, UserError]]]


class _Items(Dataset[_Item]):
    """Errors travel as values, since the loader turns exceptions of workers into text with their traceback."""

    def __init__(self, split: ImageSplit, transform: Callable[[Image.Image], Tensor]) -> None:
        self.split, self.transform = split, transform

    def __getitem__(self, index: int) -> _Item:
        try:
            return index, self.transform(self.split.load(index)), None
        except UserError as error:
            return index, None, error


def _collate(items: list[_Item]) -> _Batch:
    good = [(index, image) for index, image, _ in items if image is not None]
    errors = [(index, error) for index, _, error in items if error is not None]
    if good:
        # numpy copies on one thread; torch would wake its pool for it, which stalls on a machine whose cores are busy.
        out = np.empty((len(good), *good[0][1].shape), np.uint8)
        images = np.stack([image.numpy() for _, image in good], out=out)
    else:
        images = np.empty((0, 3, 0, 0), np.uint8)
    return images, np.array([index for index, _ in good], dtype=np.int64), errors


@contextlib.contextmanager
def explain_worker_death() -> Iterator[None]:
    """Turns torch's report of a killed data-loading process into a DataError.

    torch raises it from a signal handler, so in whatever code the main process happens to be running: wrap the loop
    over :func:`image_loader`, not the loader alone.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise _killed() from error


def _next(stream: Iterator[_Batch], workers: int) -> _Batch:
    try:
        with explain_worker_death():
            return next(stream)
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        # Tensors come through a socket of the worker; errors of reading an image are marked by torch as 'Caught …'.
        if not workers or "in DataLoader worker process" in str(error):
            raise
        raise _killed() from error


def _killed() -> DataError:
    return DataError(
        "a data-loading process was killed, most often because memory or shared memory (/dev/shm) ran out",
        todo="use fewer of them (--workers 1, or 0 for none), or a smaller --batch-size",
    )
