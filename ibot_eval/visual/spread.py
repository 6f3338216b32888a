"""Some images of a data set, spread over its classes."""

from __future__ import annotations

from pathlib import PurePosixPath

import numpy as np

from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import DataError
from ibot_eval.settings import DataSettings
from ibot_eval.visual.pictures import Source, decoded, source_of


def spread_sources(settings: DataSettings, count: int, of_class: int = 1) -> list[Source]:
    """``count`` groups of ``of_class`` images of the test split, one class after the other, then again from the first.

    Args:
        of_class: images of one class that follow each other; without labels any do.

    Raises:
        DataError: the data cannot be read, or no class has that many images.
    """
    data = open_data(settings, roles=("test",), labelled=False)
    split = data.splits["test"]
    groups = [
        members[: len(members) // of_class * of_class].reshape(-1, of_class)
        for label in np.unique(split.labels)
        if len(members := np.flatnonzero(split.labels == label)) >= of_class
    ]
    if not groups:
        raise DataError(f"no class of {data.reference} has {of_class} images")
    rounds = max(map(len, groups))
    ordered = [group[i] for i in range(rounds) for group in groups if i < len(group)][:count]
    return [source_at(split, int(i), data.class_names) for group in ordered for i in group]


def source_at(split: ImageSplit, i: int, class_names: tuple[str, ...] = ()) -> Source:
    """Image ``i`` of a split, with its file where it has one.

    Raises:
        BadImage: it cannot be decoded.
    """
    label = int(split.labels[i])
    return source_of(
        decoded(lambda: split.load(i)),
        PurePosixPath(split.image_ids[i]).name,
        path=split.path(i) if isinstance(split, FolderSplit) else None,
        label=class_names[label] if 0 <= label < len(class_names) else None,
    )
