"""Batches of a data set of mmdet or mmsegmentation, none of which depends on what happened before.

What a training sample looks like depends on (seed, epoch, index) alone: not on the number of workers, on how many
ranks share a batch, or on the iteration that a run was resumed from, which therefore starts with the right batch at
once instead of loading all earlier ones again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.registry import DATASETS, FUNCTIONS
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ibot_eval.data.epochs import ORDER, REPLACEMENT, SAMPLE, Key
from ibot_eval.data.loading import explain_worker_death, outlast_signals, stop_workers
from ibot_eval.errors import BadImage, ConfigError, DataError, UserError
from ibot_eval.training.random_states import drawing_from

_REPLACEMENT_ATTEMPTS = 100


class TrainingData:
    """The training images of a run, and their batches from any iteration on.

    mmengine's hooks and schedules may take it for a data loader: its length is the number of iterations per epoch.
    Every epoch visits the images in an order of its own; what does not fill an iteration sits the epoch out, and a
    data set smaller than one iteration makes smaller batches.

    Args:
        loader: a ``train_dataloader`` of mmengine. Its sampler is not used, but where its batch sampler groups by
            aspect ratio, the images of a batch are all upright or all oblong, but for one batch of leftovers.
        seed: at least 0; of order and augmentation.
        rank, world_size: of this process, and number of processes.
        skip: put another image in the place of one that cannot be decoded, always the same one; else raise.

    Raises:
        ConfigError: fewer images than processes.
    """

    def __init__(self, loader: dict[str, Any], seed: int, rank: int, world_size: int, *, skip: bool = False) -> None:
        self.dataset = _built(loader["dataset"])
        self.seed, self.rank, self.world_size = seed, rank, world_size
        images = len(self.dataset)
        if images < world_size:
            raise ConfigError(
                f"{images} images can be trained on, fewer than the {world_size} processes",
                todo="start fewer processes, or give more images (those without annotations may have been left out)",
            )
        self.asked_batch_size = int(loader["batch_size"])
        self.batch_size = min(self.asked_batch_size, images // world_size)
        self._workers = int(loader.get("num_workers", 0))
        self._samples = _Samples(self.dataset, seed, skip)
        self._collate = _collate_function(loader)
        grouped = "AspectRatio" in str((loader.get("batch_sampler") or {}).get("type", ""))
        self._oblong = _oblong(self.dataset) if grouped else np.zeros(images, bool)

    def __len__(self) -> int:
        return len(self.dataset) // (self.batch_size * self.world_size)

    @property
    def images_per_step(self) -> int:
        """Of all processes."""
        return self.batch_size * self.world_size

    def order(self, epoch: int) -> np.ndarray:
        """(iterations, processes, images of a batch) int64, indices of the epoch's images."""
        random = np.random.default_rng((ORDER, self.seed, epoch))
        mixed = random.permutation(len(self.dataset))
        groups = [mixed[self._oblong[mixed] == kind] for kind in (False, True)]
        cuts = [len(group) // self.batch_size * self.batch_size for group in groups]
        rest = np.concatenate([group[cut:] for group, cut in zip(groups, cuts, strict=True)])
        whole = [group[:cut] for group, cut in zip(groups, cuts, strict=True)]
        if self._oblong.any():
            rest = random.permutation(rest)
        used = np.concatenate([*whole, rest])
        batches = used[: len(used) // self.batch_size * self.batch_size].reshape(-1, self.batch_size)
        if self._oblong.any():
            batches = random.permutation(batches)
        return batches[: len(self) * self.world_size].reshape(len(self), self.world_size, self.batch_size)

    def batches(self, first: int, last: int) -> Generator[tuple[Any, int], None, None]:
        """This rank's batches of the iterations ``first`` to ``last`` - 1, counted from the beginning of the run.

        Yields:
            what mmengine's own loader would give, and the number of its images that stand for undecodable ones.

        Raises:
            BadImage: unless images are replaced; names the file.
            DataError: a worker process that was killed, or with replacement no image that can be decoded.
        """
        keys = _Keys(self, range(first, last))
        yield from _stream(self._samples, keys, self._collate, self._workers)


class _Keys:
    """A batch sampler over all epochs."""

    def __init__(self, data: TrainingData, iterations: range) -> None:
        self.data, self.iterations = data, iterations

    def __len__(self) -> int:
        return len(self.iterations)

    def __iter__(self) -> Iterator[list[Key]]:
        data, known = self.data, -1
        order = np.empty(0)
        for iteration in self.iterations:
            epoch, step = divmod(iteration, len(data))
            if epoch != known:
                known, order = epoch, data.order(epoch)
            yield [(epoch, int(index)) for index in order[step, data.rank]]


class EvaluationData:
    """The images of a test set; each rank takes every ``world_size``-th, and none comes twice.

    Args:
        loader: a ``test_dataloader`` of mmengine; its sampler is not used.
        seed: of what test pipelines may draw, at least 0.
        rank, world_size: of this process, and number of processes.
    """

    def __init__(self, loader: dict[str, Any], seed: int, rank: int, world_size: int) -> None:
        self.dataset = _built(loader["dataset"])
        self.rank, self.world_size = rank, world_size
        self.batch_size = int(loader["batch_size"])
        self._workers = int(loader.get("num_workers", 0))
        self._samples = _Samples(self.dataset, seed, skip=False)
        self._collate = _collate_function(loader)

    @property
    def indices(self) -> range:
        """Those of this rank."""
        return range(self.rank, len(self.dataset), self.world_size)

    def batches(self) -> Generator[Any, None, None]:
        """This rank's batches, in order. Raises as :meth:`TrainingData.batches`."""
        keys = [(0, index) for index in self.indices]
        parts = [keys[i : i + self.batch_size] for i in range(0, len(keys), self.batch_size)]
        for batch, _ in _stream(self._samples, parts, self._collate, self._workers):
            yield batch


class _Sample(NamedTuple):
    value: Any
    replaced: bool


class _Samples(Dataset["_Sample | UserError"]):
    """Errors for people travel as values, since the loader turns exceptions of workers into text."""

    def __init__(self, dataset: Any, seed: int, skip: bool) -> None:
        self.dataset, self.seed, self.skip = dataset, seed, skip

    def __getitem__(self, key: Key) -> _Sample | UserError:
        epoch, asked = key
        # The draws of augmentation, and of the other image that mmengine takes where a crop leaves no object.
        with drawing_from(SAMPLE, self.seed, epoch, asked):
            try:
                return _Sample(self._load(asked), False)
            except BadImage as error:
                if not self.skip:
                    return error
            except UserError as error:
                return error
        others = np.random.default_rng((REPLACEMENT, self.seed, epoch, asked))
        for _ in range(_REPLACEMENT_ATTEMPTS):
            index = int(others.integers(len(self.dataset)))
            try:
                with drawing_from(SAMPLE, self.seed, epoch, index):
                    return _Sample(self._load(index), True)
            except BadImage:
                continue
            except UserError as error:
                return error
        return DataError(
            f"of {_REPLACEMENT_ATTEMPTS} images drawn to replace an undecodable one, none can be decoded",
            todo="look at the data set: most of its files seem to be damaged",
        )

    def _load(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except UserError:
            raise
        except Exception as error:
            bad = _undecodable(self.dataset, index)
            if bad is None:
                raise
            raise bad from error


def _undecodable(dataset: Any, index: int) -> BadImage | None:
    """What is wrong with the image file of a sample whose pipeline failed, if it is the file."""
    about = dataset.get_data_info(index) if hasattr(dataset, "get_data_info") else {}
    path = about.get("img_path")
    if path is None:
        return None
    try:
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise anything
        return BadImage(f"{path} cannot be decoded: {error}", todo="repair or remove it, or --bad-images skip")
    return None


def _built(dataset: Any) -> Any:
    built = DATASETS.build(dataset) if isinstance(dataset, dict) else dataset
    if hasattr(built, "full_init"):
        built.full_init()
    return built


def _oblong(dataset: Any) -> np.ndarray:
    """(n,) bool, True where an image is wider than high, as mmdet's AspectRatioBatchSampler groups them."""
    sizes = (dataset.get_data_info(index) for index in range(len(dataset)))
    return np.array([info["width"] >= info["height"] for info in sizes])


def _collate_function(loader: dict[str, Any]) -> Callable[[Sequence[Any]], Any]:
    wanted = dict(loader.get("collate_fn") or {"type": "pseudo_collate"})
    kind = wanted.pop("type")
    function: Any = FUNCTIONS.get(kind) if isinstance(kind, str) else kind
    if function is None:
        raise ConfigError(f"there is no function {kind!r} that makes batches", where="collate_fn")
    return partial(function, **wanted)


def _stream(
    samples: _Samples, keys: Any, collate: Callable[[Sequence[Any]], Any], workers: int
) -> Generator[tuple[Any, int], None, None]:
    if not len(keys):
        return
    workers = min(workers, len(keys))
    loader = DataLoader(
        samples,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=partial(_packed, collate),
        worker_init_fn=outlast_signals,
        # Without a generator of its own the loader draws from the global one and changes what follows.
        generator=torch.Generator(),
        # mmcv's operators may be stand-ins, which a fresh process would not have.
        multiprocessing_context="fork" if workers else None,
    )
    stream = iter(loader)
    try:
        with explain_worker_death():
            for item in stream:
                if isinstance(item, UserError):
                    raise item
                data, replaced = item
                yield pickle.loads(data), replaced
    finally:
        stop_workers(stream)


class _Pickler(pickle.Pickler):
    """Tensors as arrays. Torch would send them through shared memory, which containers have little of."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.device.type == "cpu" and not obj.requires_grad and obj.dtype != torch.bfloat16:
            return torch.from_numpy, (obj.contiguous().numpy(),)
        return NotImplemented


def _packed(collate: Callable[[Sequence[Any]], Any], samples: list[_Sample | UserError]) -> Any:
    good = []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        good.append(sample)
    with io.BytesIO() as file:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(collate([sample.value for sample in good]))
        return file.getvalue(), sum(sample.replaced for sample in good)
