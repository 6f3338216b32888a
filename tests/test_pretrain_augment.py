"""Crops and colours: each operation against Pillow, and all of it against the published pipeline's distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy.stats import binomtest, ks_2samp
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import functional as V

from ibot_eval.errors import ConfigError
from pretrain import device_augment
from pretrain.augment import CHANGES, Augmentation, crop, draw_box, draw_changes
from pretrain.device_augment import Changes, apply

from .published_crops import PublishedCrop, photograph

PLAIN = Augmentation(
    flip=0, jitter_probability=0, grey=0, blur=(0, 0, 0), solarise=(0, 0, 0), mean=(0, 0, 0), std=(1 / 255,) * 3
)
"""Nothing but crops, and pixels as they are."""


def _batch(*pictures: Image.Image) -> Tensor:
    return torch.stack([V.pil_to_tensor(picture).float() for picture in pictures])  # type: ignore[arg-type]


def _pictures() -> list[Image.Image]:
    """A photograph, noise, every grey, and saturated colours with black and white."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8)
    greys = np.repeat(np.arange(64 * 48) % 256, 3).reshape(64, 48, 3).astype(np.uint8)
    pure = (np.random.default_rng(1).integers(0, 2, (64, 48, 3)) * 255).astype(np.uint8)
    return [photograph(48, 64, 3), *map(Image.fromarray, (noise, greys, pure))]


FACTORS = (0.6, 0.83, 1.0, 1.17, 1.4)
HUES = (-0.5, -0.1, -0.033, 0.0, 0.002, 0.08, 0.5)


@pytest.mark.parametrize(
    ("ours", "pillow"),
    [
        (device_augment.brightness, ImageEnhance.Brightness),
        (device_augment.contrast, ImageEnhance.Contrast),
        (device_augment.saturation, ImageEnhance.Color),
    ],
)
def test_brightness_contrast_and_saturation_are_pillows(
    ours: Callable[..., Tensor], pillow: Callable[..., Any]
) -> None:
    pairs = [(picture, factor) for picture in _pictures() for factor in FACTORS]
    got = ours(_batch(*(picture for picture, _ in pairs)), torch.tensor([factor for _, factor in pairs]))
    assert torch.equal(got, _batch(*(pillow(picture).enhance(factor) for picture, factor in pairs)))


def test_hue_is_pillows() -> None:
    """A hue at the edge between two of its 255 steps may fall into the other one."""
    pairs = [(picture, factor) for picture in _pictures() for factor in HUES]
    got = device_augment.hue(_batch(*(picture for picture, _ in pairs)), torch.tensor([factor for _, factor in pairs]))
    expected: list[Any] = [V.adjust_hue(picture, factor) for picture, factor in pairs]  # type: ignore[arg-type]
    _assert_pixels(got, _batch(*expected), most=6, differing=0.002)


def test_grey_is_pillows() -> None:
    expected = _batch(*(V.to_grayscale(picture, 3) for picture in _pictures()))  # type: ignore[arg-type]
    _assert_pixels(device_augment.grey(_batch(*_pictures()), torch.zeros(4)), expected, most=1, differing=0.001)


def test_solarise_is_pillows() -> None:
    expected = _batch(*(ImageOps.solarize(picture) for picture in _pictures()))
    assert torch.equal(device_augment.solarise(_batch(*_pictures()), torch.zeros(4)), expected)


@pytest.mark.parametrize("radius", [0.1, 0.37, 0.8, 1.03, 1.4142, 1.75, 2.0])
def test_blur_is_pillows(radius: float) -> None:
    """Pillow rounds after each of its six passes, which moves single pixels by up to three levels, but not the mean;
    and it repeats the border before each pass, which at the border makes more of a difference."""
    pictures = _pictures()
    got = device_augment.blur(_batch(*pictures), torch.full((len(pictures),), radius))
    expected = _batch(*(picture.filter(ImageFilter.GaussianBlur(radius)) for picture in pictures))
    assert (got - expected).mean((1, 2, 3)).abs().max() < 0.02
    _assert_pixels(got[..., 6:-6, 6:-6], expected[..., 6:-6, 6:-6], most=3, differing=0.6)
    _assert_pixels(got[:1], expected[:1], most=8, differing=0.6)


def test_each_crop_has_its_own_blur() -> None:
    picture = _pictures()[0]
    radii = [0.3, 0.9, 1.6, 2.0]
    together = device_augment.blur(_batch(*[picture] * 4), torch.tensor(radii))
    for radius, got in zip(radii, together, strict=True):
        assert torch.equal(got, device_augment.blur(_batch(picture), torch.tensor([radius]))[0])
    assert len({got.std().item() for got in together}) == 4


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (40, 1)], ids=str)
def test_blur_leaves_one_colour_as_it_is(size: tuple[int, int]) -> None:
    for level in (0, 1, 128, 255):
        flat = torch.full((2, 3, *size), float(level))
        assert torch.equal(device_augment.blur(flat.clone(), torch.tensor([0.1, 2.0])), flat)


def _assert_pixels(got: Tensor, expected: Tensor, most: float, differing: float) -> None:
    off = (got - expected).abs()
    assert torch.equal(got, got.round())
    assert off.max() <= most, off.max()
    assert (off > 0).double().mean() <= differing, (off > 0).double().mean()


def _changes(n: int, **fields: Any) -> np.ndarray:
    changes = np.zeros(n, CHANGES)
    for name, value in fields.items():
        changes[name] = value
    return changes


def test_jitter_of_each_crop_has_its_own_order_and_factors() -> None:
    operations = (V.adjust_brightness, V.adjust_contrast, V.adjust_saturation, V.adjust_hue)
    rng = np.random.default_rng(5)
    picture = photograph(40, 40, 1)
    changes = _changes(30)
    expected = []
    for i in range(30):
        order, factors = rng.permutation(4), rng.uniform((0.6, 0.6, 0.8, -0.1), (1.4, 1.4, 1.2, 0.1))
        changes[i]["jittered"], changes[i]["order"], changes[i]["factors"] = i % 5 > 0, order, factors
        image: Any = picture
        for operation in order if i % 5 else ():
            image = operations[operation](image, float(np.float32(factors[operation])))
        expected.append(image)
    got = apply(_batch(*[picture] * 30).to(torch.uint8), Changes.plan(changes), PLAIN)
    _assert_pixels(got.round(), _batch(*expected), most=10, differing=0.005)


def test_operations_follow_each_other_as_published() -> None:
    """Jitter, grey, blur, solarise, normalise, each only on the crops that drew it, and none changes the input."""
    pictures = [photograph(32, 32, seed) for seed in range(8)]
    images = _batch(*pictures).to(torch.uint8)
    before = images.clone()
    flags = np.array([[i & 1, i & 2, i & 4] for i in range(8)], bool)
    changes = _changes(8, grey=flags[:, 0], radius=flags[:, 1] * np.float32(1.5), solarise=flags[:, 2])
    augmentation = Augmentation()
    expected = []
    for picture, (grey, blurred, solarised) in zip(pictures, flags, strict=True):
        image: Any = V.to_grayscale(picture, 3) if grey else picture  # type: ignore[arg-type]
        image = image.filter(ImageFilter.GaussianBlur(1.5)) if blurred else image
        image = ImageOps.solarize(image) if solarised else image
        expected.append(V.normalize(V.to_tensor(image), list(augmentation.mean), list(augmentation.std)))
    got = apply(images, Changes.plan(changes), augmentation)
    assert torch.equal(images, before)
    off = (got - torch.stack(expected)).abs() * 255 * torch.tensor(augmentation.std)[:, None, None]
    assert off[~flags[:, 1]].max() < 1.01
    assert off[..., 6:-6, 6:-6].max() < 3.01
    assert off.mean() < 0.5


def _rngs(n: int, *seed: int) -> list[np.random.Generator]:
    return [np.random.default_rng((*seed, i)) for i in range(n)]


@pytest.mark.parametrize("size", [(500, 375), (37, 61), (5, 3), (1, 1)], ids=str)
def test_resize_is_pillows(size: tuple[int, int]) -> None:
    """Enlarged or reduced. The pictures have no such edges as those where crop() says that it differs by more."""
    picture = photograph(*size, 4)
    cropped = crop(picture, PLAIN, _rngs(PLAIN.crops, 0))
    assert cropped.globals.shape == (2, 3, 224, 224)
    assert cropped.locals.shape == (10, 3, 96, 96)
    off = []
    for i, got in enumerate([*cropped.globals, *cropped.locals]):
        scale = PLAIN.global_scale if i < 2 else PLAIN.local_scale
        box = draw_box(np.random.default_rng((0, i)), picture.size, scale, PLAIN.aspect)
        expected = np.asarray(picture.crop(box).resize(got.shape[1:], Image.Resampling.BICUBIC))
        off.append(np.abs(got.transpose(1, 2, 0).astype(int) - expected).ravel())
    assert np.concatenate(off).max() <= 2
    assert np.concatenate(off).mean() < 0.1


def test_flip_comes_after_the_crop() -> None:
    picture = photograph(50, 40, 4)
    plain, flipped = (crop(picture, Augmentation(flip=flip), _rngs(12, 1)) for flip in (0.0, 1.0))
    assert np.array_equal(plain.globals[..., ::-1], flipped.globals)
    assert np.array_equal(plain.locals[..., ::-1], flipped.locals)
    assert np.array_equal(plain.changes, flipped.changes)


@pytest.mark.parametrize("size", [(500, 375), (300, 40), (40, 300)], ids=str)
@pytest.mark.parametrize("scale", [(0.25, 1.0), (0.05, 0.25)], ids=str)
def test_boxes_are_distributed_as_torchvisions(size: tuple[int, int], scale: tuple[float, float]) -> None:
    """300x40 takes the fallback for large scales."""
    n = 3000
    rng = np.random.default_rng(0)
    boxes = np.array([draw_box(rng, size, scale, (3 / 4, 4 / 3)) for _ in range(n)])
    ours = np.stack([boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]], 1)
    assert boxes.min() >= 0
    assert (boxes.max(0) <= np.array([*size, *size])).all()
    image = torch.empty(3, size[1], size[0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        get = transforms.RandomResizedCrop.get_params
        theirs = np.array([get(image, list(scale), [3 / 4, 4 / 3]) for _ in range(n)])
    for column in range(4):
        assert ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    assert ks_2samp(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]).pvalue > 1e-3
    assert ks_2samp(ours[:, 2] / ours[:, 3], theirs[:, 2] / theirs[:, 3]).pvalue > 1e-3


def test_rates_and_ranges_of_what_is_drawn() -> None:
    augmentation = Augmentation(global_crops=3, local_crops=2, rotation=10, shift=0.25, shear=0.2, zoom=(0.8, 1.1))
    n = 2000
    drawn = np.empty((n, 5), CHANGES)
    for i in range(5):
        rng = np.random.default_rng(i)
        drawn[:, i] = [draw_changes(rng, augmentation, i) for _ in range(n)]
    rates = {
        "jittered": (0.8,) * 5,
        "grey": (0.2,) * 5,
        "radius": (1.0, 0.1, 0.1, 0.5, 0.5),
        "solarise": (0.0, 0.2, 0.2, 0.0, 0.0),
    }
    for name, expected in rates.items():
        for hits, rate in zip((drawn[name] > 0).sum(0), expected, strict=True):
            assert binomtest(int(hits), n, rate).pvalue > 1e-4, (name, hits)
    radii = drawn["radius"][:, 0]
    ranges = [(drawn["factors"][..., i], 1 - s, 1 + s) for i, s in enumerate((0.4, 0.4, 0.2))]
    ranges += [(drawn["factors"][..., 3], -0.1, 0.1), (radii, 0.1, 2.0), (drawn["deformation"]["angle"], -10, 10)]
    moved = drawn["deformation"]
    ranges += [(moved["shift"][..., i], -0.25, 0.25) for i in range(2)] + [(moved["shear"], -0.2, 0.2)]
    ranges += [(moved["hidden"][..., i], -0.1, 0.2) for i in range(2)] + [(moved["place"][..., 1], -1, 1)]
    for values, low, high in ranges:
        uniform = np.random.default_rng(0).uniform(low, high, 20000)
        assert low - 1e-6 <= values.min() <= values.max() <= high + 1e-6
        assert ks_2samp(values.ravel(), uniform).pvalue > 1e-3
    orders, counts = np.unique(drawn["order"].reshape(-1, 4), axis=0, return_counts=True)
    assert len(orders) == math.factorial(4)
    assert counts.min() > 0.8 * 5 * n / 24
    assert counts.max() < 1.2 * 5 * n / 24


N = 500
SIGNIFICANT = 1e-3


def _statistics(images: np.ndarray) -> dict[str, np.ndarray]:
    """Of each (3, s, s) image: mean and deviation per channel, correlation of channels, roughness."""
    flat = images.reshape(len(images), 3, -1)
    centred = flat - flat.mean(2, keepdims=True)
    deviation = centred.std(2) + 1e-3
    pairs = {"rg": (0, 1), "rb": (0, 2), "gb": (1, 2)}
    values = {f"mean {c}": flat[:, i].mean(1) for i, c in enumerate("rgb")}
    values |= {f"deviation {c}": deviation[:, i] for i, c in enumerate("rgb")}
    values |= {
        f"correlation {name}": (centred[:, a] * centred[:, b]).mean(1) / deviation[:, a] / deviation[:, b]
        for name, (a, b) in pairs.items()
    }
    steps = np.abs(np.diff(images, axis=3)).mean((1, 2, 3))
    return values | {"roughness": steps, "colour": np.abs(flat[:, 0] - flat[:, 2]).mean(1)}


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["first global", "second global", "local"])
def test_results_are_distributed_as_the_published_pipelines(kind: int) -> None:
    augmentation = Augmentation(global_crops=2, global_size=48, local_crops=1, local_size=32)
    size, scale = (32, augmentation.local_scale) if kind == 2 else (48, augmentation.global_scale)
    pictures = [photograph(160, 120, seed) for seed in range(20)]
    transform = PublishedCrop(kind, size, scale)
    with torch.random.fork_rng():
        torch.manual_seed(kind)
        transform.seed(kind)
        theirs = torch.stack([transform(pictures[i % 20]) for i in range(N)]).numpy()
    cropped = [crop(pictures[i % 20], augmentation, _rngs(3, 11, i)) for i in range(N)]
    images = np.stack([(c.locals[0] if kind == 2 else c.globals[kind]) for c in cropped])
    changes = np.stack([c.changes[kind] for c in cropped])
    ours = apply(torch.from_numpy(images), Changes.plan(changes), augmentation).numpy()
    p_values = _p_values(_statistics(ours), _statistics(theirs))
    assert min(p_values.values()) > SIGNIFICANT, p_values


def _p_values(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: ks_2samp(values, theirs[name]).pvalue for name, values in ours.items()}


def test_the_comparison_of_distributions_would_notice() -> None:
    """Were one of the second global crop's probabilities another, the test above would fail."""
    published = Augmentation(global_crops=2, global_size=48, local_crops=0)
    pictures = [photograph(160, 120, seed) for seed in range(20)]
    images = torch.from_numpy(
        np.stack([crop(pictures[i % 20], published, _rngs(2, 3, i)).globals[1] for i in range(N)])
    )

    def statistics(seed: int, **settings: Any) -> dict[str, np.ndarray]:
        augmentation = replace(published, **settings)
        rng = np.random.default_rng(seed)
        drawn = np.array([draw_changes(rng, augmentation, 1) for _ in range(N)], CHANGES)
        return _statistics(apply(images, Changes.plan(drawn), augmentation).numpy())

    expected = statistics(0)
    others = (
        {"grey": 0.05},
        {"solarise": (0.0, 0.6, 0.0)},
        {"blur": (1.0, 0.5, 0.5)},
        {"jitter_probability": 0.2},
        {"mean": (0.45, 0.42, 0.38)},
    )
    assert min(_p_values(statistics(1), expected).values()) > SIGNIFICANT
    for seed, settings in enumerate(others, start=2):
        assert min(_p_values(statistics(seed, **settings), expected).values()) < SIGNIFICANT, settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_crops": 0}, "global_crops is 0"),
        ({"local_crops": -1}, "local_crops is -1"),
        ({"local_size": 0}, "local_size is 0"),
        ({"global_scale": (0.0, 1.0)}, "global_scale"),
        ({"local_scale": (0.3, 0.2)}, "local_scale"),
        ({"local_scale": (0.3, 1.2)}, "local_scale"),
        ({"aspect": (0.0, 1.0)}, "aspect"),
        ({"flip": 1.5}, "flip is 1.5"),
        ({"blur": (0.1, -0.1, 0.5)}, "blur"),
        ({"solarise": (0.1, 2, 0.5)}, "solarise"),
        ({"colour_jitter": (0.4, 0.4, 0.2, 0.6)}, "colour_jitter"),
        ({"colour_jitter": (1.4, 0.4, 0.2, 0.1)}, "colour_jitter"),
        ({"rotation": -3}, "rotation"),
        ({"shift": 1.1}, "shift"),
        ({"shear": -0.1}, "shear"),
        ({"stretch": 0.5}, "stretch"),
        ({"zoom": (1.0, 0.5)}, "zoom"),
        ({"std": (0.0, 1, 1)}, "std"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Augmentation(**settings)
