"""Splits over other libraries' data sets: torchvision and Hugging Face through timm, and map-style data sets."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ibot_eval.data.arrays import ArraySplit
from ibot_eval.data.folders import TEST_NAMES
from ibot_eval.data.images import is_images_fault, load_rgb, to_rgb, unreadable
from ibot_eval.data.splits import Data, ImageSplit, check_labels, hash_lines, note_classes
from ibot_eval.errors import BadImage, ConfigError, DataError, MissingExtra, suggest
from ibot_eval.settings import DataSettings

TORCH_NAMES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "kmnist": "KMNIST",
    "qmnist": "QMNIST",
}
"""torchvision data sets that `torch/NAME` opens -> the name publications use."""

# timm takes any other word for the test set without complaint.
_TRAIN_WORDS = {"train", "training"}
_TEST_WORDS = {"val", "valid", "validation", "eval", "evaluation", "test"}


class DatasetSplit(ImageSplit):
    """A map-style data set whose items begin with an image: PIL, a path, or an open binary file."""

    def __init__(
        self,
        name: str,
        dataset: Any,
        indices: np.ndarray,
        labels: np.ndarray,
        marks: Sequence[str],
        source: str = "",
    ) -> None:
        """
        Args:
            name: the split's own name.
            dataset: has ``[i]``.
            indices: (n,) items of ``dataset`` that belong to the split; ids are ``name/0000012``.
            labels: (n,) int64.
            marks: n texts that change with the images, for the fingerprint.
            source: what people call the images.
        """
        self.source = source
        self.name, self.dataset, self.indices, self.marks = name, dataset, np.asarray(indices), list(marks)
        self.labels = np.asarray(labels, np.int64)
        self.image_ids = [f"{name}/{i:07d}" for i in self.indices]

    def load(self, i: int) -> Image.Image:
        return _rgb(_item(self.dataset, int(self.indices[i]), self.name)[0], self.image_ids[i])

    def take(self, indices: Sequence[int] | np.ndarray) -> DatasetSplit:
        marks = [self.marks[i] for i in indices]
        return DatasetSplit(self.name, self.dataset, self.indices[indices], self.labels[indices], marks, self.source)

    def _fingerprint(self) -> str:
        items = zip(self.image_ids, self.marks, self.labels, strict=True)
        return hash_lines("items", (f"{image_id}\0{mark}\0{label}" for image_id, mark, label in items))


def _item(dataset: Any, index: int, name: str) -> tuple[Any, ...]:
    try:
        item = dataset[index]
    except (OSError, SyntaxError) as error:  # what PIL raises for a damaged file
        if not is_images_fault(error):
            raise unreadable(f"item {index} of {name!r}", error) from error
        raise BadImage(f"item {index} of {name!r} cannot be read: {error}") from error
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"item {index} of {name!r} is {type(item).__name__}, not (image, label)")
    return tuple(item)


def _rgb(image: Any, name: str) -> Image.Image:
    if isinstance(image, Image.Image):
        return to_rgb(image, name)
    if isinstance(image, str | Path):
        return load_rgb(Path(image), f"{name} ({image})")
    if hasattr(image, "read"):
        with image:
            return load_rgb(image, name)
    raise DataError(
        f"the image {name} is {type(image).__name__}, not a PIL image or a path",
        todo="give the data set without a transform: images are resized and normalised here",
    )


def wrap_datasets(kind: type[Data], datasets: Mapping[str, Any], class_names: Sequence[str] | None, name: str) -> Data:
    """See :meth:`Data.from_datasets`."""
    given = {role: dataset for role, dataset in datasets.items() if dataset is not None}
    if not given or not all(len(dataset) for dataset in given.values()):
        raise DataError(f"{name}: no data set was given, or one of them is empty", todo="give train=, test= or both")
    splits: dict[str, ImageSplit] = {}
    for role, dataset in given.items():
        labels, marks = [], []
        for i in range(len(dataset)):
            image, label = _item(dataset, i, role)[:2]
            marks.append(_pixels(image, f"{role}/{i:07d}"))
            labels.append(_integer(label, f"{role}/{i:07d}"))
        indices = np.arange(len(dataset))
        splits[role] = DatasetSplit(role, dataset, indices, np.array(labels), marks, f"{name}/{role}")
    if class_names is None:
        listed = next((d.classes for d in given.values() if getattr(d, "classes", None)), None)
        top = max(int(split.labels.max()) for split in splits.values())
        class_names = [str(c) for c in listed] if listed else [str(i) for i in range(top + 1)]
    for split in splits.values():
        check_labels(split, len(class_names), name)
    data = kind(name, tuple(class_names), splits, {role: role for role in splits})
    note_classes(data)
    return data


def _pixels(image: Any, name: str) -> str:
    try:
        rgb = _rgb(image, name)
    except BadImage:  # extraction stops at it or leaves it out, as asked
        return "bad"
    return hashlib.sha256(f"{rgb.size}".encode() + rgb.tobytes()).hexdigest()


def _integer(label: Any, name: str) -> int:
    if label is None:
        return -1
    try:
        value = int(label)
    except (TypeError, ValueError):
        value = None
    if value is None or value != label:
        raise DataError(f"the label of {name} is {label!r}, not an integer", todo="labels are integers from 0, or None")
    return value


def open_torch(reference: str, settings: DataSettings, roles: Sequence[str]) -> Data:
    """Data from `torch/NAME`, held in memory.

    Raises:
        ConfigError: a name or a split that does not exist.
        DataError: the files are not there and may not be downloaded, or are damaged.
    """
    name = reference.partition("/")[2].lower()
    if name not in TORCH_NAMES:
        raise ConfigError(
            f"--data {reference}: no such data set; {suggest(name, TORCH_NAMES)}",
            todo="any other set is given by its folder, laid out as FOLDER/train/CLASS/*.jpg",
        )
    root = settings.data_root or _default_root()
    splits: dict[str, ImageSplit] = {}
    class_names: tuple[str, ...] = ()
    for role in roles:
        split = settings.train_split if role == "train" else settings.test_split or "test"
        if split not in _TRAIN_WORDS | _TEST_WORDS:
            raise ConfigError(f"--{role}-split {split}: {reference} has the splits train and test")
        own = "train" if split in _TRAIN_WORDS else "test"
        try:
            dataset = _create(f"torch/{name}", root=str(root), split=own, download=settings.download)
        except Exception as error:  # torchvision raises RuntimeError, ValueError, URLError, pickle and struct errors
            raise DataError(
                f"cannot open {reference} in {root}: {error}",
                todo="let it download itself with --download, or name the folder that holds it with --data-root",
            ) from error
        images = np.asarray(dataset.data)
        labels = np.asarray(dataset.targets).reshape(len(images), -1)[:, 0]
        image_ids = [f"{own}/{i:07d}" for i in range(len(images))]
        splits[role] = ArraySplit(own, image_ids, labels, images, f"torch/{name}/{own}")
        class_names = tuple(map(str, dataset.classes))
    return Data(reference, class_names, splits, {r: s.name for r, s in splits.items()}, data_name=TORCH_NAMES[name])


def _create(name: str, **settings: Any) -> Any:
    """timm's data set of that name, its remarks on stderr (stdout may carry a record)."""
    from timm.data.dataset_factory import create_dataset

    with contextlib.redirect_stdout(sys.stderr):
        return create_dataset(name, **settings)


def _default_root() -> Path:
    return Path(os.environ.get("IBOT_EVAL_CACHE") or Path.home() / ".cache" / "ibot-eval") / "datasets"


def open_hfds(reference: str, settings: DataSettings, roles: Sequence[str]) -> Data:
    """Data from `hfds/NAME`: a data set of the Hugging Face hub, or a folder that its `datasets` library reads.

    Raises:
        MissingExtra: the library is not installed.
        DataError: no such data set or split, no 'image' column, or it is not there and may not be downloaded.
    """
    first: Any = None
    splits: dict[str, ImageSplit] = {}
    for role in roles:
        asked = settings.train_split if role == "train" else settings.test_split
        split, reader = _hf_reader(reference, settings, [asked] if asked else list(TEST_NAMES))
        column = reader.dataset[reader.label_key] if reader.label_key in reader.dataset.column_names else None
        labels = [-1] * len(reader) if column is None else [-1 if label is None else int(label) for label in column]
        if settings.fingerprint == "content":
            marks = [_file_hash(reader[i][0]) for i in range(len(reader))]
        else:
            marks = [f"{reader.dataset._fingerprint}:{i}" for i in range(len(reader))]
        indices, source = np.arange(len(reader)), f"{reference}/{split}"
        splits[role] = DatasetSplit(split, reader, indices, np.array(labels, np.int64), marks, source)
        first = first or reader
    by_index = sorted(first.class_to_idx, key=first.class_to_idx.get) if first.class_to_idx else None
    top = max(int(split.labels.max(initial=-1)) for split in splits.values())
    class_names = tuple(by_index or map(str, range(top + 1)))
    return Data(reference, class_names, splits, {role: split.name for role, split in splits.items()})


def _hf_reader(reference: str, settings: DataSettings, candidates: Sequence[str]) -> tuple[str, Any]:
    root = str(settings.data_root) if settings.data_root else None
    errors: list[Exception] = []
    for split in candidates:
        try:
            with _offline(not settings.download):
                return split, _create(reference, root=root, split=split).reader
        except ImportError as error:
            raise MissingExtra(
                f"--data {reference} needs the package 'datasets'", todo="pip install 'ibot-eval[hfds]'"
            ) from error
        except Exception as error:  # noqa: BLE001 - the library raises many kinds, for the network, the split and the columns
            errors.append(error)
    raise DataError(
        f"cannot open {reference}, split {' or '.join(candidates)}: {errors[0]}",
        todo="check the name and --train-split / --test-split; --download lets it download itself; --data-root is its "
        "cache folder",
    ) from errors[0]


@contextlib.contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """Keeps the `datasets` library from the network; it has no argument for that on the way through timm."""
    config = importlib.import_module("datasets").config
    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = offline or before
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _file_hash(file: Any) -> str:
    with file:
        return hashlib.sha256(file.read()).hexdigest()
