"""Labels of a flat test folder, read from a text or CSV file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ibot_eval.data.splits import few, natural_sort, near
from ibot_eval.errors import DataError

_FORMS = "a line 'image label' per image, separated by white space or a comma"


def read_labels(path: Path, files: Sequence[str], class_names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels of ``files``.

    Lines are ``image label``, separated by white space or a comma; a header line is allowed; the image may lack its
    extension or its folders; of several values in the second column the first is taken (Kaggle's
    ``LOC_val_solution.csv``). A file with one bare label per line, as many lines as images, goes by the sorted order
    of the images. A label is a class name, or an index into the sorted classes that counts from 0.

    Args:
        path: the file.
        files: relative paths of the images, sorted as plain text.
        class_names: the classes in order; empty where nothing else names them, and then the file does.

    Returns:
        labels: (n,) int64.
        class_names: as given, or taken from the file.

    Raises:
        DataError: the file cannot be read; an image is missing, unlabelled, named twice or ambiguous; a label is
            unknown; some labels name classes and others do not; integers run from 1.
    """
    rows = _rows(path)
    index = _ImageIndex(files)
    pairs = [_pair(fields, index) for _, fields in rows]
    known = [image is not None for image, _ in pairs]
    if not any(known):
        names, lines = _bare(path, rows, files, class_names)
        labels, class_names = _resolve(path, names, lines, class_names, bare=True)
        return labels, class_names
    if not known[0] and pairs[0][1] not in class_names and not pairs[0][1].isdigit():
        rows, pairs = rows[1:], pairs[1:]
    lost = [fields[0] for (_, fields), (image, _) in zip(rows, pairs, strict=True) if image is None]
    if lost:
        raise DataError(
            f"{len(lost)} of the images in {path} are not in the test folder: {few(lost)}",
            todo="restore them, or take their lines out of the file",
        )
    owner: dict[int, str] = {}
    twice = []
    for image, label in pairs:
        assert image is not None
        if image in owner:
            twice.append(files[image])
        owner[image] = label
    if twice:
        raise DataError(f"{path} names {len(twice)} images more than once: {few(twice)}", todo="keep one line of each")
    bare_of_label = [file for i, file in enumerate(files) if i not in owner]
    if bare_of_label:
        raise DataError(
            f"{len(bare_of_label)} of {len(files)} images have no label in {path}: {few(bare_of_label)}",
            todo="add their lines, or move the images elsewhere",
        )
    numbers = {image: number for (number, _), (image, _) in zip(rows, pairs, strict=True) if image is not None}
    order = range(len(files))
    return _resolve(path, [owner[i] for i in order], [numbers[i] for i in order], class_names, bare=False)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """(line number, fields); lines without a comma stay whole, as one field."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the labels file {path}: {error}", todo=f"give a text file with {_FORMS}"
        ) from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            fields = next(csv.reader([line.strip()], skipinitialspace=True)) if "," in line else [line.strip()]
            rows.append((number, [field.strip() for field in fields]))
    if not rows:
        raise DataError(f"the labels file {path} is empty", todo=f"give a text file with {_FORMS}")
    return rows


class _ImageIndex:
    """Finds an image by its path, with or without folders and extension."""

    def __init__(self, files: Sequence[str]) -> None:
        self.forms: dict[str, int | None] = {}
        for i, file in enumerate(files):
            base = file.rpartition("/")[2]
            for form in {file, _stem(file), base, _stem(base)}:
                self.forms[form] = None if form in self.forms else i
        for i, file in enumerate(files):  # a whole path is never ambiguous, even where it is another's base name
            self.forms[file] = i
        self.ambiguous = {form for form, i in self.forms.items() if i is None}

    def find(self, name: str) -> int | None:
        name = name.replace("\\", "/").removeprefix("./")
        for form in (name, name.rpartition("/")[2]):
            if form in self.ambiguous:
                raise DataError(
                    f"{name!r} in the labels file fits several images of the test folder",
                    todo="give the path below the test folder, with the extension",
                )
            if form in self.forms:
                return self.forms[form]
        return None


def _stem(name: str) -> str:
    head, dot, tail = name.rpartition(".")
    return head if dot and head and "/" not in tail else name


def _pair(fields: Sequence[str], index: _ImageIndex) -> tuple[int | None, str]:
    """(image or None, label) of one line; image names and class names may both hold spaces."""
    if len(fields) > 1:
        return index.find(fields[0]), fields[1]
    words = fields[0].split()
    cuts = [(fields[0].split(None, 1)), (fields[0].rsplit(None, 1))] if len(words) > 1 else []
    for image, label in cuts:
        found = index.find(image)
        if found is not None:
            return found, label
    return None, (cuts[0][1] if cuts else fields[0])


def _bare(
    path: Path, rows: Sequence[tuple[int, list[str]]], files: Sequence[str], class_names: Sequence[str]
) -> tuple[list[str], list[int]]:
    whole = [(number, fields[0]) for number, fields in rows if len(fields) == 1]
    one_word = all(" " not in label or label in class_names for _, label in whole)
    if len(whole) < len(rows) or not one_word:
        raise DataError(
            f"no line of {path} names an image of the test folder; the first line is {', '.join(rows[0][1])!r}, the "
            f"first image {files[0]!r}",
            todo=f"give {_FORMS}",
        )
    if len(whole) != len(files):
        raise DataError(
            f"{path} holds {len(whole)} bare labels, but there are {len(files)} images",
            todo=f"give one label per image in the sorted order of the images, or {_FORMS}",
        )
    return [label for _, label in whole], [number for number, _ in whole]


def _resolve(
    path: Path, names: Sequence[str], lines: Sequence[int], class_names: Sequence[str], *, bare: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    integers = all(name.isascii() and name.isdigit() for name in names)
    if not class_names and not integers:
        class_names = natural_sort(_class_of(name, ()) for name in names)
    to_idx = {name: i for i, name in enumerate(class_names)}
    labels = [to_idx.get(_class_of(name, to_idx)) for name in names]
    unknown = [i for i, label in enumerate(labels) if label is None]
    if not unknown:
        return np.array(labels, np.int64), tuple(class_names)
    # Where class folders are numbers, one wrong line must not turn all names into indices.
    named = next((i for i, label in enumerate(labels) if label is not None), None)
    if not integers or named is not None:
        i = next((i for i in unknown if not (names[i].isascii() and names[i].isdigit())), unknown[0])
        others = f", as {names[named]!r} in line {lines[named]} is" if named is not None else ""
        raise DataError(
            f"line {lines[i]} of {path} has the label {names[i]!r}, which is no class of the training split{others}; "
            + near(names[i], class_names),
            todo="labels are names of class folders, or indices from 0 into the sorted classes, the same in all lines",
        )
    return _indices(path, [int(name) for name in names], class_names, bare=bare), tuple(
        class_names or (str(i) for i in range(max(map(int, names)) + 1))
    )


def _class_of(name: str, known: object) -> str:
    """A label as a class name: itself, or the first word of it (a Kaggle line goes on with boxes)."""
    if isinstance(known, dict) and name in known:
        return name
    words = name.split()
    boxes = len(words) > 4 and all(word.isdigit() for word in words[1:5])
    return words[0] if boxes else name


def _indices(path: Path, indices: list[int], class_names: Sequence[str], *, bare: bool) -> np.ndarray:
    low, high, count = min(indices), max(indices), len(class_names)
    if bare and low >= 1:
        raise DataError(
            f"the labels in {path} run from {low} to {high} and do not name their images",
            todo="the ILSVRC validation ground truth counts from 1 in the order of its development kit, which is not "
            f"the sorted order of the class folders, so it would give wrong labels without a word: give {_FORMS}, "
            "with class folder names as labels (such as Kaggle's LOC_val_solution.csv)",
        )
    if count and high >= count:
        raise DataError(
            f"the labels in {path} run from {low} to {high}, but the {count} classes are numbered 0 to {count - 1}",
            todo="number the sorted class folders from 0, or give their names",
        )
    return np.array(indices, np.int64)
