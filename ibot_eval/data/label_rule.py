"""What the pixels of a label map mean: from numbers or colours in a PNG to class indices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ibot_eval.errors import BadImage, ConfigError, DataError

IGNORED = 255
"""What :func:`read_labels` gives for pixels without a class."""
BEYOND = 256
"""Where :func:`raw_labels` puts numbers that 8 bits do not hold."""
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class LabelRule:
    """How the pixels of label maps become classes; plain values, so that a configuration file can hold it."""

    table: tuple[int, ...]
    """Of each of the 256 numbers the index of its class, or 255 for none."""
    colours: tuple[Colour, ...] = ()
    """Of each class its colour, for label maps that are coloured; those that hold numbers go by ``table``."""

    def apply(self, raw: np.ndarray) -> np.ndarray:
        """Class indices, (h, w) uint8 with 255 for none, of what :func:`raw_labels` gives."""
        raw = raw if self.colours else without_channels(raw)
        if raw.ndim == 3:
            codes = _codes(raw)
            known = _codes(np.array(self.colours, np.uint8).reshape(-1, 3))
            order = np.argsort(known)
            place = np.searchsorted(known[order], codes).clip(max=max(0, len(known) - 1))
            found = np.full(codes.shape, IGNORED, np.uint8)
            if len(known):
                right = known[order][place] == codes
                found[right] = order[place[right]]
            return found
        table = np.array([*self.table, IGNORED], np.uint8)  # the last for BEYOND
        return table[raw]


def make_rule(
    classes: int, *, ignore: int, reduce_zero: bool, ids: Sequence[int] = (), colours: Sequence[Colour] = ()
) -> LabelRule:
    """The rule for label maps that number ``classes`` classes from 0, or from 1 with ``reduce_zero``.

    Args:
        ignore: the number of pixels without a class.
        reduce_zero: 0 means no class, and 1 is the first; numbers in the file are meant, also by ``ignore``.
        ids: the number of each class, where these do not simply count; one of them may be ``ignore``.
        colours: the colour of each class.
    """
    table = np.full(256, IGNORED, np.uint8)
    numbers = list(ids) or [i + reduce_zero for i in range(classes)]
    for index, number in enumerate(numbers):
        if number < 256:
            table[number] = index
    if 0 <= ignore < 256 and ignore not in ids:
        table[ignore] = IGNORED
    return LabelRule(tuple(table.tolist()), tuple(colours))


def raw_labels(file: Path, coloured: bool = False) -> np.ndarray:
    """The pixels of a label map as they are stored: (h, w) uint8 or int16 numbers, or (h, w, 3) uint8 colours.

    One bit per pixel gives 0 and 1. What is no whole number of 8 bits becomes 256. No orientation tag is heeded, since
    label maps are arrays and no photographs.

    Args:
        file: an image.
        coloured: a palette gives its colours; otherwise its indices.

    Raises:
        BadImage: the file cannot be decoded.
        DataError: it may not be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file) as image:
                image.load()
                if image.mode in {"RGBA", "LA", "PA", "CMYK", "YCbCr"} or (coloured and image.mode == "P"):
                    image = image.convert("RGB")
                pixels = np.asarray(image)
    except PermissionError as error:
        raise DataError(f"no permission to read {file}", todo="change the file's permissions (chmod +r)") from error
    except MemoryError:
        raise
    except Exception as error:  # PIL's decoders raise nearly anything
        raise BadImage(f"cannot decode the label map {file}: {error}", todo="replace the file") from error
    if pixels.dtype == bool:
        return pixels.astype(np.uint8)
    if pixels.dtype == np.uint8:
        return pixels
    whole = (pixels >= 0) & (pixels <= 255) & (pixels % 1 == 0)
    return np.where(whole, pixels, BEYOND).astype(np.int16)


def without_channels(raw: np.ndarray) -> np.ndarray:
    """The numbers, where they are stored as grey in three channels; else ``raw`` as it is."""
    if raw.ndim == 3 and (raw == raw[..., :1]).all():
        return raw[..., 0]
    return raw


def read_labels(file: Path, rule: LabelRule) -> np.ndarray:
    """Class indices of a label map, (h, w) uint8, 255 where there is none.

    Raises:
        UserError: as :func:`raw_labels`.
    """
    return rule.apply(raw_labels(file, bool(rule.colours)))


def _codes(colours: np.ndarray) -> np.ndarray:
    wide = colours.astype(np.int32)
    return (wide[..., 0] << 16) | (wide[..., 1] << 8) | wide[..., 2]


def colour_counts(raw: np.ndarray) -> dict[Colour, int]:
    """How many pixels of (h, w, 3) uint8 have each colour."""
    codes, counts = np.unique(_codes(raw), return_counts=True)
    pairs = zip(codes.tolist(), counts.tolist(), strict=True)
    return {(code >> 16, code >> 8 & 255, code & 255): count for code, count in pairs}


def read_classes(file: Path) -> tuple[tuple[str, ...], tuple[Colour, ...]]:
    """Names of classes, and their colours where they are given, from a text file.

    A line is ``name``, or ``name,R,G,B`` with a colour; then all lines are. Blank lines and a header ``name,r,g,b`` are
    left out.

    Raises:
        ConfigError: the file cannot be read, names a class twice or gives some colours only.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the class list {file}: {reason}", todo="one name per line") from error
    names: list[str] = []
    colours: list[Colour] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.rsplit(",", 3)]
        if len(fields) == 4 and all(field.isdigit() and int(field) < 256 for field in fields[1:]):
            names.append(fields[0])
            colours.append((int(fields[1]), int(fields[2]), int(fields[3])))
        elif not names and [field.lower() for field in fields[1:]] == ["r", "g", "b"]:
            continue
        else:
            names.append(line.strip())
        if names[-1] in names[:-1]:
            raise ConfigError(f"the class list {file} names {names[-1]!r} twice", where=f"line {number}")
    if not names:
        raise ConfigError(f"the class list {file} is empty", todo="one name per line, in the order of the labels")
    if len(names) > IGNORED:
        raise ConfigError(f"the class list {file} has {len(names)} classes; label maps here hold at most {IGNORED}")
    if colours and len(colours) != len(names):
        raise ConfigError(f"the class list {file} gives colours to {len(colours)} of {len(names)} classes")
    if len(set(colours)) != len(colours):
        raise ConfigError(f"the class list {file} gives one colour to two classes")
    return tuple(names), tuple(colours)
