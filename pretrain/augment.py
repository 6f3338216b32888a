"""The random crops of one image, as far as worker processes make them: box, resize and flip.

What is left to do to a crop (colours, blur, solarisation, rotation) is drawn here too and done in batch on the device,
see :mod:`pretrain.device_augment`. The distributions are those of the iBOT code, which are DINO's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from ibot_eval.errors import ConfigError
from pretrain.deform import DEFORMATION, ELASTIC_GRID

Triple = tuple[float, float, float]
Quadruple = tuple[float, float, float, float]
Range = tuple[float, float]

BLUR_RADIUS: Range = (0.1, 2.0)

_BOX_ATTEMPTS = 10


@dataclass(frozen=True)
class Augmentation:
    """How many crops of which size, and what happens to them."""

    global_crops: int = 2
    global_size: int = 224
    """Side, pixels."""
    local_crops: int = 10
    local_size: int = 96
    """Side, pixels."""
    global_scale: Range = (0.25, 1.0)
    """Part of the image's area that a global crop shows."""
    local_scale: Range = (0.05, 0.25)
    aspect: Range = (3 / 4, 4 / 3)
    """Width over height of the part that is cut out, drawn evenly on a logarithmic scale."""
    flip: float = 0.5
    """Probability of a left-right flip."""
    colour_jitter: Quadruple = (0.4, 0.4, 0.2, 0.1)
    """Strengths of brightness, contrast, saturation (factor 1 ± strength) and hue (turn by ± strength of a circle)."""
    jitter_probability: float = 0.8
    grey: float = 0.2
    """Probability of a greyscale crop."""
    blur: Triple = (1.0, 0.1, 0.5)
    """Probabilities of a Gaussian blur for the first global, the other global and the local crops."""
    solarise: Triple = (0.0, 0.2, 0.0)
    """Probabilities of solarisation, likewise."""
    rotation: float = 0.0
    """Largest rotation either way, degrees."""
    shift: float = 0.0
    """Largest shift either way along each axis, as a fraction of the crop's side."""
    shear: float = 0.0
    """Largest shear either way: how far a row goes to the side per unit down."""
    stretch: float = 1.0
    """Largest ratio of width to height, and of height to width, of the part that is shown."""
    zoom: Range = (1.0, 1.0)
    """Side of the part that is shown, as a fraction of the crop's; it lies anywhere inside."""
    elastic: float = 0.0
    """Largest displacement by a smooth random field, as a fraction of the side."""
    mean: Triple = (0.485, 0.456, 0.406)
    std: Triple = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        for name, low in (("global_crops", 1), ("local_crops", 0), ("global_size", 1), ("local_size", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}", todo=f"use at least {low}")
        for name in ("global_scale", "local_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ConfigError(
                    f"{name} is {low:g} to {high:g}", todo="use two rising fractions, above 0 and up to 1"
                )
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ConfigError(f"aspect is {self.aspect}", todo="use two rising numbers above 0")
        singles = {name: getattr(self, name) for name in ("flip", "jitter_probability", "grey")}
        for name, value in (singles | {"blur": self.blur, "solarise": self.solarise}).items():
            if not all(0 <= p <= 1 for p in np.atleast_1d(value)):
                raise ConfigError(f"{name} is {value}, which is no probability", todo="use values from 0 to 1")
        if not (all(0 <= s <= 1 for s in self.colour_jitter[:3]) and 0 <= self.colour_jitter[3] <= 0.5):
            raise ConfigError(
                f"colour_jitter is {self.colour_jitter}",
                todo="use 0 to 1 for brightness, contrast and saturation, and 0 to 0.5 for hue",
            )
        if self.rotation < 0 or not all(0 <= share <= 1 for share in (self.shift, self.shear, self.elastic)):
            raise ConfigError(
                f"rotation {self.rotation:g}, shift {self.shift:g}, shear {self.shear:g} or elastic {self.elastic:g} "
                "is out of range",
                todo="rotation is in degrees from 0, the others are fractions from 0 to 1",
            )
        if self.stretch < 1 or not 0 < self.zoom[0] <= self.zoom[1]:
            raise ConfigError(
                f"stretch {self.stretch:g} or zoom {self.zoom[0]:g} to {self.zoom[1]:g} is out of range",
                todo="stretch is 1 or more, zoom two rising numbers above 0",
            )
        if not all(s > 0 for s in self.std):
            raise ConfigError(f"std is {self.std}", todo="use values above 0")

    @property
    def crops(self) -> int:
        """Of both kinds."""
        return self.global_crops + self.local_crops


CHANGES = np.dtype(
    [
        ("jittered", "?"),
        ("factors", "f4", (4,)),  # brightness, contrast, saturation, hue
        ("order", "i1", (4,)),  # the four in the order they are done
        ("grey", "?"),
        ("radius", "f4"),  # of the blur, pixels; 0 is none
        ("solarise", "?"),
        ("deformation", DEFORMATION),
    ]
)
"""What is left to do to one crop on the device, in this order but for the last, which comes first."""


class CroppedImage(NamedTuple):
    """All crops of one image."""

    globals: np.ndarray
    """(G, 3, S, S) uint8."""
    locals: np.ndarray
    """(L, 3, s, s) uint8."""
    changes: np.ndarray
    """(G + L,) CHANGES, globals first."""
    boxes: np.ndarray
    """(G, 5) float32: left, top, width and height of each global crop in pixels of the image, and 1 if it was
    flipped."""


def crop(image: Image.Image, augmentation: Augmentation, rngs: Sequence[np.random.Generator]) -> CroppedImage:
    """Cuts and resizes every crop of an RGB image; smaller images are enlarged.

    Resizing is torch's, bicubic with antialiasing on bytes, which takes a third of Pillow's time. On photographs 98 %
    of the values are Pillow's and 2 % are off by one level of 255; 3 in 100,000 are off by more than two (17 at most in
    71 million), next to sharp edges in black or white, where both clip between rows and columns.

    Args:
        image: 8-bit RGB.
        augmentation: what to do.
        rngs: one per crop, globals first: all the randomness of that crop.
    """
    a = augmentation
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).unsqueeze(0)
    global_crops = np.empty((a.global_crops, 3, a.global_size, a.global_size), np.uint8)
    local_crops = np.empty((a.local_crops, 3, a.local_size, a.local_size), np.uint8)
    changes = np.zeros(a.crops, CHANGES)
    boxes = np.zeros((a.crops, 5), np.float32)
    for i, (out, rng) in enumerate(zip((*global_crops, *local_crops), rngs, strict=True)):
        scale = a.global_scale if i < a.global_crops else a.local_scale
        left, top, right, bottom = draw_box(rng, image.size, scale, a.aspect)
        part = pixels[..., top:bottom, left:right]
        resized = F.interpolate(part, out.shape[1:], mode="bicubic", antialias=True)[0].numpy()
        flipped = rng.random() < a.flip
        out[:] = resized[..., ::-1] if flipped else resized
        boxes[i] = (left, top, right - left, bottom - top, flipped)
        changes[i] = draw_changes(rng, a, i)
    return CroppedImage(global_crops, local_crops, changes, boxes[: a.global_crops])


def draw_box(rng: np.random.Generator, size: tuple[int, int], scale: Range, aspect: Range) -> tuple[int, int, int, int]:
    """The part of an image to cut out, with the distribution of torchvision's RandomResizedCrop.

    Args:
        rng: where the randomness comes from.
        size: width and height of the image, pixels.
        scale: range of its area as a fraction of the image's.
        aspect: range of width over height.

    Returns:
        Left, top, right, bottom.
    """
    width, height = size
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for _ in range(_BOX_ATTEMPTS):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * rng.random())
        ratio = math.exp(low + (high - low) * rng.random())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    # An image too long for such a box: the largest one of an allowed aspect, from the middle.
    w = min(width, max(1, round(height * aspect[1])))
    h = min(height, max(1, round(width / aspect[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def draw_changes(rng: np.random.Generator, augmentation: Augmentation, crop_index: int) -> tuple[object, ...]:
    """What the device is to do to crop ``crop_index`` (globals first): the fields of CHANGES."""
    a = augmentation
    kind = 2 if crop_index >= a.global_crops else min(crop_index, 1)
    at_all = rng.random(4)
    factors, turns, (radius, *_) = rng.random((3, 4))
    return (
        at_all[0] < a.jitter_probability,
        (1, 1, 1, 0) + np.array(a.colour_jitter) * (2 * factors - 1),
        np.argsort(turns),
        at_all[1] < a.grey,
        BLUR_RADIUS[0] + (BLUR_RADIUS[1] - BLUR_RADIUS[0]) * radius if at_all[2] < a.blur[kind] else 0,
        at_all[3] < a.solarise[kind],
        draw_deformation(rng, a),
    )


def draw_deformation(rng: np.random.Generator, augmentation: Augmentation) -> tuple[object, ...]:
    """The fields of DEFORMATION."""
    a = augmentation
    angle, right, down, shear, ratio, side, *place = 2 * rng.random(8) - 1
    shown = a.zoom[0] + (a.zoom[1] - a.zoom[0]) * (side + 1) / 2
    ratio = a.stretch ** (ratio / 2)
    bend = 2 * rng.random((2, ELASTIC_GRID, ELASTIC_GRID)) - 1 if a.elastic else 0.0
    return (
        a.rotation * angle,
        (a.shift * right, a.shift * down),
        a.shear * shear,
        (1 - shown * ratio, 1 - shown / ratio),
        place,
        a.elastic * bend,
    )
