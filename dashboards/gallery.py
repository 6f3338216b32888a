"""The images that may be looked at: those below --data, or scikit-learn's samples; by name, never by path."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Protocol

from ibot_eval.data.folders import scan
from ibot_eval.errors import DataError
from ibot_eval.visual.pictures import Source, open_path, sample_sources

NOT_HERE = "choose an image from the list"


def holds(root: str, path: Path) -> bool:
    """Whether ``path`` lies below ``root``, a path without links, once all its links are followed."""
    return os.path.commonpath([root, os.path.realpath(path)]) == root


class Gallery(Protocol):
    """Images by name."""

    folders: dict[str, list[str]]
    """Folder below the root ("" for the root itself) -> file names in it."""
    notes: list[str]
    """What was left out, in plain words."""

    def open(self, name: str) -> Source:
        """The image called ``name`` (folder/file). Raises DataError for any other name, BadImage for a broken file."""
        ...

    def stamp(self, name: str) -> str:
        """Changes when the file does."""
        ...


class Folder:
    """Image files below a folder. Links that lead out of it are refused, when listing and again when opening."""

    def __init__(self, root: Path) -> None:
        """Raises DataError: the folder cannot be read, or holds no image."""
        self.root = root
        self._real = os.path.realpath(root)
        found = scan(root)
        self.folders: dict[str, list[str]] = {}
        outside = 0
        inside: dict[str, bool] = {}
        for name in found.images:
            folder, _, file = name.rpartition("/")
            if folder not in inside:
                inside[folder] = self._holds(root / folder)
            if not inside[folder] or (os.path.islink(root / name) and not self._holds(root / name)):
                outside += 1
            else:
                self.folders.setdefault(folder, []).append(file)
        self.notes = [f"{outside} images are links that lead out of {root}: left out"] if outside else []
        if not self.folders:
            raise DataError(
                f"there are no images in {root}" + (f" ({self.notes[0]})" if outside else ""),
                where="--data",
                todo="give a folder that holds JPEG, PNG, WebP, BMP, TIFF or PPM files, in sub-folders or not",
            )

    def path(self, name: str) -> Path:
        """The file of an image in the list, links resolved.

        Raises:
            DataError: no image of the list has this name, or its file lies outside of the folder by now.
        """
        folder, _, file = name.rpartition("/")
        if file not in self.folders.get(folder, ()):
            raise DataError("there is no such image in the folder of --data", todo=NOT_HERE)
        path = self.root / name
        if not self._holds(path):
            raise DataError(f"the image {PurePosixPath(name).name} is a link that leads out of --data", todo=NOT_HERE)
        return path

    def open(self, name: str) -> Source:
        return open_path(self.path(name))

    def stamp(self, name: str) -> str:
        try:
            stat = self.path(name).stat()
        except OSError:
            return "missing"
        return f"{stat.st_size}-{stat.st_mtime_ns}"

    def _holds(self, path: Path) -> bool:
        return holds(self._real, path)


class Samples:
    """The pictures that come with scikit-learn."""

    def __init__(self) -> None:
        self._sources = {source.name: source for source in sample_sources()}
        self.folders = {"": list(self._sources)}
        self.notes: list[str] = []

    def open(self, name: str) -> Source:
        if name not in self._sources:
            raise DataError("there is no such sample picture", todo=NOT_HERE)
        return self._sources[name]

    def stamp(self, name: str) -> str:
        return ""
