"""What a data set is once opened: image splits with labels, ids and fingerprints, and the classes they share."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from ibot_eval.errors import DataError, suggest


class ImageSplit(ABC):
    """Images with labels, in a fixed order. Picklable, for data-loading processes."""

    name: str
    """The folder's or split's own name, e.g. ``val``; not the role it plays."""
    image_ids: Sequence[str]
    """Unique names, '/' between their parts whatever the system."""
    labels: np.ndarray
    """(n,) int64, -1 where unlabelled."""
    source: str = ""
    """What people call these images, for lists of feature banks: a folder, or ``demo/train``. Empty: the name."""

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 that changes with the images, their labels or their order, but not when the whole data
        set is moved. Computed when first asked for."""
        return self._fingerprint()

    @abstractmethod
    def _fingerprint(self) -> str: ...

    @abstractmethod
    def load(self, i: int) -> Image.Image:
        """Image ``i`` as upright 8-bit RGB. Raises BadImage, naming it."""

    @abstractmethod
    def take(self, indices: Sequence[int] | np.ndarray) -> ImageSplit:
        """The split that holds only ``indices``, in that order."""


@dataclass
class Data:
    """An opened data set."""

    reference: str
    """What the user called it."""
    class_names: tuple[str, ...]
    """One order of classes for all splits; a label is an index into it."""
    splits: dict[str, ImageSplit]
    """By role, 'train' (gallery) and 'test' (query); only the roles that were asked for."""
    split_names: dict[str, str]
    """Role -> name of the folder or split."""
    warnings: list[str] = field(default_factory=list)
    """What the reader of a result should know about the data."""
    data_name: str | None = None
    """The name publications use, where that is certain; None for a part of a data set."""
    transform: dict[str, Any] | None = None
    """What the record says of the images' way to the network, where that is not the evaluation transform."""

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.class_names)}

    @property
    def fingerprint(self) -> str:
        """Over all splits and the class names."""
        parts = {role: split.fingerprint for role, split in sorted(self.splits.items())}
        return hashlib.sha256(json.dumps([parts, self.class_names]).encode()).hexdigest()

    @classmethod
    def from_datasets(
        cls, train: Any = None, test: Any = None, class_names: Sequence[str] | None = None, name: str = "python"
    ) -> Data:
        """Data from map-style data sets (``len()`` and ``[i]``) that give (PIL image or path, label).

        Labels are integers from 0, or None where unlabelled; images must not be transformed yet. Every image is
        decoded once here, because the fingerprint hashes the pixels: count about 5 ms per photograph of 500x375.

        Args:
            train: data set of the role 'train', or None.
            test: likewise for 'test'; at least one of the two.
            class_names: default: the attribute ``classes`` of either data set, else the numbers.
            name: what records call the data.

        Raises:
            DataError: no data set, an empty one, an item of another form, or a label without a class name.
        """
        from ibot_eval.data.readers import wrap_datasets

        return wrap_datasets(cls, {"train": train, "test": test}, class_names, name)


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Sort key that puts '2' before '10' and is otherwise a plain comparison."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))), name


def natural_sort(names: Iterable[str]) -> tuple[str, ...]:
    """Unique ``names`` in natural order."""
    return tuple(sorted(set(names), key=natural_key))


def first_per_class(labels: np.ndarray, n: int) -> np.ndarray:
    """Indices of the first ``n`` items of each label, in their order."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    return np.sort(order[np.arange(len(labels)) - starts < n])


def few(names: Iterable[str], limit: int = 3) -> str:
    """The first few names, quoted, and how many more there are."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def near(name: str, known: Sequence[str]) -> str:
    """As :func:`ibot_eval.errors.suggest`, but never a list of a thousand classes."""
    text = suggest(name, known)
    return text if text.startswith("did") or len(known) <= 20 else f"known: {few(known, 5)}"


def hash_lines(kind: str, lines: Iterable[str]) -> str:
    """sha256 of text lines, with the kind of fingerprint and its version first."""
    digest = hashlib.sha256(f"ibot-eval {kind} 1\n".encode())
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def check_labels(split: ImageSplit, num_classes: int, where: str) -> None:
    """Raises DataError for a label at or beyond ``num_classes``, or below -1."""
    wrong = np.flatnonzero((split.labels >= num_classes) | (split.labels < -1))
    if len(wrong):
        i = int(wrong[0])
        raise DataError(
            f"image {split.image_ids[i]!r} has label {int(split.labels[i])}, but there are {num_classes} classes",
            where=where,
            todo=f"labels run from 0 to {num_classes - 1}; give a class name for each",
        )


def note_classes(data: Data) -> None:
    """Warn of classes that a split lacks, and of splits that are one and the same."""
    present = {role: np.unique(s.labels[s.labels >= 0]) for role, s in data.splits.items() if (s.labels >= 0).any()}
    names = np.array(data.class_names, dtype=object)
    for role, here in present.items():
        other = next((r for r in present if r != role), None)
        if other is None:
            continue
        only = np.setdiff1d(here, present[other])
        if len(only):
            data.warnings.append(
                f"{len(only)} of {len(names)} classes have images in {data.splits[role].name!r} only, none in "
                f"{data.splits[other].name!r}: {few(names[only], 5)}"
            )
    if present:
        seen = np.unique(np.concatenate(list(present.values())))
        nowhere = np.setdiff1d(np.arange(len(names)), seen)
        if len(nowhere):
            data.warnings.append(f"{len(nowhere)} of {len(names)} classes have no images: {few(names[nowhere], 5)}")
        if len(seen) == 1:
            data.warnings.append("all images are of one class, so any classifier is always right")
    splits = list(data.splits.values())
    if len(splits) == 2 and splits[0].name == splits[1].name:
        data.warnings.append(f"train and test are the same split, {splits[0].name!r}: every image finds itself")
