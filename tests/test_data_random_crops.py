"""Random crops: torchvision's, and drawn from (seed, epoch, index) alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision import transforms
from torchvision.transforms import functional as F

from ibot_eval.data.arrays import open_demo
from ibot_eval.data.loading import image_loader
from ibot_eval.data.random_crops import RandomCrops
from ibot_eval.data.splits import ImageSplit
from tests.published_crops import photograph


class Photographs(ImageSplit):
    """n views of one picture whose red and green tell the column and the row, and blue nothing."""

    def __init__(self, n: int, width: int = 96, height: int = 64) -> None:
        self.name, self.labels, self.image_ids = "coordinates", np.zeros(n, np.int64), [str(i) for i in range(n)]
        columns, rows = np.meshgrid(np.arange(width), np.arange(height))
        self.pixels = np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8)

    def load(self, i: int) -> Image.Image:
        return Image.fromarray(self.pixels)

    def _fingerprint(self) -> str:
        return f"coordinates {len(self)}"

    def take(self, indices: np.ndarray) -> Photographs:
        return Photographs(len(indices))


def crops(split: ImageSplit, workers: int, size: int, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    batches = [list(range(i, min(i + size, len(split)))) for i in range(0, len(split), size)]
    loaded = image_loader(RandomCrops(split, 16, seed, epoch), F.pil_to_tensor, batches, workers)
    return torch.cat([batch.images for batch in loaded])


@pytest.fixture(scope="module")
def digits() -> ImageSplit:
    return open_demo(["train"]).splits["train"].take(np.arange(30))


def test_crops_depend_on_seed_epoch_and_index_alone(digits: ImageSplit) -> None:
    wanted = crops(digits, 0, 30)
    torch.manual_seed(5)
    for workers, size in ((0, 7), (2, 4)):
        assert torch.equal(crops(digits, workers, size), wanted)
    # Backwards, and one at a time.
    split = RandomCrops(digits, 16, 0, 0)
    again = [F.pil_to_tensor(split.load(i)) for i in reversed(range(30))][::-1]
    assert torch.equal(torch.stack(again), wanted)
    for other in (crops(digits, 0, 30, seed=1), crops(digits, 0, 30, epoch=1)):
        assert (other != wanted).flatten(1).any(1).all()


def test_a_part_has_the_crops_of_the_whole(digits: ImageSplit) -> None:
    whole = RandomCrops(digits, 16, 3, 2)
    rows = np.array([29, 4, 11])
    part = whole.take(rows).take([2, 0])
    for position, row in enumerate(rows[[2, 0]]):
        assert part.image_ids[position] == digits.image_ids[row]
        assert part.labels[position] == digits.labels[row]
        np.testing.assert_array_equal(np.asarray(part.load(position)), np.asarray(whole.load(int(row))))


def test_fingerprint_tells_what_is_random(digits: ImageSplit) -> None:
    variants = [(digits, 16, 0, 0), (digits, 24, 0, 0), (digits, 16, 1, 0), (digits, 16, 0, 1)]
    prints = [RandomCrops(*v).fingerprint for v in variants] + [RandomCrops(*variants[0]).take([1]).fingerprint]
    assert len(set(prints)) == len(prints)
    assert RandomCrops(*variants[0]).fingerprint == prints[0]


def test_torchs_generator_is_left_alone(digits: ImageSplit) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(4)
    torch.manual_seed(1)
    RandomCrops(digits, 16, 0, 0).load(0)
    assert torch.equal(torch.rand(4), wanted)


def test_pixels_are_the_published_pipelines() -> None:
    """The crop that torchvision's own functions cut, once its place is known."""
    image = photograph(120, 90, seed=0)

    class One(Photographs):
        def load(self, i: int) -> Image.Image:
            return image

    split = RandomCrops(One(8), 32, 7, 1)
    flips = set()
    for i in range(8):
        state = int(np.random.SeedSequence((7, 1, i)).generate_state(1)[0])
        torch.manual_seed(state)
        top, left, height, width = transforms.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])  # pyright: ignore
        cut = image.crop((left, top, left + width, top + height)).resize((32, 32), Image.Resampling.BILINEAR)
        flipped = bool(torch.rand(1) < 0.5)
        flips.add(flipped)
        wanted = np.asarray(cut)[:, ::-1] if flipped else np.asarray(cut)
        np.testing.assert_array_equal(np.asarray(split.load(i)), wanted)
    assert flips == {True, False}


def test_distribution_is_that_of_independent_draws() -> None:
    """Boxes read back from the pixels, over images: as torchvision's from one generator, evenly spread."""
    n, (width, height) = 1500, (96, 64)
    split = RandomCrops(Photographs(n, width, height), 64, 0, 0)
    pixels = np.stack([np.asarray(split.load(i)) for i in range(n)]).astype(np.float64)
    # Of a picture that grows evenly, a crop's mean tells its centre, and the difference of its edges its size.
    centre = pixels[..., :2].mean((1, 2))
    across = pixels[:, :, -4:, 0].mean((1, 2)) - pixels[:, :, :4, 0].mean((1, 2))
    down = pixels[:, -4:, :, 1].mean((1, 2)) - pixels[:, :4, :, 1].mean((1, 2))
    flipped = across < 0
    assert stats.binomtest(int(flipped.sum()), n).pvalue > 1e-3
    generated = torch.Generator().manual_seed(11)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generated.get_state())
        boxes = np.array(
            [
                transforms.RandomResizedCrop.get_params(split.split.load(0), [0.08, 1.0], [3 / 4, 4 / 3])  # pyright: ignore
                for _ in range(n)
            ]
        )
    top, left, high, wide = boxes.T
    share = 60 / 64  # from the middle of the first four columns to that of the last
    ours = {"x": centre[:, 0], "y": centre[:, 1], "width": abs(across) / share, "height": down / share}
    theirs = {"x": left + (wide - 1) / 2, "y": top + (high - 1) / 2, "width": wide, "height": high}
    for name, values in ours.items():
        # A continuous reading of whole numbers: one pixel of slack in the comparison.
        jitter = np.random.default_rng(0).uniform(-0.5, 0.5, (2, n))
        test: Any = stats.ks_2samp(values + jitter[0], theirs[name] + jitter[1])
        assert test.pvalue > 1e-3, name
    for one, other in (("width", "x"), ("height", "y")):
        assert abs(np.corrcoef(ours[one][1:], ours[other][:-1])[0, 1]) < 0.1, "neighbouring images are related"
