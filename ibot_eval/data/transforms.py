"""The evaluation transform: resize the shorter side, centre crop, normalise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.settings import DataSettings

Triple = tuple[float, float, float]

DEMO_SIZE = 64
"""Side in pixels to which the digits of the demonstration are enlarged for networks of no known image size."""


@dataclass(frozen=True)
class EvalTransform:
    """PIL resize with antialiasing, then a centre crop, as torchvision's Resize and CenterCrop do on PIL images.

    Images leave it as bytes, so that data-loading processes hand over a quarter of the volume; :meth:`normalize` runs
    on the device.
    """

    resize: int
    """Shorter side after resizing, pixels; smaller images are enlarged."""
    crop: int
    """Side of the centre crop, pixels; zero padding where the resized image is smaller."""
    interpolation: str
    """bicubic or bilinear."""
    mean: Triple
    std: Triple

    def __call__(self, image: Image.Image) -> Tensor:
        """RGB image -> (3, crop, crop) uint8."""
        pil: Any = image  # torchvision's annotations know tensors only
        resized = F.resize(pil, [self.resize], InterpolationMode(self.interpolation), antialias=True)
        return F.pil_to_tensor(F.center_crop(resized, [self.crop, self.crop]))

    def normalize(self, batch_uint8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 on any device -> float32 on the same device: (x / 255 - mean) / std."""
        return normalised(batch_uint8, self.mean, self.std)

    def describe(self) -> dict[str, Any]:
        """JSON-ready; part of the key of feature banks."""
        return {
            "resize": self.resize,
            "crop": self.crop,
            "interpolation": self.interpolation,
            "antialias": True,
            "mean": list(self.mean),
            "std": list(self.std),
        }


def normalised(batch: Tensor, mean: Triple, std: Triple) -> Tensor:
    """(B, 3, H, W) uint8 on any device -> float32 on the same device: (x / 255 - mean) / std."""
    shift, scale = (
        torch.tensor(values, dtype=torch.float32, device=batch.device).view(3, 1, 1) for values in (mean, std)
    )
    return batch.to(torch.float32).div_(255).sub_(shift).div_(scale)


def eval_transform(settings: DataSettings, backbone: Backbone) -> EvalTransform:
    """The transform that ``settings`` ask for, with the backbone's mean and deviation unless they name others.

    The digits of the demonstration have no size worth keeping, so they are enlarged to the one the network was trained
    at, where it has one.

    Raises:
        ConfigError: a size below 1, a crop larger than the resized image, a crop that the patch does not divide, or a
            deviation of 0.
    """
    sizes = (_trained_size(backbone) or DEMO_SIZE,) * 2 if settings.data == "demo" else (256, 224)
    resize = settings.resize if settings.resize is not None else sizes[0]
    crop = settings.crop if settings.crop is not None else sizes[1]
    for flag, value in (("--resize", resize), ("--crop", crop)):
        if value < 1:
            raise ConfigError(f"{flag} {value}: a size in pixels is at least 1")
    if crop > resize:
        default = " (the default)"
        raise ConfigError(
            f"--crop {crop}{default if settings.crop is None else ''} is larger than --resize {resize}"
            f"{default if settings.resize is None else ''}: the crop would reach beyond the image",
            todo=f"give --resize {crop} or more, or --crop {resize} or less; the published habit is --crop 7/8 of "
            "--resize",
        )
    backbone.check_size(crop, crop)
    mean, std = settings.mean or backbone.mean, settings.std or backbone.std
    if not all(math.isfinite(value) for value in (*mean, *std)):
        raise ConfigError(f"--mean {' '.join(map(str, mean))} --std {' '.join(map(str, std))}: these must be numbers")
    if min(std) <= 0:
        raise ConfigError(f"--std {' '.join(map(str, std))}: every deviation must be above 0")
    return EvalTransform(resize, crop, settings.interpolation, mean, std)


def _trained_size(backbone: Backbone) -> int | None:
    """Shorter side in pixels of the images that a backbone was trained with, where it tells."""
    grid = getattr(backbone, "trained_grid", None)
    return min(grid) * getattr(backbone, "embed_patch_size", backbone.patch_size) if grid else None
