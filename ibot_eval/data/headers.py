"""What is wrong with image files: by their headers alone, or by decoding them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import ExifTags, Image

from ibot_eval.data.annotated import AnnotatedSplit, each
from ibot_eval.data.annotation_report import Finding, Report, found
from ibot_eval.data.images import load_rgb
from ibot_eval.errors import BadImage

Size = tuple[int, int]
"""Width and height in pixels."""
_TURNED = {5, 6, 7, 8}
"""EXIF orientations that exchange width and height."""
_GREY = {"1", "L", "LA", "La"}


class Header(NamedTuple):
    """Of one image file."""

    size: Size
    """Once the image is upright, as it is loaded."""
    stored: Size
    """As it lies in the file."""
    mode: str
    """PIL's."""
    fault: str = ""
    """Why it cannot be read; empty if it can."""


def read_header(path: Path) -> Header:
    """The header of ``path``; never raises for a file that is missing or damaged."""
    try:
        # PIL warns of large images and malformed EXIF.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                width, height = image.size
                try:
                    turned = image.getexif().get(ExifTags.Base.Orientation) in _TURNED
                except Exception:  # noqa: BLE001 - malformed EXIF raises anything, and says nothing about the image
                    turned = False
                return Header((height, width) if turned else (width, height), (width, height), image.mode)
    except FileNotFoundError:
        return Header((0, 0), (0, 0), "", "missing")
    except Exception as error:  # noqa: BLE001 - PIL raises nearly anything for a damaged file
        return Header((0, 0), (0, 0), "", f"{error}" or type(error).__name__)


def undecodable(paths: Sequence[Path]) -> list[int]:
    """Indices of the images that break off or are damaged behind a proper header. Decodes them all.

    Raises:
        DataError: a file that may not be read, which is no fault of an image.
    """

    def broken(path: Path) -> bool:
        if read_header(path).fault:
            return False
        try:
            load_rgb(path, str(path))
        except BadImage:
            return True
        return False

    return [index for index, bad in enumerate(each(broken, paths)) if bad]


def check_decodable(split: AnnotatedSplit, bad_images: Literal["stop", "skip"]) -> tuple[Report, frozenset[int]]:
    """What there is to say of images that cannot be decoded, and which they are.

    For test images: nobody should learn of them once hours have been spent on training. With "skip" they are noted,
    unless they are all there is; else they are an error.
    """
    broken = undecodable(split.paths)
    cases = [split.image_ids[index] for index in broken]
    if bad_images == "skip" and len(broken) < len(split):
        findings = found("note", "images that cannot be decoded are left out of the test", cases)
    else:
        todo = "replace the files, or leave such images out with --bad-images skip"
        findings = found("error", "images that cannot be decoded", cases, todo)
    return Report(findings).within(split.name), frozenset(broken)


def check_headers(paths: Sequence[Path], sizes: Sequence[Size], said: str) -> list[Finding]:
    """Findings about image files: missing, unreadable, of another size than their annotations are for, greyscale.

    Args:
        paths: the images.
        sizes: of the annotations of each; (0, 0) where that is not known.
        said: what says these sizes: "the annotations", "the label map".
    """
    headers = each(read_header, paths)
    rows = list(zip(paths, headers, sizes, strict=True))
    readable = [row for row in rows if not row[1].fault]
    other = [row for row in readable if row[2] != (0, 0) and row[1].size != row[2]]
    turned = [row for row in other if row[1].stored == row[2]]
    return [
        *found("error", "images that are not there", (path for path, header, _ in rows if header.fault == "missing")),
        *found(
            "error",
            "images that cannot be read",
            (path for path, header, _ in rows if header.fault not in ("", "missing")),
            "replace the files, or take them out",
        ),
        *found(
            "error",
            f"images of another size than {said} has",
            (
                f"{path}: {header.size[0]}x{header.size[1]}, not {size[0]}x{size[1]}"
                for path, header, size in other
                if header.stored != size
            ),
            "boxes and masks belong to one size: resize them together",
        ),
        *found(
            "error",
            "images that their EXIF tag turns, annotated as if it did not",
            (path for path, _, _ in turned),
            "the tag is heeded when they are loaded: save them without it",
        ),
        *found("note", "greyscale images, read as RGB", (path.name for path, h, _ in readable if h.mode in _GREY)),
        *found(
            "note",
            "images of more than 8 bits, read as 8",
            (path.name for path, header, _ in readable if header.mode == "F" or header.mode.startswith("I")),
        ),
    ]
