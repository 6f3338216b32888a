"""Subsets of a labelled split: a number or a share of each class, or the images that a list file names.

Published low-shot numbers on ImageNet use the lists of SimCLR (Chen et al. 2020), which are known here by their
SHA-256.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ibot_eval.data.images import IMAGE_EXTENSIONS
from ibot_eval.data.splits import few
from ibot_eval.errors import ConfigError, DataError


class KnownList(NamedTuple):
    """A published list of images."""

    file_name: str
    sha256: str
    images: int


ROUNDING = 1e-9
"""What floating point may take away from a whole number: 0.29 * 50 is 14.499999999999998."""
KNOWN_LISTS = {
    "SimCLR 1%": KnownList("1percent.txt", "71e82a48ba78252683ae334c4d019ebd5c6e855b9599c1389fbe83eb9549cf17", 12_811),
    "SimCLR 10%": KnownList(
        "10percent.txt", "6d09de11e7bdaf5b1f3b1f249b6183695f97310cdd20f0c03e7235b6b9392091", 128_116
    ),
}
"""Lists that published numbers belong to; hashes and counts as in TensorFlow Datasets' checksums."""


@dataclass(frozen=True)
class LabelSubset:
    """One way to choose the images that keep their labels."""

    name: str
    """As results call it: ``1%``, ``5``, ``SimCLR 1%``, or the file name of any other list."""
    share: float | None = None
    """Of each class, above 0 and up to 1."""
    n: int | None = None
    """Images per class."""
    path: Path | None = None
    """List file."""

    @classmethod
    def parse(cls, text: str) -> LabelSubset:
        """From a share (``1%``), a number of images per class (``5``) or the path of a list file.

        Raises:
            ConfigError: none of these.
            DataError: a file that cannot be read.
        """
        share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
        if share and 0 < float(share[1]) <= 100:
            return cls(f"{float(share[1]):g}%", share=float(share[1]) / 100)
        if re.fullmatch(r"\d+", text) and int(text) > 0:
            return cls(str(int(text)), n=int(text))
        path = Path(text).expanduser()
        if path.is_file():
            return cls(identify(path) or path.name, path=path)
        raise ConfigError(
            f"labels {text!r} are neither a percentage above 0, nor a number of images per class, nor a file",
            where="--labels",
            todo="give for instance 1%, 5 or lists/1percent.txt",
        )

    def rows(self, labels: np.ndarray, image_ids: Sequence[str], seed: int, draw: int = 0) -> np.ndarray:
        """Rows of the images that keep their labels, ascending; a list knows no seed and no draw."""
        if self.path is not None:
            return listed(self.path, image_ids)
        if self.n is not None:
            return per_class(labels, self.n, seed, draw)
        assert self.share is not None
        return fraction(labels, self.share, seed, draw)

    def remarks(self, labels: np.ndarray, class_names: Sequence[str], data_name: str | None) -> Iterator[str]:
        """What the reader of a result should know about the subset, whatever is drawn.

        Args:
            labels: (N,) of the images to choose from.
            class_names: of the labels, as far as they have any.
            data_name: what publications call the data set.
        """
        if self.path is not None:
            if warning := altered(self.path):
                yield warning
            return
        classes, sizes = np.unique(labels, return_counts=True)
        small = sizes < self.n if self.n is not None else sizes * (self.share or 0) < 0.5 - ROUNDING
        if small.any():
            which = few(class_names[c] if c < len(class_names) else str(c) for c in map(int, classes[small]))
            what = "fewer images and are taken whole" if self.n is not None else "too few images and give one"
            yield f"labels {self.name}: {small.sum()} of {len(classes)} classes have {what}: {which}"
        known = KNOWN_LISTS.get(f"SimCLR {self.name}")
        if known and data_name == "ImageNet-1K":
            yield (
                f"labels {self.name}: the subset is drawn here; published numbers for {self.name} of {data_name} are "
                f"for SimCLR's list: give its file {known.file_name} to --labels"
            )


def per_class(labels: np.ndarray, n: int, seed: int, draw: int = 0) -> np.ndarray:
    """``n`` images of each class, drawn without replacement; all images of a class that has fewer.

    What is drawn from a class depends on ``seed``, ``draw``, the label and the class's size only, not on ``n`` or on
    other classes: a smaller subset of the same draw lies within a larger one.

    Args:
        labels: (N,) int64, none below 0.
        n: at least 1.

    Returns:
        (m,) int64 rows, ascending.
    """
    return _drawn(labels, {int(label): n for label in np.unique(labels)}, seed, draw)


def fraction(labels: np.ndarray, share: float, seed: int, draw: int = 0) -> np.ndarray:
    """``share`` (above 0, at most 1) of the images of each class: rounded half up, and at least one.

    Drawn as in :func:`per_class`, so that 1 % lies within 10 % of the same draw.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    counts = np.maximum(1, np.floor(share * sizes + 0.5 + ROUNDING)).astype(int)
    return _drawn(labels, dict(zip(classes.tolist(), counts.tolist(), strict=True)), seed, draw)


def listed(path: Path, image_ids: Sequence[str]) -> np.ndarray:
    """Rows of the images that the text file ``path`` names, one a line; empty lines and lines with # are passed over.

    A line may be an image's whole id, or the end of it from a '/' on (a file name); or it may have more folders than
    the id does. Where that leaves one image, endings may be missing or differ (images that were converted). The order
    of the lines does not matter.

    Args:
        image_ids: N unique names.

    Returns:
        (m,) int64 rows, ascending.

    Raises:
        DataError: the file cannot be read or is empty; an image is missing, listed twice or ambiguous (it is named).
    """
    names = _lines(path)
    candidates: dict[str, list[int]] = {_stem(name): [] for name in names}
    for row, image_id in enumerate(image_ids):
        rows = candidates.get(_stem(image_id))
        if rows is not None:
            rows.append(row)
    found: dict[int, str] = {}
    missing, twice = [], []
    for name in names:
        row = _match(path, name, candidates[_stem(name)], image_ids)
        if row is None:
            missing.append(name)
        elif row in found:
            twice.append(name)
        else:
            found[row] = name
    if missing:
        raise DataError(
            f"{len(missing)} of the {len(names)} images in {path} are not among the {len(image_ids)} images to choose "
            f"from: {few(missing)}; those are called like {image_ids[0]!r}",
            # One that is called otherwise in every line is not this data set's, or holds more than names.
            todo="give the whole training split, or take the lines out of a copy of the list"
            if len(missing) < len(names)
            else "give a list with the name of an image, and nothing else, in each line",
        )
    if twice:
        raise DataError(f"{path} names {len(twice)} images more than once: {few(twice)}", todo="keep one line of each")
    return np.array(sorted(found), np.int64)


def identify(path: Path) -> str | None:
    """Which of ``KNOWN_LISTS`` the file is, by its content (line ends of either kind); None for any other."""
    digest = hashlib.sha256(_content(path).replace(b"\r\n", b"\n")).hexdigest()
    return next((name for name, known in KNOWN_LISTS.items() if known.sha256 == digest), None)


def altered(path: Path) -> str | None:
    """A warning about a file that has the name or the length of one of ``KNOWN_LISTS`` but other content."""
    if identify(path):
        return None
    images = len(_lines(path))
    for name, known in KNOWN_LISTS.items():
        likeness = [
            text
            for text, same in (
                (f"the name {path.name}", path.name == known.file_name),
                (f"the {known.images} images", images == known.images),
            )
            if same
        ]
        if likeness:
            return (
                f"{path} has {' and '.join(likeness)} of the {name} list, but it is not that list (sha256 "
                f"{known.sha256[:12]}…): its numbers cannot be compared with published ones"
            )
    return None


def _drawn(labels: np.ndarray, counts: dict[int, int], seed: int, draw: int) -> np.ndarray:
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    chosen = [
        np.random.default_rng([seed, draw, int(label)]).permutation(rows)[: counts[int(label)]]
        for label, rows in zip(classes, np.split(order, starts[1:]), strict=True)
    ]
    return np.sort(np.concatenate(chosen))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the list {path}: {error.strerror}", todo="give a text file") from None


def _lines(path: Path) -> list[str]:
    form = "give a text file with the name of an image a line"
    try:
        lines = [line.strip() for line in re.split(r"[\r\n]", _content(path).decode("utf-8-sig"))]
    except UnicodeDecodeError:
        raise DataError(f"the list {path} is not text", todo=form) from None
    names = [line.replace("\\", "/").removeprefix("./") for line in lines if line and not line.startswith("#")]
    if not names:
        raise DataError(f"the list {path} names no image", todo=form)
    return names


def _match(path: Path, name: str, candidates: Sequence[int], image_ids: Sequence[str]) -> int | None:
    """The row that ``name`` stands for among those with the same bare file name."""
    same_place = [row for row in candidates if _same_place(name, image_ids[row])]
    # Exactness decides between a.png and a.jpg, and between x/a.png and a.png beside it.
    for fits in (
        lambda image_id: image_id == name,
        lambda image_id: image_id.rpartition("/")[2] == name.rpartition("/")[2],
        lambda image_id: True,
    ):
        rows = [row for row in same_place if fits(image_ids[row])]
        if len(rows) == 1:
            return rows[0]
        if rows:
            raise DataError(
                f"{name!r} in {path} fits {len(rows)} images: {few(image_ids[row] for row in rows)}",
                todo="give the folder and the ending as well",
            )
    return None


def _same_place(name: str, image_id: str) -> bool:
    """Whether the folders of the two agree, from the last one as far as both have any."""
    pairs = zip(reversed(name.split("/")[:-1]), reversed(image_id.split("/")[:-1]), strict=False)
    return all(a == b for a, b in pairs)


def _stem(name: str) -> str:
    """The file name without folders and image ending."""
    base = name.rpartition("/")[2]
    head, dot, ending = base.rpartition(".")
    return head if head and dot + ending.lower() in IMAGE_EXTENSIONS else base
