"""Test sets of several folders with the same classes: one split for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ibot_eval.data.folders import FolderSplit, scan
from ibot_eval.data.splits import Data, ImageSplit, few, first_per_class, natural_sort
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.settings import DataSettings


def open_variants(settings: DataSettings, folders: Mapping[str, str]) -> Data:
    """One split per folder of class folders; all share one list of classes.

    Args:
        settings: ``data`` is the folder that holds all; ``test_per_class`` holds for each of them.
        folders: name of the split -> its folder below ``data``.

    Returns:
        splits by those names; folders that are missing or empty are left out, and a warning says so.

    Raises:
        DataError: no such folder, or no images in any of them.
        ConfigError: a name or labels of a test split.
    """
    if settings.test_split is not None or settings.test_labels is not None:
        raise ConfigError(
            "the folders below --data have fixed names and class folders",
            where="--test-split" if settings.test_split is not None else "--test-labels",
            todo="leave it out, and give the folder that holds them as --data",
        )
    if settings.test_per_class is not None and settings.test_per_class < 1:
        raise ConfigError(f"--test-per-class {settings.test_per_class}: at least 1 image per class is needed")
    root = Path(settings.data or "").expanduser()
    if not root.is_dir():
        raise DataError(f"--data {root}: there is no such folder", todo="check the path")
    found = {name: scan(root / path) for name, path in folders.items() if (root / path).is_dir()}
    files = {name: [file for file in there.images if "/" in file] for name, there in found.items()}
    missing, empty = [n for n in folders if n not in found], [n for n in found if not files[n]]
    notes = []
    if missing:
        notes.append(f"variants that are not there, left out: {few(missing, 20)}")
    if empty:
        notes.append(f"variants without images in class folders, left out: {few(empty, 20)}")
    names = natural_sort(file.partition("/")[0] for there in files.values() for file in there)
    if not names:
        raise DataError(
            f"none of the folders {few(folders.values(), 8)} in {root} holds images in class folders",
            todo="\n    ".join(notes),
        )
    index = {name: i for i, name in enumerate(names)}
    splits: dict[str, ImageSplit] = {}
    for name, there in files.items():
        if there:
            labels = np.array([index[file.partition("/")[0]] for file in there], np.int64)
            if settings.test_per_class is not None:
                chosen = first_per_class(labels, settings.test_per_class)
                there, labels = [there[i] for i in chosen], labels[chosen]
            content = settings.fingerprint == "content"
            splits[name] = FolderSplit(folders[name], root / folders[name], there, labels, content=content)
            lacking = [names[i] for i in np.setdiff1d(np.arange(len(names)), labels)]
            if lacking:
                notes.append(f"{name}: no images of {len(lacking)} of {len(names)} classes: {few(lacking, 5)}")
            notes += found[name].warnings(name)
    return Data(str(settings.data), names, splits, {name: folders[name] for name in splits}, notes)


def open_one(settings: DataSettings, folder: Path | str, name: str) -> Data:
    """As :func:`open_variants`, for one folder of class folders."""
    return open_variants(replace(settings, data=str(folder)), {name: "."})
