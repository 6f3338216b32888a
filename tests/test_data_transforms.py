"""The evaluation transform against torchvision's own, composed from its public classes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from ibot_eval.backbone import IMAGENET_MEAN, IMAGENET_STD, Backbone
from ibot_eval.data.transforms import EvalTransform, eval_transform
from ibot_eval.errors import ConfigError
from ibot_eval.settings import DataSettings

from . import images


def backbone(patch: int = 16) -> Any:
    fake = SimpleNamespace(patch_size=patch, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), architecture="vit-s/16")
    fake.check_size = lambda h, w: Backbone.check_size(fake, h, w)  # type: ignore[arg-type]
    return fake


@pytest.mark.parametrize("size", [(500, 375), (375, 501), (256, 256), (90, 131), (224, 900), (40, 40)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_equals_torchvision_on_pil_images(size: tuple[int, int], interpolation: str) -> None:
    image = Image.fromarray(images.picture(size[1], size[0]))
    ours = EvalTransform(256, 224, interpolation, IMAGENET_MEAN, IMAGENET_STD)
    reference = transforms.Compose(
        [
            transforms.Resize(256, interpolation=transforms.InterpolationMode(interpolation)),
            transforms.CenterCrop(224),
        ]
    )
    small = reference(image)
    got = ours(image)
    assert got.dtype == torch.uint8
    assert got.shape == (3, 224, 224)
    np.testing.assert_array_equal(got.permute(1, 2, 0).numpy(), np.asarray(small))
    finish = transforms.Compose([transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)])
    torch.testing.assert_close(ours.normalize(got[None])[0], finish(small), rtol=0, atol=1e-6)


def test_shrinking_is_antialiased() -> None:
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 255
    got = EvalTransform(128, 112, "bicubic", IMAGENET_MEAN, IMAGENET_STD)(Image.fromarray(stripes))
    assert (got.float() - 127.5).abs().max() < 10  # without antialiasing the stripes come out black or white


def test_images_smaller_than_the_crop_are_padded_as_torchvision_does() -> None:
    image = Image.fromarray(images.picture(32, 32))
    got = EvalTransform(32, 48, "bicubic", IMAGENET_MEAN, IMAGENET_STD)(image)
    np.testing.assert_array_equal(got.permute(1, 2, 0).numpy()[8:40, 8:40], np.asarray(image))
    assert got[:, :8].sum() == 0


def test_normalize_leaves_its_input_alone() -> None:
    batch = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    before = batch.clone()
    out = EvalTransform(4, 4, "bicubic", (0, 0, 0), (1, 1, 1)).normalize(batch)
    assert torch.equal(batch, before)
    torch.testing.assert_close(out, batch / 255)


def test_defaults_come_from_the_backbone() -> None:
    got = eval_transform(DataSettings(data="x"), backbone())
    assert got == EvalTransform(256, 224, "bicubic", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    demo = eval_transform(DataSettings(data="demo"), backbone())
    assert (demo.resize, demo.crop) == (64, 64)


@pytest.mark.parametrize(
    ("grid", "patch", "size"), [((7, 7), {}, 112), ((2, 3), {}, 32), ((56, 56), {"embed_patch_size": 4}, 224)]
)
def test_digits_come_at_the_size_that_the_network_was_trained_at(
    grid: tuple[int, int], patch: dict[str, int], size: int
) -> None:
    trained = backbone()
    vars(trained).update(trained_grid=grid, **patch)
    got = eval_transform(DataSettings(data="demo"), trained)
    assert (got.resize, got.crop) == (size, size)
    assert eval_transform(DataSettings(data="demo", crop=16), trained).crop == 16
    assert eval_transform(DataSettings(data="x"), trained).crop == 224


def test_settings_win() -> None:
    asked = DataSettings(data="demo", resize=48, crop=32, interpolation="bilinear", mean=(0, 0, 0), std=(1, 1, 1))
    got = eval_transform(asked, backbone())
    assert got == EvalTransform(48, 32, "bilinear", (0, 0, 0), (1, 1, 1))


def test_describe_is_json_and_tells_transforms_apart() -> None:
    one = eval_transform(DataSettings(data="x"), backbone())
    assert json.loads(json.dumps(one.describe())) == one.describe()
    others = [
        DataSettings(data="x", resize=288),
        DataSettings(data="x", crop=192),
        DataSettings(data="x", interpolation="bilinear"),
        DataSettings(data="x", mean=(0, 0, 0)),
        DataSettings(data="x", std=(1, 1, 1)),
    ]
    assert (
        len({json.dumps(eval_transform(s, backbone()).describe()) for s in others} | {json.dumps(one.describe())}) == 6
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": 288}, r"--crop 288 is larger than --resize 256 \(the default\)"),
        ({"resize": 128}, r"--crop 224 \(the default\) is larger than --resize 128"),
        ({"crop": 100}, "100x100 pixels cannot be cut into patches of 16"),
        ({"resize": 0, "crop": 0}, "--resize 0: a size in pixels is at least 1"),
        ({"crop": -16}, "--crop -16"),
        ({"std": (0.2, 0.0, 0.2)}, "every deviation must be above 0"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        eval_transform(DataSettings(data="x", **settings), backbone())
