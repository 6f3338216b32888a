"""Pictures to look at: decoded by the core's loader, and cut to whole patches at any aspect ratio."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from ibot_eval.backbone import Backbone
from ibot_eval.data.images import IMAGE_EXTENSIONS, load_rgb
from ibot_eval.data.splits import natural_key
from ibot_eval.data.transforms import normalised
from ibot_eval.errors import BadImage, ConfigError, DataError
from ibot_eval.visual.grids import whole_patches

MAX_TOKENS = 4096
"""Patches of one picture. Attention over all of them takes heads x tokens² x 4 bytes: 400 MB at six heads."""
UPLOAD_BYTES = 10_000_000
UPLOAD_PIXELS = 40_000_000

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as fractions of the width and the height."""
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Source:
    """A decoded image, before any network."""

    name: str
    """The file's name without its folders."""
    image: Image.Image
    """Upright 8-bit RGB."""
    sha256: str
    """Of its size and pixels."""
    path: Path | None = None
    """Where it was read from; None for an upload."""
    label: str | None = None
    """Its class, where known."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A source, or a part of it, prepared for one patch size."""

    source: Source
    image: Image.Image
    """As the network sees it: whole patches, h * patch x w * patch pixels."""
    patch: int
    """Side of a patch in pixels."""
    box: Box = WHOLE
    """The part of the source that is shown."""
    flip: bool = False
    """Whether left and right are exchanged."""
    notes: tuple[str, ...] = ()
    """What was done to it, in plain words."""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image.height // self.patch, self.image.width // self.patch

    @property
    def sha256(self) -> str:
        """Changes with the source, the part of it that is shown, and the size."""
        parts = (self.source.sha256, self.image.size, self.patch, self.box, self.flip)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def tensor(self, backbone: Backbone) -> Tensor:
        """(1, 3, H, W) float32, normalised for ``backbone`` and on its device."""
        pixels = F.pil_to_tensor(self.image)[None]
        parameter = next(backbone.parameters(), None)
        return normalised(pixels if parameter is None else pixels.to(parameter.device), backbone.mean, backbone.std)

    def pixels(self) -> np.ndarray:
        """(H, W, 3) uint8."""
        return np.asarray(self.image)

    def patch_at(self, x: float, y: float, width: float, height: float) -> tuple[int, int]:
        """The patch (row, column) under a point of the picture shown at width x height pixels."""
        h, w = self.grid
        row, column = int(y / max(height, 1) * h), int(x / max(width, 1) * w)
        return min(max(row, 0), h - 1), min(max(column, 0), w - 1)

    def check_patch(self, patch: tuple[int, int]) -> tuple[int, int]:
        """``patch``, or a ConfigError where the picture has no such (row, column)."""
        h, w = self.grid
        if not (0 <= patch[0] < h and 0 <= patch[1] < w):
            raise ConfigError(
                f"patch {patch[0]} {patch[1]} is outside of {self.name}, which has {h} rows and {w} columns",
                todo=f"rows run from 0 to {h - 1}, columns from 0 to {w - 1}",
            )
        return patch


def open_path(path: Path, label: str | None = None) -> Source:
    """An image file.

    Raises:
        BadImage: missing, damaged, not an image, or too large to be decoded safely.
        DataError: it may not be read.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder, not an image", todo="name image files")
    return source_of(
        decoded(lambda: load_rgb(path, str(path))), path.name, path=path, label=label, notes=_animation(path)
    )


def open_upload(data: bytes, name: str) -> Source:
    """An image that came as bytes from elsewhere, under limits that files of the user's own do not have.

    Args:
        data: the file's content, at most ``UPLOAD_BYTES``; its header may declare at most ``UPLOAD_PIXELS``.
        name: what the sender called it; only the last part is kept.

    Raises:
        BadImage: beyond the limits, damaged, or not an image.
    """
    name = PurePosixPath(PureWindowsPath(name).name).name or "upload"
    if len(data) > UPLOAD_BYTES:
        raise BadImage(
            f"{name} has {len(data) / 1e6:.1f} MB; uploads have at most {UPLOAD_BYTES / 1e6:.0f} MB",
            todo="reduce it first",
        )
    if (size := _declared_size(data)) is not None and size[0] * size[1] > UPLOAD_PIXELS:
        raise BadImage(
            f"{name} has {size[0]:,} x {size[1]:,} pixels; uploads have at most {UPLOAD_PIXELS / 1e6:.0f} million",
            todo="reduce it first",
        )
    return source_of(decoded(lambda: load_rgb(io.BytesIO(data), name)), name, notes=_animation(io.BytesIO(data)))


def source_of(
    image: Image.Image,
    name: str,
    *,
    path: Path | None = None,
    label: str | None = None,
    notes: tuple[str, ...] = (),
) -> Source:
    """A source from an RGB image that is already decoded."""
    digest = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()
    return Source(name, image, digest, path, label, notes)


def sample_sources() -> list[Source]:
    """The two photographs that come with scikit-learn: a Chinese temple and a flower."""
    # Found, not imported: that takes seconds.
    found = find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "datasets" / "images"
    return [open_path(folder / name) for name in ("china.jpg", "flower.jpg")]


def image_files(paths: Sequence[Path], count: int | None = None) -> list[Path]:
    """Files in the order given; of a folder the image files directly in it, in natural order.

    Args:
        count: at most so many of each folder.

    Raises:
        DataError: a folder without images.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = [p for p in path.iterdir() if p.suffix.lower() in IMAGE_EXTENSIONS and not p.name.startswith(".")]
        if not inside:
            raise DataError(f"there are no images directly in the folder {path}", todo="name image files")
        found += sorted(inside, key=lambda p: natural_key(p.name))[:count]
    return found


def prepare(source: Source, backbone: Backbone, side: int = 224, *, max_tokens: int = MAX_TOKENS) -> Picture:
    """The whole source, its shorter side about ``side`` pixels, both sides multiples of the patch.

    Resized by PIL's bicubic filter with antialiasing. Nothing is cut off: the longer side follows from the shorter one,
    less than a patch from the source's proportions.

    Args:
        side: pixels; rounded to a multiple of the patch.
        max_tokens: larger grids are reduced to at most so many patches, which a note tells.

    Raises:
        ConfigError: a side or limit below 1, or a picture so narrow that no grid of at least one row fits the limit.
    """
    return view(source, backbone, WHOLE, side=side, max_tokens=max_tokens)


def view(
    source: Source,
    backbone: Backbone,
    box: Box,
    *,
    flip: bool = False,
    side: int = 224,
    max_tokens: int = MAX_TOKENS,
) -> Picture:
    """As :func:`prepare`, of the part ``box``, mirrored where ``flip``.

    The box is rounded to whole pixels of the source, which is what ``Picture.box`` then holds.

    Raises:
        ConfigError: as :func:`prepare`; or a box outside of 0 to 1, or whose sides are in the wrong order.
    """
    for what, value in (("the side in pixels", side), ("the largest number of patches", max_tokens)):
        if value < 1:
            raise ConfigError(f"{what} must be at least 1, not {value}")
    left, top, right, bottom = box
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise ConfigError(
            f"the box {' '.join(f'{value:g}' for value in box)} is not a part of the picture",
            todo="give left, top, right, bottom as fractions of the width and height: 0 0 0.7 0.7",
        )
    width, height = source.image.size
    x0, y0 = min(int(left * width), width - 1), min(int(top * height), height - 1)
    x1, y1 = max(round(right * width), x0 + 1), max(round(bottom * height), y0 + 1)
    part = source.image if (x0, y0, x1, y1) == (0, 0, width, height) else source.image.crop((x0, y0, x1, y1))
    patch = backbone.patch_size
    grid, notes = whole_patches(part.height, part.width, side, patch, max_tokens)
    size = [count * patch for count in grid]
    shown: Any = part  # torchvision's annotations know tensors only
    if [part.height, part.width] != size:
        shown = F.resize(shown, size, InterpolationMode.BICUBIC, antialias=True)
    if flip:
        shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    whole_pixels = (x0 / width, y0 / height, x1 / width, y1 / height)
    return Picture(source, shown, patch, whole_pixels, flip, (*source.notes, *notes))


def with_patch_marked(picture: Picture, patch: tuple[int, int] | None, scale_to: int = 448) -> Image.Image:
    """The picture for display, its shorter side about ``scale_to`` pixels, with one patch outlined."""
    factor = scale_to / min(picture.image.size)
    width, height = (max(1, round(length * factor)) for length in picture.image.size)
    shown = picture.image.resize((width, height), Image.Resampling.BICUBIC)
    if patch is not None:
        h, w = picture.grid
        row, column = picture.check_patch(patch)
        corners = [column * width / w, row * height / h, (column + 1) * width / w - 1, (row + 1) * height / h - 1]
        draw = ImageDraw.Draw(shown)
        # Dark around light stands out from any picture.
        draw.rectangle([corners[0] - 2, corners[1] - 2, corners[2] + 2, corners[3] + 2], outline=(0, 0, 0), width=2)
        draw.rectangle(corners, outline=(255, 255, 0), width=2)
    return shown


def decoded(load: Callable[[], Image.Image]) -> Image.Image:
    """What ``load`` gives; its BadImage asks for another picture, as those that are drawn by name are not left out."""
    try:
        return load()
    except BadImage as error:
        raise BadImage(error.what, where=error.where, todo="replace the file, or choose another picture") from error


def _declared_size(data: bytes) -> tuple[int, int] | None:
    """What the header says, before anything is decoded; None where PIL knows no such header."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                return image.size
    except Exception:  # noqa: BLE001 - PIL's decoders raise anything; loading the image says what is wrong with it
        return None


def _animation(file: Path | io.BytesIO) -> tuple[str, ...]:
    try:
        with Image.open(file) as image:
            if not getattr(image, "is_animated", False):
                return ()
            # To count the pages of a TIFF takes PIL a time that grows with their square.
            if image.format not in {"GIF", "PNG", "WEBP"}:
                return ("a file of several pages: the first is shown",)
            return (f"an animation: the first of {getattr(image, 'n_frames', 1)} frames is shown",)
    except Exception:  # noqa: BLE001 - the first frame was decoded; damage behind it is no matter
        return ()
