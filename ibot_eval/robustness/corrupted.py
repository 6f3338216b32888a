"""Corruptions of ImageNet-C made on the fly, by the package imagecorruptions-imaug."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from ibot_eval.data.splits import ImageSplit, hash_lines
from ibot_eval.errors import ConfigError, MissingExtra
from ibot_eval.robustness.answers import Answers

Way = tuple[str, int]
"""A corruption and its severity, 1 to 5; 0 for the image as it is."""

SMALLEST = 32
"""Pixels below which the package refuses an image."""
# These draw from generators of their own, the others from numpy's global one.
_SEEDED = ("glass_blur", "impulse_noise")


def check_corrupting(side: int) -> None:
    """Raises MissingExtra without the package, and ConfigError for images of too few pixels."""
    try:
        import imagecorruptions  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra(
            "--on-the-fly needs the package imagecorruptions-imaug",
            todo="pip install 'ibot-eval[corruptions]' (the older imagecorruptions does not run with numpy 2)",
        ) from None
    if side < SMALLEST:
        raise ConfigError(f"images of {side} pixels are too small to corrupt", where="--crop", todo=f"from {SMALLEST}")


class CorruptedSplit(ImageSplit):
    """Every image of a split in several ways of corruption, after its crop: as ImageNet-C was made.

    The ways of an image follow each other, so that it is decoded once for all. Its noise depends on (seed, its index,
    the way) alone, not on batches or processes.
    """

    def __init__(
        self, split: ImageSplit, crop: Callable[[Image.Image], Tensor], ways: Sequence[Way], seed: int
    ) -> None:
        """
        Args:
            split: the clean images.
            crop: image -> (3, H, W) uint8, H and W at least :data:`SMALLEST`; picklable.
            ways: what is done to each.
            seed: of the noise.
        """
        self.split, self.crop, self.ways, self.seed = split, crop, list(ways), seed
        self.name = split.name
        self.image_ids = [f"{name}/{level}/{image}" for image in split.image_ids for name, level in self.ways]
        self.labels = np.repeat(np.asarray(split.labels, np.int64), len(self.ways))
        self._last: tuple[int, np.ndarray] | None = None
        if any(name == "glass_blur" for name, _ in ways):
            # The package compiles it at its first use: before loading processes are forked, that is once.
            _corrupt(np.zeros((SMALLEST, SMALLEST, 3), np.uint8), "glass_blur", 1, 0)

    def load(self, i: int) -> Image.Image:
        image, way = divmod(i, len(self.ways))
        if self._last is None or self._last[0] != image:
            self._last = image, self.crop(self.split.load(image)).permute(1, 2, 0).numpy()
        name, level = self.ways[way]
        pixels = self._last[1]
        if level:
            entropy = [self.seed, image, *name.encode(), level]
            pixels = _corrupt(pixels, name, level, int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        return Image.fromarray(pixels)

    def take(self, indices: Sequence[int] | np.ndarray) -> ImageSplit:
        """Not offered: an image's noise goes with its index in the whole split."""
        raise NotImplementedError

    def each(self, found: Answers) -> Iterator[tuple[Way, Answers]]:
        """What was answered to each way; ``indices`` are those of the clean images."""
        for number, way in enumerate(self.ways):
            rows = found.indices % len(self.ways) == number
            part = (found.labels[rows], found.predicted[rows], found.confidence[rows])
            unreadable = [name for name in found.unreadable if name.startswith(f"{way[0]}/{way[1]}/")]
            yield way, Answers(found.indices[rows] // len(self.ways), *part, unreadable)

    def _fingerprint(self) -> str:
        return hash_lines("corrupted", [self.split.fingerprint, repr(self.ways), str(self.seed)])


def _corrupt(pixels: np.ndarray, name: str, level: int, seed: int) -> np.ndarray:
    """(H, W, 3) uint8 -> the same."""
    from imagecorruptions import corrupt  # pyright: ignore[reportMissingImports]

    state = np.random.get_state()
    np.random.seed(seed)
    try:
        own = {"seed": seed} if name in _SEEDED else {}
        return np.asarray(corrupt(pixels, severity=level, corruption_name=name, **own), np.uint8)
    finally:
        np.random.set_state(state)
