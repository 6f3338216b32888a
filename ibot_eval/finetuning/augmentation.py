"""Training images of fine-tuning: timm's crops, RandAugment or colour jitter, and random erasing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import posterize
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torch import Tensor

from ibot_eval.backbone import IMAGENET_MEAN, IMAGENET_STD
from ibot_eval.data.transforms import Triple, normalised
from ibot_eval.errors import ConfigError

Interpolation = Literal["bicubic", "bilinear", "random"]

ERASING_MODE = "pixel"
"""What erased boxes are filled with: normal noise, pixel by pixel (BEiT's and DeiT's fine-tuning)."""


class Augmented(NamedTuple):
    """One training image, not yet normalised. Erasing comes after that, so its box is told apart."""

    pixels: np.ndarray
    """(3, S, S) uint8."""
    noise: np.ndarray
    """(3, h, w) float32, what the erased box holds in the normalised image; h and w may be 0."""
    top: int
    left: int


@dataclass(frozen=True)
class TrainTransform:
    """What ``timm.data.create_transform(is_training=True, re_mode="pixel", …)`` does to an image, draw by draw.

    Images leave it as bytes, so that data-loading processes hand over a quarter of the volume;
    :func:`ibot_eval.finetuning.loader.finish` normalises on the device and puts the erased boxes in. Draws from the
    global generators of Python, NumPy and torch, as timm does.

    Raises:
        ConfigError: a value out of range, or an ``auto_augment`` that timm does not know.
    """

    size: int
    """Side of the images, pixels."""
    auto_augment: str = "rand-m9-mstd0.5-inc1"
    """timm's name of an automatic augmentation (rand-…, augmix-…, original, v0, 3a); 'none' for none."""
    erasing: float = 0.25
    """Probability that a random box of an image is filled with noise."""
    colour_jitter: float = 0.4
    """Of brightness, contrast and saturation; only where ``auto_augment`` is none or 3a, as in timm."""
    interpolation: Interpolation = "bicubic"
    scale: tuple[float, float] = (0.08, 1.0)
    """Part of the image's area that a crop shows."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD

    def __post_init__(self) -> None:
        for flag, value in (("erasing", self.erasing), ("flip", self.flip)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{flag} {value:g}: a probability is between 0 and 1")
        if not 0 <= self.colour_jitter <= 1:
            raise ConfigError(f"colour jitter {self.colour_jitter:g}: it is between 0 (none) and 1")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(
                f"crops of {self.scale[0]:g} to {self.scale[1]:g} of the image's area: both are above 0 and at most 1, "
                "the smaller one first"
            )
        if self.interpolation not in get_args(Interpolation):
            raise ConfigError(f"interpolation {self.interpolation!r}: use {', '.join(get_args(Interpolation))}")
        try:
            _ = self._picture
        # timm tells what it does not understand by whatever goes wrong.
        except Exception as error:
            raise ConfigError(
                f"timm cannot read the automatic augmentation {self.auto_augment!r}: {error}",
                todo="write it as rand-m9-mstd0.5-inc1, or none",
            ) from error

    def __call__(self, image: Image.Image) -> Augmented:
        """Of an RGB image."""
        pixels = self._picture(image)
        # timm fills the box in the normalised image; what is no longer NaN is the box.
        canvas = torch.full(pixels.shape, torch.nan)
        erased = ~self._erase(canvas)[0].isnan()
        rows, columns = (erased.any(axis).nonzero().flatten() for axis in (1, 0))
        if not len(rows):
            return Augmented(pixels.numpy(), np.empty((3, 0, 0), np.float32), 0, 0)
        top, left = int(rows[0]), int(columns[0])
        noise = canvas[:, top : int(rows[-1]) + 1, left : int(columns[-1]) + 1]
        return Augmented(pixels.numpy(), np.ascontiguousarray(noise.numpy()), top, left)

    def normalize(self, batch_uint8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 on any device -> float32 on the same device: (x / 255 - mean) / std."""
        return normalised(batch_uint8, self.mean, self.std)

    def describe(self) -> dict[str, Any]:
        """JSON-ready, for records and for comparing a resumed run's with its beginning."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return values | {"erasing_mode": ERASING_MODE}

    @cached_property
    def _picture(self) -> Callable[[Image.Image], Tensor]:
        """RGB image -> (3, S, S) uint8."""
        picture: Any = create_transform(
            self.size,
            is_training=True,
            scale=self.scale,
            hflip=self.flip,
            color_jitter=self.colour_jitter or None,  # pyright: ignore[reportArgumentType]
            auto_augment=None if self.auto_augment in ("", "none") else self.auto_augment,
            interpolation=self.interpolation,
            # RandAugment fills what it uncovers with the mean colour.
            mean=self.mean,
            std=self.std,
            normalize=False,
        )
        for step in picture.transforms:
            policies = getattr(step, "policy", None) or [getattr(step, "ops", [])]
            for op in [op for policy in policies for op in policy]:
                if op.aug_fn is posterize:
                    op.aug_fn = _posterize
        return picture

    @cached_property
    def _erase(self) -> RandomErasing:
        return RandomErasing(self.erasing, mode=ERASING_MODE, device="cpu")


def _posterize(image: Image.Image, bits: int, **unused: Any) -> Image.Image:
    """timm's, which at its greatest strength keeps no bit: that is black in older Pillows and an error in newer ones.

    A magnitude of 9 with deviation 0.5 comes to that in 2 % of the draws.
    """
    return posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)
