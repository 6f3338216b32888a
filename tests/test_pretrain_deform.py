"""Deformations of crops: exact cases by hand, general ones against Pillow's affine transform."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from torch import Tensor
from torchvision.transforms import functional as V

from pretrain.augment import Augmentation, draw_deformation
from pretrain.deform import DEFORMATION, ELASTIC_GRID, Moves, move

from .published_crops import photograph


def _moved(pictures: Tensor, **fields: Any) -> Tensor:
    drawn = np.zeros(len(pictures), DEFORMATION)
    for name, value in fields.items():
        drawn[name] = value
    moves = Moves.plan(drawn)
    assert moves is not None
    return move(pictures.float(), moves)


def _batch(*pictures: Image.Image) -> Tensor:
    return torch.stack([V.pil_to_tensor(picture).float() for picture in pictures])  # type: ignore[arg-type]


def test_rotation_and_shift() -> None:
    """A quarter turn is exact; a shift moves content right and down; the border goes on outside."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)
    images = torch.from_numpy(pixels).permute(2, 0, 1).expand(4, -1, -1, -1)
    got = _moved(images, angle=[90, 0, 0, 0], shift=[(0, 0), (1 / 6, 0), (0, 2 / 6), (0, 0)])
    got = got.permute(0, 2, 3, 1).numpy()
    assert np.array_equal(got[0], np.rot90(pixels))
    assert np.array_equal(got[1][:, 1:], pixels[:, :-1])
    assert np.array_equal(got[1][:, 0], pixels[:, 0])
    assert np.array_equal(got[2][2:], pixels[:-2])
    assert np.array_equal(got[2][:2], np.stack([pixels[0]] * 2))
    assert np.array_equal(got[3], pixels)


def test_the_part_shown_and_its_place() -> None:
    """Half of the width at the right end, the lower half of the height, and room of half a side around the whole."""
    pixels = torch.arange(64.0).view(1, 1, 8, 8).expand(3, 3, 8, 8)
    hidden, place = [(0.5, 0), (0, 0.5), (-1, -1)], [(1, 0), (0, 1), (0, 0)]
    got = _moved(pixels, hidden=hidden, place=place)
    # Sampling at twice the density meets pixels at a quarter and three quarters; whole values are rounded.
    assert torch.equal(got[0, 0, 0], torch.tensor([4, 4, 5, 5, 6, 6, 7, 7]).add(0.0).clamp(max=7))
    assert torch.equal(got[1, 0, :, 0], torch.tensor([30.0, 34, 38, 42, 46, 50, 54, 56]))
    middle = pixels[0, 0].view(4, 2, 4, 2).mean((1, 3))
    assert (got[2, 0, 2:6, 2:6] - middle).abs().max() <= 0.5
    assert torch.equal(got[2, 0, :2, :2], torch.full((2, 2), pixels[0, 0, 0, 0].item()))


@pytest.mark.parametrize(("angle", "shear"), [(20.0, 0.0), (-35.0, 0.0), (0.0, 0.3)])
def test_turns_and_shears_are_pillows_away_from_the_border(angle: float, shear: float) -> None:
    picture = photograph(64, 64, 2)
    got = _moved(_batch(picture), angle=angle, shear=shear)
    if shear:
        # Pillow looks pixel x up at x - shear * (y - middle): content below the middle goes to the right.
        middle = 31.5
        table = (1, -shear, shear * (middle + 0.5), 0, 1, 0)
        expected = picture.transform(picture.size, Image.Transform.AFFINE, table, Image.Resampling.BILINEAR)
    else:
        expected = picture.rotate(angle, Image.Resampling.BILINEAR)
    off = (got - _batch(expected)).abs()[..., 16:48, 16:48]
    assert off.max() <= 2
    assert (off > 0).double().mean() <= 0.5


def test_bending_looks_pixels_up_elsewhere_and_within_its_limit() -> None:
    """On a ramp the displacement can be read off the values; a constant field is a shift."""
    ramp = torch.arange(64.0).expand(1, 3, 64, 64)
    bend = np.zeros((1, 2, ELASTIC_GRID, ELASTIC_GRID), np.float32)
    bend[:, 0] = 4 / 64
    got = _moved(ramp, bend=bend)
    assert torch.equal(got[..., :60], ramp[..., :60] + 4)
    bend[:] = np.random.default_rng(0).uniform(-4 / 64, 4 / 64, bend.shape)
    off = (_moved(ramp, bend=bend) - ramp)[..., 8:56]
    assert 1 <= off.abs().max() <= 4 * 1.5  # bicubic interpolation overshoots a little
    assert (off[..., 1:] - off[..., :-1]).abs().max() <= 2, "the field is smooth"


def test_nothing_drawn_is_nothing_done() -> None:
    rng = np.random.default_rng(0)
    drawn = np.array([draw_deformation(rng, Augmentation()) for _ in range(4)], DEFORMATION)
    assert Moves.plan(drawn) is None


def test_what_is_drawn_has_the_ranges_asked_for() -> None:
    augmentation = Augmentation(rotation=20, shift=0.06, shear=0.25, stretch=1.3, zoom=(0.84, 1.0), elastic=0.08)
    rng = np.random.default_rng(0)
    drawn = np.array([draw_deformation(rng, augmentation) for _ in range(3000)], DEFORMATION)
    width, height = (1 - drawn["hidden"]).T
    uniform = np.random.default_rng(1).uniform(-1, 1, 20000)
    assert ks_2samp(np.log(width / height) / math.log(1.3), uniform).pvalue > 1e-3
    assert ks_2samp((np.sqrt(width * height) - 0.92) / 0.08, uniform).pvalue > 1e-3
    assert ks_2samp(drawn["bend"].ravel()[:20000] / 0.08, uniform).pvalue > 1e-3
    assert ks_2samp(drawn["angle"] / 20, uniform).pvalue > 1e-3
    assert not np.array_equal(drawn["bend"][0, 0], drawn["bend"][0, 1])
