"""Images as a linear classifier is trained on them: random resized crops, half of them flipped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from ibot_eval.data.splits import ImageSplit, hash_lines

SCALE = (0.08, 1.0)
"""Part of the image's area that a crop shows; torchvision's and the published range."""
ASPECT = (3 / 4, 4 / 3)
"""Width over height of that part, evenly on a logarithmic scale; likewise."""


class RandomCrops(ImageSplit):
    """A split as one epoch of training sees it.

    Crops are torchvision's RandomResizedCrop (bilinear) and RandomHorizontalFlip, as in the published linear
    evaluation. All that is random about an image comes from (seed, epoch, its index in the split): not from the
    process that loads it, from the batch it is in or from what was loaded before.

    Args:
        split: the whole images.
        size: side of the crops, pixels.
        seed: at least 0.
        epoch: likewise.
        numbers: (n,) what to draw from instead of the indices; the indices that a part had in the whole.
    """

    def __init__(self, split: ImageSplit, size: int, seed: int, epoch: int, numbers: np.ndarray | None = None) -> None:
        self.split, self.size, self.seed, self.epoch = split, size, seed, epoch
        self.numbers = np.arange(len(split)) if numbers is None else numbers
        self.name, self.image_ids, self.labels, self.source = split.name, split.image_ids, split.labels, split.source
        self.crop = transforms.Compose(
            [
                transforms.RandomResizedCrop(size, SCALE, ASPECT, transforms.InterpolationMode.BILINEAR),
                transforms.RandomHorizontalFlip(),
            ]
        )

    def load(self, i: int) -> Image.Image:
        """A crop of image ``i``, (size, size) RGB. Raises as the split's own method."""
        image = self.split.load(i)
        # torchvision draws from torch's global generator, which others use too. Neighbouring seeds give related
        # numbers, hence the detour.
        words = np.random.SeedSequence((self.seed, self.epoch, int(self.numbers[i]))).generate_state(1)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(words[0]))
            return self.crop(image)

    def _fingerprint(self) -> str:
        parts = [self.split.fingerprint, self.size, self.seed, self.epoch, *self.numbers]
        return hash_lines("random crops", map(str, parts))

    def take(self, indices: Sequence[int] | np.ndarray) -> RandomCrops:
        """Only these images, with the crops that they have here."""
        chosen = self.numbers[np.asarray(indices)]
        return RandomCrops(self.split.take(indices), self.size, self.seed, self.epoch, chosen)
