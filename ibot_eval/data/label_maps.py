"""Data for segmentation: images, and label maps (PNGs whose pixels are classes) beside them.

:mod:`ibot_eval.data.label_pairs` finds the files, :mod:`ibot_eval.data.label_map_check` looks for faults in
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np

from ibot_eval.data.annotated import AnnotatedSplit, data_root, each, whole_only
from ibot_eval.data.class_lists import ADE20K, CITYSCAPES, CITYSCAPES_IDS
from ibot_eval.data.label_pairs import find_pairs
from ibot_eval.data.label_rule import (
    BEYOND,
    Colour,
    LabelRule,
    make_rule,
    raw_labels,
    read_classes,
    read_labels,
    without_channels,
)
from ibot_eval.data.splits import Data
from ibot_eval.errors import BadImage, DataError
from ibot_eval.settings import DataSettings

_SIZES_OF_ADE20K = {"train": 20_210, "test": 2_000}
_SIZES_OF_CITYSCAPES = {"train": 2_975, "test": 500}
LOOKED_AT = 200
"""Label maps that show how labels are numbered, where nothing says it."""


class LabelMapSplit(AnnotatedSplit):
    """Images with a label map each, in the order of their paths as plain text."""

    def __init__(
        self,
        name: str,
        folder: Path,
        files: Sequence[str],
        label_paths: Sequence[Path],
        class_names: Sequence[str],
        label_rule: LabelRule,
        *,
        ignore_index: int = 255,
        reduce_zero_label: bool = False,
        unlabelled: Sequence[str] = (),
        orphans: Sequence[str] = (),
        content: bool = False,
    ) -> None:
        """
        Args:
            name: the split's name.
            folder: where the images lie.
            files: paths of the images that have a label map, below ``folder``.
            label_paths: their label maps.
            class_names: in the order of the class indices.
            label_rule: from the numbers in the files to class indices.
            ignore_index: the number in the files of pixels without a class.
            reduce_zero_label: whether 0 in the files means no class, and 1 the first.
            unlabelled: images without a label map, which are not part of the split.
            orphans: label maps without an image.
            content: fingerprint by the files' bytes.
        """
        super().__init__(name, folder, files, label_paths, content=content)
        self.class_names, self.label_rule = tuple(class_names), label_rule
        self.ignore_index, self.reduce_zero_label = ignore_index, reduce_zero_label
        self.unlabelled, self.orphans = tuple(unlabelled), tuple(orphans)

    @property
    def label_paths(self) -> list[Path]:
        """The label map of each image."""
        return self.annotations

    @property
    def rule(self) -> Sequence[str]:
        return [json.dumps([self.class_names, asdict(self.label_rule)])]

    def read_labels(self, i: int) -> np.ndarray:
        """Class indices of image ``i``'s pixels, (h, w) uint8, 255 where there is none. Raises BadImage."""
        return read_labels(self.annotations[i], self.label_rule)

    def take(self, indices: Sequence[int] | np.ndarray) -> LabelMapSplit:
        return LabelMapSplit(
            self.name,
            self.folder,
            [self.image_ids[i].removeprefix(self._prefix) for i in indices],
            [self.annotations[i] for i in indices],
            self.class_names,
            self.label_rule,
            ignore_index=self.ignore_index,
            reduce_zero_label=self.reduce_zero_label,
            content=self.content,
        )


def open_label_maps(
    settings: DataSettings,
    roles: Sequence[str] = ("train", "test"),
    *,
    classes: Path | None = None,
    reduce_zero: Literal["auto"] | bool = "auto",
    ignore: int = 255,
) -> Data:
    """The images and label maps in the folder ``settings.data``. They are matched, but their pixels are not checked.

    Class names come from ``classes``, else FOLDER/classes.txt, else they are ADE20K's or Cityscapes' where files are
    named as there, else the numbers found in the label maps. With "auto", 0 means no class in ADE20K, and where labels
    count from 1 up to the number of names.

    Args:
        classes: a file with a name per line, or ``name,R,G,B`` for label maps that are coloured, black and white ones
            included.
        reduce_zero: whether 0 means no class, and 1 the first.
        ignore: the number of pixels without a class (in the files, before ``reduce_zero``).

    Raises:
        ConfigError: a class list that cannot be used, or settings that are for images with one class each.
        DataError: no such folder or split, or no image has a label map.
    """
    root = data_root(settings)
    whole_only(settings, "segmentation data")
    asked = {"train": settings.train_split, "test": settings.test_split}
    pairs = {role: find_pairs(root, role, asked[role]) for role in roles}
    notes: list[str] = []
    first = next(iter(pairs.values()))
    names, colours, known = _names(root, classes, first.kind)
    reduce = known == "ade20k" if reduce_zero == "auto" else reduce_zero
    # Masks in black and white, or in greys, are numbers that do not count.
    greys = tuple(r for r, g, b in colours if r == g == b) if all(len(set(c)) == 1 for c in colours) else ()
    if not known and not greys and (not names or reduce_zero == "auto"):
        # Without names every label map counts; with them, some show whether labels count from 0 or 1.
        files = [file for found in pairs.values() for file in found.labels]
        values = sorted(_values(files if not names else files[:: max(1, len(files) // LOOKED_AT)]) - {ignore, BEYOND})
        if names and values and values[0] == 1 and values[-1] == len(names):
            reduce = True
            notes.append(
                f"labels run from 1 to {len(names)}, so 1 is taken for {names[0]!r} (--reduce-zero no counts from 0)"
            )
        if not names and not values:
            raise DataError(
                f"the label maps of {first.name!r} hold colours or nothing but {ignore}, so the classes are unknown",
                where=str(root),
                todo="give --classes FILE with a line 'name,R,G,B' per class (or 'name' for label maps of numbers)",
            )
        if not names:
            names = tuple(str(i) for i in range(int(reduce), values[-1] + 1))
            notes.append(f"there is no class list, so classes are called by their numbers, {names[0]} to {names[-1]}")
    ids = {role: CITYSCAPES_IDS if found.kind == "cityscapes ids" and known else greys for role, found in pairs.items()}
    splits = {
        role: LabelMapSplit(
            found.name,
            found.folder,
            found.files,
            found.labels,
            names,
            make_rule(len(names), ignore=ignore, reduce_zero=reduce, ids=ids[role], colours=colours),
            ignore_index=ignore,
            reduce_zero_label=reduce,
            unlabelled=found.unlabelled,
            orphans=found.orphans,
            content=settings.fingerprint == "content",
        )
        for role, found in pairs.items()
    }
    sizes = {role: len(split) for role, split in splits.items()}
    data = Data(str(settings.data), names, dict(splits), {role: s.name for role, s in splits.items()}, notes)
    if known == "ade20k" and reduce and sizes.items() <= _SIZES_OF_ADE20K.items():
        data.data_name = "ADE20K"
    if known == "cityscapes" and sizes.items() <= _SIZES_OF_CITYSCAPES.items():
        data.data_name = "Cityscapes"
    return data


def _names(root: Path, classes: Path | None, kind: str) -> tuple[tuple[str, ...], tuple[Colour, ...], str]:
    """Names, colours, and which known class list it is ('' for none)."""
    if classes is None:
        beside = root / "classes.txt"
        if beside.is_file():
            classes = beside
        elif kind == "ade20k":
            return ADE20K, (), "ade20k"
        elif kind.startswith("cityscapes"):
            return CITYSCAPES, (), "cityscapes"
        else:
            return (), (), ""
    names, colours = read_classes(classes.expanduser())
    if kind.startswith("cityscapes") and len(names) == len(CITYSCAPES):
        return names, colours, "cityscapes"
    if kind == "ade20k" and len(names) == len(ADE20K):
        return names, colours, "ade20k"
    return names, colours, ""


def _values(files: Sequence[Path]) -> set[int]:
    """The numbers that occur in label maps; colours and damaged files are left to the check."""

    def values(file: Path) -> list[int]:
        with suppress(BadImage):
            raw = without_channels(raw_labels(file))
            return np.unique(raw).tolist() if raw.ndim == 2 else []
        return []

    return {value for found in each(values, files) for value in found}
