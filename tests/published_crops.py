"""The published pipeline of crops, written with torchvision and Pillow, and photograph-like pictures for it."""

from __future__ import annotations

import random

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision import transforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PublishedCrop:
    """One image -> one normalised crop, as in DINO and iBOT.

    Args:
        kind: 0 first global crop, 1 other global crops, 2 local crops.
        size: side, pixels.
        scale: range of the area's fraction.
    """

    def __init__(self, kind: int, size: int, scale: tuple[float, float]) -> None:
        self.random = random.Random(0)
        self.blur, self.solarise = ((1.0, 0.0), (0.1, 0.2), (0.5, 0.0))[kind]
        self.first = transforms.Compose(
            [
                transforms.RandomResizedCrop(size, scale, interpolation=transforms.InterpolationMode.BICUBIC),
                transforms.RandomHorizontalFlip(0.5),
                transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
                transforms.RandomGrayscale(0.2),
            ]
        )
        self.last = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])

    def seed(self, seed: int) -> None:
        """Of blur and solarisation; the rest draws from torch's global generator."""
        self.random.seed(seed)

    def __call__(self, image: Image.Image) -> Tensor:
        image = self.first(image)
        if self.random.random() < self.blur:
            image = image.filter(ImageFilter.GaussianBlur(self.random.uniform(0.1, 2.0)))
        if self.random.random() < self.solarise:
            image = ImageOps.solarize(image)
        return self.last(image)


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Coarse coloured shapes, finer ones upon them, and a little noise: about as smooth as photographs are."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for cells, strength in ((4, 90), (12, 30), (40, 12)):
        grid = torch.from_numpy(rng.normal(0, strength, (1, 3, cells, cells)))
        smooth = torch.nn.functional.interpolate(grid, (height, width), mode="bicubic")
        total += smooth[0].permute(1, 2, 0).numpy()
    noisy = total + rng.normal(110, 25, 3) + rng.normal(0, 3, total.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
