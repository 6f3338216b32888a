"""Splits held in memory, among them the digits that `--data demo` stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from ibot_eval.data.images import to_rgb
from ibot_eval.data.splits import Data, ImageSplit, hash_lines


class ArraySplit(ImageSplit):
    """Images that are one array."""

    def __init__(
        self, name: str, image_ids: Sequence[str], labels: np.ndarray, images: np.ndarray, source: str = ""
    ) -> None:
        """
        Args:
            name: the split's own name.
            image_ids: n unique names.
            labels: (n,) int64.
            images: (n, H, W) greyscale or (n, H, W, 3) RGB, uint8.
            source: what people call the images.
        """
        self.source = source
        self.name, self.image_ids, self.images = name, list(image_ids), images
        self.labels = np.asarray(labels, np.int64)

    def load(self, i: int) -> Image.Image:
        return to_rgb(Image.fromarray(self.images[i]), self.image_ids[i])

    def take(self, indices: Sequence[int] | np.ndarray) -> ArraySplit:
        ids = [self.image_ids[i] for i in indices]
        return ArraySplit(self.name, ids, self.labels[indices], self.images[indices], self.source)

    def _fingerprint(self) -> str:
        pixels = hashlib.sha256(np.ascontiguousarray(self.images).data).hexdigest()
        shape = "x".join(map(str, self.images.shape))
        items = (f"{image_id}\0{label}" for image_id, label in zip(self.image_ids, self.labels, strict=True))
        return hash_lines("array", [f"{shape}\0{pixels}", *items])


def open_demo(roles: Sequence[str]) -> Data:
    """scikit-learn's 1,797 digits of 8x8 pixels: of each class every fourth image is for test, the rest for train.

    Values 0 to 16 become 0 to 255. An id holds the image's place in scikit-learn's own order: ``train/0/0010``.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    targets = np.asarray(digits.target, np.int64)
    images = np.rint(np.asarray(digits.images) * (255 / 16)).astype(np.uint8)
    chosen: dict[str, list[int]] = {"train": [], "test": []}
    for label in range(10):
        for rank, i in enumerate(np.flatnonzero(targets == label)):
            chosen["test" if rank % 4 == 3 else "train"].append(int(i))
    splits: dict[str, ImageSplit] = {
        role: ArraySplit(
            role,
            [f"{role}/{targets[i]}/{i:04d}" for i in chosen[role]],
            targets[chosen[role]],
            images[chosen[role]],
            f"demo/{role}",
        )
        for role in roles
    }
    return Data("demo", tuple(map(str, range(10))), splits, {role: role for role in roles})
