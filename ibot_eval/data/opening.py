"""`--data …` -> Data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ibot_eval.data.arrays import open_demo
from ibot_eval.data.image_folder import is_imagenet_1k, open_folder
from ibot_eval.data.readers import open_hfds, open_torch
from ibot_eval.data.shards import open_shards
from ibot_eval.data.splits import Data, ImageSplit, check_labels, few, first_per_class, note_classes
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.settings import DataSettings

_READERS: dict[str, Callable[[str, DataSettings, Sequence[str]], Data]] = {
    "torch": open_torch,
    "hfds": open_hfds,
    "wds": open_shards,
}


def open_data(settings: DataSettings, roles: Sequence[str] = ("train", "test"), labelled: bool = True) -> Data:
    """Open the data set that ``settings`` name.

    Args:
        settings: ``data`` is a folder, torch/NAME, hfds/NAME, wds/FOLDER or demo; a folder that is called like one of
            these is given as ./demo.
        roles: the splits that are needed, 'train', 'test' or both. Nothing else is opened.
        labelled: whether every image needs a label.

    Raises:
        ConfigError: settings that contradict each other or the data set.
        DataError: data that cannot be found or read, an empty split, or missing labels.
        MissingExtra: hfds/… without the package ``datasets``.
    """
    if not settings.data:
        raise ConfigError("no data set was given", todo="give --data FOLDER, or --data demo for a first try")
    prefix = settings.data.partition("/")[0].lower() if "/" in settings.data else ""
    if settings.test_labels is not None and (settings.data == "demo" or prefix in _READERS):
        raise ConfigError(f"--test-labels belongs to data in a folder; {settings.data} brings its own labels")
    if prefix in {"tfds", "hfids"}:
        raise ConfigError(
            f"--data {settings.data}: streamed data sets have no fixed order and cannot be resumed or divided",
            todo="use hfds/NAME, wds/FOLDER or a folder of images",
        )
    if settings.data == "demo":
        data = open_demo(roles)
    else:
        data = _READERS.get(prefix, open_folder)(settings.data, settings, roles)
    for role, split in data.splits.items():
        if not len(split):
            raise DataError(
                f"there are no images in the split {split.name!r} of {data.reference}",
                todo="\n    ".join(data.warnings) or f"check --{role}-split",
            )
        check_labels(split, len(data.class_names), data.reference)
        if labelled:
            _check_labelled(role, split, data)
    note_classes(data)
    sizes = {"train": settings.train_per_class, "test": settings.test_per_class}
    whole = not any(sizes[role] for role in data.splits)
    for role, split in data.splits.items():
        n = sizes[role]
        if n is not None:
            data.splits[role] = _first(role, split, n, data)
    if whole and "test" in data.splits and is_imagenet_1k(data.class_names, len(data.splits["test"])):
        data.data_name = "ImageNet-1K"
    if not whole:
        data.data_name = None
    return data


def _check_labelled(role: str, split: ImageSplit, data: Data) -> None:
    missing = np.flatnonzero(split.labels == -1)
    if not len(missing):
        return
    some = "" if len(missing) == len(split) else f", such as {split.image_ids[int(missing[0])]!r}"
    by_file = " or name their labels in a file (--test-labels)" if role == "test" else ""
    raise DataError(
        f"{len(missing)} of {len(split)} images of the split {split.name!r} have no label{some}",
        where=data.reference,
        todo=f"put the images of each class into a folder of its own{by_file}",
    )


def _first(role: str, split: ImageSplit, n: int, data: Data) -> ImageSplit:
    flag = f"--{role}-per-class {n}"
    if n < 1:
        raise ConfigError(f"{flag}: at least 1 image per class is needed")
    if (split.labels < 0).any():
        raise ConfigError(f"{flag}: the split {split.name!r} has no labels to count by")
    classes, counts = np.unique(split.labels, return_counts=True)
    short = [f"{data.class_names[c]} ({count})" for c, count in zip(classes, counts, strict=True) if count < n]
    if short:
        data.warnings.append(f"{flag}: {len(short)} of {len(classes)} classes have fewer images: {few(short, 5)}")
    return split.take(first_per_class(split.labels, n))
