"""Images whose labels lie in files of their own: boxes, masks, label maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TypeVar

import numpy as np

from ibot_eval.data.folders import FolderSplit, file_marks
from ibot_eval.data.splits import hash_lines
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.settings import DataSettings

In = TypeVar("In")
Out = TypeVar("Out")


class AnnotatedSplit(FolderSplit):
    """Image files below one folder, whose labels lie in other files. ``labels`` are all -1."""

    def __init__(
        self, name: str, folder: Path, files: Sequence[str], annotations: Sequence[Path], *, content: bool = False
    ) -> None:
        """
        Args:
            name: the split's own name; image ids are ``name/file``.
            folder: where the images lie.
            files: paths of the images below ``folder``, '/' between their parts.
            annotations: the files that hold the labels: one for all images, or one for each in their order.
            content: fingerprint the files' bytes rather than their size and modification time.
        """
        super().__init__(name, folder, files, np.full(len(files), -1, np.int64), content=content)
        self.annotations = list(annotations)

    @property
    def paths(self) -> list[Path]:
        """The image files, in order."""
        return [self.path(i) for i in range(len(self))]

    @property
    def rule(self) -> Sequence[str]:
        """How the annotations are read, for the fingerprint; subclasses that have a choice say which."""
        return ()

    def _fingerprint(self) -> str:
        marks = file_marks([str(path) for path in self.annotations], content=self.content)
        return hash_lines("annotated images", [super()._fingerprint(), *marks, *self.rule])


def whole_only(settings: DataSettings, what: str) -> None:
    """Raises ConfigError for settings that divide images by their class, which annotated images have none of."""
    for name in ("train_per_class", "test_per_class", "test_labels"):
        if getattr(settings, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for images with one class each, and {what} has annotations",
                todo="leave the flag out",
            )


def data_root(settings: DataSettings) -> Path:
    """The folder that ``--data`` names.

    Raises:
        ConfigError: it names none.
        DataError: there is no such folder.
    """
    if not settings.data:
        raise ConfigError("no data set was given", todo="give --data FOLDER")
    root = Path(settings.data).expanduser()
    if not root.is_dir():
        kind = "a file, not a folder" if root.exists() else "not there"
        raise DataError(f"--data {root} is {kind}", todo="name the folder that holds the images and the annotations")
    return root


def each(work: Callable[[In], Out], items: Iterable[In], threads: int = 8) -> list[Out]:
    """``work`` of every item, in order, by threads: for reading files, which releases the interpreter's lock."""
    with ThreadPool(threads) as pool:
        return list(pool.imap(work, items, chunksize=16))
