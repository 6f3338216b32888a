"""Any image file -> upright 8-bit RGB, or a BadImage that names the file."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from torchvision.datasets.folder import IMG_EXTENSIONS

from ibot_eval.errors import BadImage, DataError

IMAGE_EXTENSIONS: tuple[str, ...] = tuple(IMG_EXTENSIONS)
"""Lower-case endings, with the dot, of the files that count as images: torchvision's list."""

# A damaged file makes decoders seek to negative places, which is EINVAL.
_IMAGES_FAULTS = {None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL}

_SKIP = "replace the file, or leave such images out with --bad-images skip"

# PIL's own exif_transpose also rewrites the EXIF block and fails on files whose other tags are malformed.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def load_rgb(file: Path | BinaryIO, name: str) -> Image.Image:
    """Decode ``file`` in full and return it as upright 8-bit RGB (see :func:`to_rgb`).

    No reduced-size JPEG decoding is used: it is faster and gives other pixels than the published evaluations saw.
    Of an animation the first frame is taken.

    Args:
        file: a path, or a seekable binary stream.
        name: what errors call the file.

    Raises:
        BadImage: truncated, empty, missing, not an image, too large to be safe (PIL's decompression-bomb limit), or in
            a format without a defined 8-bit meaning.
        DataError: the file may not be read (permissions), or the system cannot read it just now (too many open files,
            a disk or network error); never skipped, since no image is at fault.
    """
    try:
        # PIL warns on stderr about large images, odd palettes and malformed EXIF of files that decode well.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file) as image:
                image.load()
                return to_rgb(image, name)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # PIL's decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, …
        if not is_images_fault(error):
            raise unreadable(name, error) from error
        raise BadImage(f"cannot decode the image {name}: {_reason(file, error)}", todo=_SKIP) from error


def is_images_fault(error: Exception) -> bool:
    """Whether ``error`` says something about the image, rather than about the system that was to read it."""
    return not isinstance(error, OSError) or error.errno in _IMAGES_FAULTS


def unreadable(name: str, error: Exception) -> DataError:
    """What to raise where no image is at fault."""
    if isinstance(error, PermissionError):
        return DataError(f"no permission to read {name}", todo="change the file's permissions (chmod +r)")
    return DataError(
        f"cannot read {name}: {getattr(error, 'strerror', None) or error}",
        todo="this is no damage of the image but the system's or the disk's trouble, so the image is not left out: run "
        "again when it is over; what is finished is kept",
    )


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """An opened image as upright 8-bit RGB.

    - EXIF orientation is applied; orientation tags that cannot be parsed are ignored.
    - 16-bit greyscale (``I;16``, ``I``) is divided by 257, so that 65535 becomes 255; nothing is clipped.
    - Float greyscale (``F``) must lie in 0 to 1 and is multiplied by 255.
    - Transparency is dropped, the colours beneath it kept, as ``convert("RGB")`` of the published loaders does.
    - CMYK is converted as PIL does, which undoes the inversion of Adobe JPEGs.

    Raises:
        BadImage: integers beyond 16 bits, or floats outside 0 to 1.
        ValueError: a mode that PIL does not convert to RGB.
    """
    image = _upright(image)
    mode = image.mode
    if mode == "RGB":
        return image
    if mode == "F" or mode.startswith("I"):
        return Image.fromarray(_eight_bits(np.asarray(image), name)).convert("RGB")
    if mode in {"P", "PA", "RGBa"}:
        image = image.convert("RGBA")  # straight to RGB, PIL warns about palettes with transparency
    elif mode == "La":
        image = image.convert("LA")
    return image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception as error:  # malformed EXIF raises anything, and says nothing about the pixels
        if not is_images_fault(error):
            raise
        return image
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _eight_bits(pixels: np.ndarray, name: str) -> np.ndarray:
    low, high = pixels.min(), pixels.max()
    is_float = pixels.dtype.kind == "f"
    limit = 1 if is_float else 65535
    if not (low >= 0 and high <= limit):
        kind = "float pixels outside 0 to 1" if is_float else "integer pixels outside 0 to 65535"
        raise BadImage(f"the image {name} has {kind} ({low} to {high}): its white is not defined", todo=_SKIP)
    return np.rint(pixels.astype(np.float64) * (255 / limit)).astype(np.uint8)


def _reason(file: Path | BinaryIO, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file does not exist (a broken link?)"
    if isinstance(error, UnidentifiedImageError):
        size = file.seek(0, os.SEEK_END) if not isinstance(file, os.PathLike) else os.stat(file).st_size
        return "the file is empty (0 bytes)" if size == 0 else "this is not an image that PIL can read"
    return f"{error}" or type(error).__name__
