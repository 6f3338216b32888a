"""Data from a folder on disk: DIR/SPLIT/CLASS/images, or flat splits without class folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ibot_eval.data.folders import FolderSplit, Scan, default_test_folder, find_folder, scan, visible_folders
from ibot_eval.data.label_file import read_labels
from ibot_eval.data.splits import Data, ImageSplit, few, natural_sort, near
from ibot_eval.errors import DataError
from ibot_eval.settings import DataSettings


def open_folder(reference: str, settings: DataSettings, roles: Sequence[str]) -> Data:
    """Data from ``reference``, a folder.

    The classes are the class folders of all splits together, in natural order, so that every split shares one
    numbering; images lie in the order of their class, then of their path as plain text. Images of a flat split have
    label -1 unless ``settings.test_labels`` gives them, and then lie in the order of their path.

    Raises:
        DataError: a folder that is not there or may not be read, or a labels file that does not fit.
    """
    root = Path(reference).expanduser()
    if not root.is_dir():
        raise _no_folder(root)
    names = {"train": settings.train_split, "test": settings.test_split or default_test_folder(root)}
    folders = {role: find_folder(root, names[role], f"--{role}-split") for role in roles}
    scans: dict[str, Scan] = {names[role]: scan(folders[role]) for role in roles}
    from_file = {"test"} if settings.test_labels is not None else set()

    notes = [note for name, found in scans.items() for note in found.warnings(name)]
    classes: set[str] = set()
    for role in roles:
        found = scans[names[role]]
        if role not in from_file and not _is_flat(found):
            classes.update(found.folders)
            loose = [file for file in found.images if "/" not in file]
            if loose:
                notes.append(f"{names[role]}: {len(loose)} images outside of class folders left out: {few(loose)}")
    if "train" not in roles and names["train"] != "." and (root / names["train"]).is_dir():
        classes.update(visible_folders(root / names["train"]))  # so that a label does not depend on the roles asked for
    class_names = natural_sort(classes)

    splits: dict[str, ImageSplit] = {}
    for role in roles:
        found = scans[names[role]]
        if role in from_file and settings.test_labels is not None:
            files = found.images
            if not files:
                raise DataError(f"there are no images in {folders[role]}")
            labels, class_names = read_labels(settings.test_labels, files, class_names)
        elif _is_flat(found):
            files, labels = found.images, np.full(len(found.images), -1, np.int64)
        else:
            files, labels = _by_class(found, class_names)
        splits[role] = FolderSplit(names[role], folders[role], files, labels, content=settings.fingerprint == "content")
    return Data(reference, class_names, splits, {role: names[role] for role in roles}, list(dict.fromkeys(notes)))


def _is_flat(found: Scan) -> bool:
    """Whether images lie directly inside and in no folder; stray folders without images do not make classes."""
    return bool(found.images) and not any("/" in file for file in found.images)


def _by_class(found: Scan, class_names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    to_idx = {name: i for i, name in enumerate(class_names)}
    files = [file for file in found.images if "/" in file]
    labels = np.array([to_idx[file.partition("/")[0]] for file in files], np.int64)
    order = np.argsort(labels, kind="stable")
    return [files[i] for i in order], labels[order]


def is_imagenet_1k(class_names: Sequence[str], test_images: int) -> bool:
    """Whether this is ImageNet-1K with its validation set as the test split: 1000 WordNet ids, 50,000 images."""
    wordnet = all(re.fullmatch(r"n\d{8}", name) for name in class_names)
    return len(class_names) == 1000 and wordnet and test_images == 50_000


def _no_folder(root: Path) -> DataError:
    if root.exists():
        return DataError(
            f"--data {root} is a file, not a folder", todo="unpack it, or give shards of a WebDataset as wds/FOLDER"
        )
    parent = root.parent
    hint = near(root.name, visible_folders(parent)) if parent.is_dir() else f"{parent} does not exist either"
    return DataError(f"--data {root}: there is no such folder; {hint}", todo="check the path")
