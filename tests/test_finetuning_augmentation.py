"""Training images: timm's own pipeline draw by draw, and what erasing does."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data import create_transform
from torch import Tensor

from ibot_eval.data.epochs import SAMPLE
from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.augmentation import Augmented, TrainTransform
from ibot_eval.training.random_states import drawing_from
from tests.published_crops import photograph

PICTURES = [photograph(90 - 8 * i, 50 + 7 * i, seed=i) for i in range(5)]

BILINEAR, RANDOM = {"interpolation": "bilinear"}, {"interpolation": "random"}


def augment(transform: TrainTransform, i: int) -> Augmented:
    with drawing_from(SAMPLE, 0, 0, i):
        return transform(PICTURES[i % len(PICTURES)])


def whole(augmented: Augmented, transform: TrainTransform) -> Tensor:
    """(3, S, S) float32, put together without the code under test."""
    pixels = torch.from_numpy(augmented.pixels).float() / 255
    image = (pixels - torch.tensor(transform.mean).view(3, 1, 1)) / torch.tensor(transform.std).view(3, 1, 1)
    _, height, width = augmented.noise.shape
    image[:, augmented.top : augmented.top + height, augmented.left : augmented.left + width] = torch.from_numpy(
        augmented.noise
    )
    return image


def published(transform: TrainTransform, **changes: Any) -> Any:
    """BEiT's call of timm for its training images."""
    settings: dict[str, Any] = {
        "input_size": transform.size,
        "is_training": True,
        "color_jitter": 0.4,
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "interpolation": "bicubic",
        "re_prob": transform.erasing,
        "re_mode": "pixel",
        "re_count": 1,
        "mean": transform.mean,
        "std": transform.std,
    }
    return create_transform(**settings | changes)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.6, 0.7)}, {}),
        ({"auto_augment": "none"}, {"auto_augment": None}),
        ({"auto_augment": "none", "colour_jitter": 0.0}, {"auto_augment": None, "color_jitter": None}),
        ({"auto_augment": "3a"}, {"auto_augment": "3a"}),
        ({"auto_augment": "original", **BILINEAR}, {"auto_augment": "original", **BILINEAR}),
        ({"auto_augment": "augmix-m3", **RANDOM}, {"auto_augment": "augmix-m3", **RANDOM}),
        ({"scale": (0.5, 0.6), "flip": 1.0}, {"scale": (0.5, 0.6), "hflip": 1.0}),
    ],
)
@pytest.mark.parametrize("erasing", [0.0, 0.25, 1.0])
def test_equals_timm(ours: dict[str, Any], theirs: dict[str, Any], erasing: float) -> None:
    transform = TrainTransform(**{"size": 40, "erasing": erasing} | ours)
    reference = published(transform, **theirs)
    erased = 0
    for i in range(12):
        augmented = augment(transform, i)
        assert (augmented.pixels.shape, augmented.pixels.dtype) == ((3, 40, 40), np.uint8)
        assert augmented.noise.dtype == np.float32
        with drawing_from(SAMPLE, 0, 0, i):
            expected = reference(PICTURES[i % len(PICTURES)])
        assert torch.equal(whole(augmented, transform), expected)
        erased += augmented.noise.size > 0
    assert (erased == 0) == (erasing == 0)
    assert (erased == 12) == (erasing == 1)


def test_normalised_as_evaluation_images() -> None:
    transform = TrainTransform(16, erasing=0, mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
    augmented = augment(transform, 0)
    batch = transform.normalize(torch.from_numpy(augmented.pixels)[None])
    assert torch.equal(batch[0], whole(augmented, transform))


def test_erased_boxes() -> None:
    """Sizes as Zhong et al. draw them, filled with normal noise, about a quarter of the images."""
    transform = TrainTransform(32, auto_augment="none", colour_jitter=0)
    boxes = [augment(transform, i).noise for i in range(600)]
    erased = [box for box in boxes if box.size]
    assert stats.binomtest(len(erased), 600, 0.25).pvalue > 1e-3
    areas = np.array([box[0].size for box in erased]) / 32**2
    # Sides are rounded to pixels.
    assert areas.min() > 0.01
    assert areas.max() < 0.36
    assert abs(areas.mean() - (0.02 + 1 / 3) / 2) < 0.03
    values: Any = stats.kstest(np.concatenate([box.ravel() for box in erased]), "norm")
    assert values.pvalue > 1e-3
    places = np.array([[a.top, a.left] for a in (augment(transform, i) for i in range(600)) if a.noise.size])
    assert (places.min(0) == 0).all()


def test_flips_are_even() -> None:
    transform = TrainTransform(8, auto_augment="none", colour_jitter=0, erasing=0, scale=(1, 1))
    ramp = photograph(16, 16, 0)
    ramp.putdata([(10 * (i % 16),) * 3 for i in range(256)])
    flipped = 0
    for i in range(300):
        with drawing_from(i):
            pixels = transform(ramp).pixels
        flipped += pixels[0, 0, 0] > pixels[0, 0, -1]
    assert stats.binomtest(int(flipped), 300).pvalue > 1e-3


def test_survives_the_way_to_a_worker() -> None:
    transform = TrainTransform(24)
    again = pickle.loads(pickle.dumps(transform))
    for mine, other in zip(augment(transform, 3), augment(again, 3), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_describes_everything() -> None:
    base = TrainTransform(24)
    variants = [
        base,
        *(
            replace(base, **change)
            for change in (
                {"size": 32}, {"auto_augment": "none"}, {"erasing": 0.1}, {"colour_jitter": 0.3}, {"scale": (0.1, 1.0)},
                {"interpolation": "bilinear"}, {"flip": 0.0}, {"mean": (0.0,) * 3}, {"std": (1.0,) * 3},
            )
        ),
    ]  # fmt: skip
    assert len({json.dumps(variant.describe()) for variant in variants}) == len(variants)
    assert json.loads(json.dumps(base.describe())) == base.describe()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"erasing": 1.5}, "erasing 1.5"),
        ({"erasing": float("nan")}, "erasing nan"),
        ({"flip": -0.1}, "flip -0.1"),
        ({"colour_jitter": 2}, "colour jitter 2"),
        ({"scale": (0.0, 1.0)}, "above 0"),
        ({"scale": (0.9, 0.3)}, "smaller one first"),
        ({"auto_augment": "rand-m9-q3"}, "rand-m9-q3"),
        ({"auto_augment": "randaugment-m9"}, "rand-m9-mstd0.5-inc1, or none"),
        ({"auto_augment": "strong"}, "cannot read the automatic augmentation 'strong'"),
        ({"interpolation": "cubic"}, "interpolation 'cubic': use bicubic"),
    ],
)
def test_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainTransform(**{"size": 24} | settings)


@pytest.mark.parametrize("name", ["rand-m10-inc1", "v0"])
def test_posterising_without_a_bit_is_black(name: str):
    """Pillow 13 refuses it; 'v0' holds policies, which are lists of operations."""
    steps: Any = TrainTransform(24, auto_augment=name)._picture
    ops = [op for step in steps.transforms for op in getattr(step, "ops", [])]
    ops += [op for step in steps.transforms for policy in getattr(step, "policy", []) for op in policy]
    posterising = [op for op in ops if "Posterize" in op.name]
    assert posterising
    for op in posterising:
        op.prob, op.level_fn = 1.0, lambda level, hparams: (0,)
        assert np.asarray(op(PICTURES[0])).max() == 0
        op.level_fn = lambda level, hparams: (3,)
        np.testing.assert_array_equal(np.asarray(op(PICTURES[0])), np.asarray(PICTURES[0]) & 0b11100000)
