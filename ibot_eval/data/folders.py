"""Splits that are folders of image files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from PIL import Image

from ibot_eval.data.images import IMAGE_EXTENSIONS, load_rgb
from ibot_eval.data.splits import ImageSplit, few, hash_lines, near
from ibot_eval.errors import DataError


class FolderSplit(ImageSplit):
    """Image files below one folder."""

    def __init__(
        self, name: str, folder: Path, files: Sequence[str], labels: np.ndarray, *, content: bool = False
    ) -> None:
        """
        Args:
            name: the folder's name inside the data set; image ids are ``name/file``.
            folder: where the files lie.
            files: paths below ``folder``, '/' between their parts.
            labels: (n,) int64.
            content: fingerprint the files' bytes rather than their size and modification time.
        """
        self.name, self.folder, self.content = name, folder, content
        # The ids must not tell where the data set lies, so a path from outside of it shrinks to the folder's name.
        inside = not (os.path.isabs(name) or ".." in Path(name).parts)
        self._prefix = "" if name == "." else f"{(name if inside else folder.resolve().name).strip('/')}/"
        self.image_ids = [self._prefix + file for file in files]
        self.labels = np.asarray(labels, np.int64)
        self.source = str(folder.absolute())

    def path(self, i: int) -> Path:
        """The file of image ``i``."""
        return self.folder / self.image_ids[i].removeprefix(self._prefix)

    def load(self, i: int) -> Image.Image:
        path = self.path(i)
        return load_rgb(path, str(path))

    def take(self, indices: Sequence[int] | np.ndarray) -> FolderSplit:
        files = [self.image_ids[i].removeprefix(self._prefix) for i in indices]
        return FolderSplit(self.name, self.folder, files, self.labels[indices], content=self.content)

    def _fingerprint(self) -> str:
        folder = str(self.folder)  # a Path per file takes longer than looking at the file
        paths = (os.path.join(folder, image_id.removeprefix(self._prefix)) for image_id in self.image_ids)
        kind = "files by content" if self.content else "files by stat"
        return hash_lines(kind, self._lines(file_marks(paths, content=self.content)))

    def _lines(self, marks: Iterable[str]) -> Iterator[str]:
        for image_id, mark, label in zip(self.image_ids, marks, self.labels, strict=True):
            yield f"{image_id}\0{mark}\0{label}"


def file_marks(paths: Iterable[str], *, content: bool) -> Iterator[str]:
    """What tells each file from a changed one: its bytes' sha256, or its size and modification time.

    Raises:
        DataError: a file that may not be looked at or read; one that is not there is marked as missing.
    """
    if not content:
        yield from map(_stat, paths)
        return
    with ThreadPool(8) as pool:  # hashing and reading both release the interpreter's lock
        yield from pool.imap(_content, paths, chunksize=16)


def _stat(path: str) -> str:
    try:
        stat = os.stat(path)
    except FileNotFoundError:  # a broken link: reading the image says so, or leaves it out
        return "missing"
    except OSError as error:
        raise DataError(f"cannot look at {path}: {error.strerror}") from error
    return f"{stat.st_size}\0{stat.st_mtime_ns}"


def _content(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


@dataclass
class Scan:
    """What lies below a folder. Paths are relative to it, '/' between their parts."""

    folders: list[str] = field(default_factory=list)
    """Visible folders directly inside."""
    images: list[str] = field(default_factory=list)
    """All image files, sorted as plain text."""
    other: list[str] = field(default_factory=list)
    """Files that are not images by their extension."""
    hidden: list[str] = field(default_factory=list)
    """Files and folders whose name begins with a dot; nothing below them is looked at."""
    loops: list[str] = field(default_factory=list)
    """Links to a folder that holds them."""

    def warnings(self, name: str) -> list[str]:
        """What was left out, one line a kind."""
        kinds = (
            (self.other, "not images by their extension"),
            (self.hidden, "hidden"),
            (self.loops, "links to a folder that holds them"),
        )
        return [
            f"{name}: {len(files)} {'entry' if len(files) == 1 else 'entries'} left out ({why}): {few(sorted(files))}"
            for files, why in kinds
            if files
        ]


def scan(folder: Path) -> Scan:
    """Everything below ``folder``, links followed.

    Raises:
        DataError: a folder that may not be read, or a name that is not valid UTF-8.
    """
    found = Scan()
    try:
        for path, entry in _walk(folder, "", (os.path.realpath(folder),), found):
            kind = found.images if os.path.splitext(entry.name)[1].lower() in IMAGE_EXTENSIONS else found.other
            kind.append(path)
    except OSError as error:
        raise DataError(
            f"cannot list {error.filename or folder}: {error.strerror}", todo="check its permissions (chmod +rx)"
        ) from error
    found.images.sort()
    found.folders.sort()
    return found


def _walk(folder: Path, prefix: str, above: tuple[str, ...], found: Scan) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(folder / prefix) as entries:
        for entry in entries:
            path = prefix + entry.name
            if not path.isascii():
                _check_utf8(path, folder)
            if entry.name.startswith("."):
                found.hidden.append(path)
            elif entry.is_dir():
                real = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(above[-1], entry.name)
                if real in above:
                    found.loops.append(path)
                    continue
                if not prefix:
                    found.folders.append(path)
                yield from _walk(folder, path + "/", (*above, real), found)
            else:
                yield path, entry


def _check_utf8(path: str, folder: Path) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the name {os.fsencode(path)!r} is not valid UTF-8, so records and caches cannot name the file",
            where=str(folder),
            todo="rename it",
        ) from error


def find_folder(root: Path, name: str, flag: str) -> Path:
    """``root / name`` where that is a folder.

    Raises:
        DataError: it is not; says which folders are there, which is near, and how class folders without splits are
            given.
    """
    folder = root / name
    if folder.is_dir():
        return folder
    there = visible_folders(root)
    if not there:
        has = "there are no sub-folders"
        todo = f"put a folder {name!r} with one folder per class there; images without class folders: {flag} ."
    elif _holds_images(root, there):
        has = f"its sub-folders hold images directly: {few(there, 5)}"
        todo = (
            f"if they are classes, move them into {name}/, or give {flag} . where a protocol needs one split only (as "
            f"with --leave-one-out); if one of them is the split, name it with {flag}"
        )
    else:
        has = f"its sub-folders: {few(there, 20)}"
        todo = f"{near(name, there)} ({flag})"
    raise DataError(f"there is no folder {name!r} in {root}; {has}", todo=todo)


TEST_NAMES = ("val", "validation", "test")
"""Names that a test split goes by, the first that exists winning."""


def default_test_folder(root: Path) -> str:
    """The first of val, validation, test that exists in ``root``; 'val' where none does."""
    return next((name for name in TEST_NAMES if (root / name).is_dir()), TEST_NAMES[0])


def visible_folders(root: Path) -> list[str]:
    """Names of the folders directly in ``root``, sorted as plain text, hidden ones left out."""
    try:
        return sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot list {root}: {error.strerror}", todo="check its permissions (chmod +rx)") from error


def _holds_images(root: Path, folders: Sequence[str]) -> bool:
    """Whether the first few folders hold images directly, as class folders do and splits do not."""
    names = (path.name for folder in folders[:3] for path in islice((root / folder).iterdir(), 100))
    try:
        return any(os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS for name in names)
    except OSError:
        return False
