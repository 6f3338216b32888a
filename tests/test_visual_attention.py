"""Attention maps: equal to the published network's, thresholded as published, and refused where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval.errors import ConfigError
from ibot_eval.models import wrap
from ibot_eval.visual.attention import (
    activation_map,
    at_image_resolution,
    attention_maps,
    explain_no_attention,
    mass_mask,
)
from ibot_eval.visual.attention_figures import attention_figure, heat, overlay, overlay_figure
from ibot_eval.visual.canvas import outline
from ibot_eval.visual.pictures import Picture, prepare
from tests import layouts, looking
from tests.test_models_golden import golden, load, part

SALIENCY = json.loads((Path(__file__).parent / "golden" / "saliency.json").read_text())


def golden_picture(image: torch.Tensor) -> Any:
    """A picture whose tensor is already there."""
    grid = image.shape[-2] // 8, image.shape[-1] // 8
    return SimpleNamespace(grid=grid, name="golden", tensor=lambda backbone: image, check_patch=lambda patch: patch)


@pytest.fixture(scope="module")
def vit() -> Any:
    return wrap(layouts.vit()).eval()


@pytest.fixture(scope="module")
def picture(vit: Any) -> Picture:
    return prepare(looking.noise(40, 63), vit, 32)


@pytest.mark.parametrize("size", ["64x64", "96x96", "32x32", "48x80"])
def test_equals_the_published_last_attention(tmp_path: Path, size: str) -> None:
    data = golden("vit.safetensors")
    if f"image/{size}" not in data:
        pytest.skip("only in ../shared")
    backbone = load(tmp_path, part("vit.safetensors", "state/"), heads=3).backbone
    wanted = data[f"last_attention/{size}"][0].numpy()
    picture = golden_picture(data[f"image/{size}"][:1])
    h, w = picture.grid
    for query, row in ((None, 0), ((0, 0), 1), ((h - 1, 2), 1 + (h - 1) * w + 2)):
        found = attention_maps(backbone, picture, -1, query)
        assert found.block == 3
        np.testing.assert_allclose(found.weights.reshape(3, -1), wanted[:, row, 1:], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.prefix, wanted[:, row, :1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [layouts.vit, layouts.eva, layouts.beit])
def test_rows_sum_to_one(make: Any) -> None:
    backbone = wrap(make()).eval()
    picture = prepare(looking.noise(40, 63), backbone, 32)
    for block in (0, -1):
        for query in (None, (3, 5)):
            found = attention_maps(backbone, picture, block, query)
            assert found.weights.shape == (3, *picture.grid)
            np.testing.assert_allclose(found.weights.sum((1, 2)) + found.prefix.sum(1), 1, rtol=1e-5)
            np.testing.assert_allclose(found.mean, found.weights.mean(0))


def test_blocks_differ_and_are_counted_from_either_end(vit: Any, picture: Picture) -> None:
    first, last = attention_maps(vit, picture, 0), attention_maps(vit, picture, 1)
    assert not np.allclose(first.weights, last.weights)
    assert np.array_equal(attention_maps(vit, picture, -1).weights, last.weights)


@pytest.mark.parametrize("row", SALIENCY["rows"], ids=lambda row: str(row["mass"]))
def test_mass_is_the_published_one(row: dict[str, Any]) -> None:
    attention = np.array(SALIENCY["attention"], np.float32).reshape(-1, 7, 7)
    wanted = np.array(row["salient"], bool).reshape(attention.shape)
    assert np.array_equal(mass_mask(attention, row["mass"]), wanted)


def test_mass_by_hand() -> None:
    # From the least: 0.1, 0.3, 0.6, 1.0. Above 1 - 0.6 are the last two; 0.25 lies between the first two.
    weights = np.array([[0.4, 0.1], [0.2, 0.3]])
    assert mass_mask(weights, 0.6).tolist() == [[True, False], [False, True]]
    assert mass_mask(weights, 0.75).tolist() == [[True, False], [True, True]]
    assert mass_mask(weights, 1.0).all()
    assert np.array_equal(mass_mask(10 * weights, 0.6), mass_mask(weights, 0.6))


@pytest.mark.parametrize("mass", [0.0, 1.5, -1.0, float("nan")])
def test_mass_out_of_range(mass: float) -> None:
    with pytest.raises(ConfigError, match="not a share"):
        mass_mask(np.ones((2, 2)), mass)


def test_squares_and_smooth_maps() -> None:
    maps = np.array([[1.0, 0.0], [0.0, 0.0]], np.float32)
    squares = at_image_resolution(maps, (4, 6))
    assert squares.tolist() == np.kron(maps, np.ones((2, 3))).tolist()
    smooth = at_image_resolution(maps[None], (40, 40), smooth=True)
    assert smooth.shape == (1, 40, 40)
    assert smooth.min() >= 0
    assert smooth[0, 0, 0] > smooth[0, 15, 15] > smooth[0, 30, 30]


def test_outline_is_the_border_between_kept_and_left_out() -> None:
    mask = np.array([[False, True, True]])
    # x, y of the ends: a rectangle from (1, 0) to (3, 1).
    edges = {tuple(map(tuple, edge)) for edge in outline(mask).astype(int)}
    assert edges == {
        *(((1, 0), (2, 0)), ((2, 0), (3, 0)), ((1, 1), (2, 1)), ((2, 1), (3, 1))),
        *(((1, 0), (1, 1)), ((3, 0), (3, 1))),
    }


def test_errors_name_what_is_there(vit: Any, picture: Picture) -> None:
    with pytest.raises(ConfigError, match="block 2 does not exist"):
        attention_maps(vit, picture, 2)
    with pytest.raises(ConfigError, match="4 rows and 6 columns"):
        attention_maps(vit, picture, -1, (4, 0))
    maps = attention_maps(vit, picture)
    with pytest.raises(ConfigError, match="head 3 does not exist"):
        attention_figure(picture, maps, heads=[3])


@pytest.mark.parametrize("make", [layouts.resnet, layouts.swin])
def test_networks_without_attention_over_the_picture(make: Any) -> None:
    backbone = wrap(make()).eval()
    picture = prepare(looking.noise(70, 90), backbone, 64)
    reason = explain_no_attention(backbone)
    assert reason is not None
    assert ("convolution" in reason) == (make is layouts.resnet)
    with pytest.raises(ConfigError, match=r"no attention|within windows"):
        attention_maps(backbone, picture)
    strength = activation_map(backbone, picture)
    assert strength.ndim == 2
    assert (strength > 0).all()


def test_activation_is_the_length_of_the_features(vit: Any, picture: Picture) -> None:
    tokens = vit.outputs(picture.tensor(vit), (0,), norm="none").blocks[0].patches[0].detach().numpy()
    np.testing.assert_allclose(activation_map(vit, picture, 0), np.sqrt((tokens**2).sum(-1)), rtol=1e-5)


def test_the_network_is_left_as_it_was(vit: Any, picture: Picture) -> None:
    vit.train()
    attention_maps(vit, picture)
    assert all(module.training for module in vit.modules())
    vit.eval()


def test_overlay_colours_each_patch_by_its_head(vit: Any, picture: Picture) -> None:
    maps = attention_maps(vit, picture)
    weights = np.zeros_like(maps.weights)
    weights[0, 0, 0] = weights[1, 3, 5] = weights[2, 2, 2] = 1
    made = type(maps)(weights, maps.prefix, 1, None)
    pixels = overlay(picture, made)
    # matplotlib's tab10: blue, orange, green.
    assert pixels[4, 4].tolist() == [31, 119, 180]
    assert pixels[28, 44].tolist() == [255, 127, 14]
    assert pixels[20, 20].tolist() == [44, 160, 44]
    grey = picture.pixels()[12, 12].astype(float).mean()
    assert np.abs(pixels[12, 12] - grey).max() <= 1
    assert overlay(picture, made, heads=[1])[28, 44].tolist() == [255, 127, 14]


def test_figures_have_a_panel_for_each_head(vit: Any, picture: Picture) -> None:
    maps = attention_maps(vit, picture, query=(1, 1))
    figure = attention_figure(picture, maps)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles[1:5] == ["mean of all heads", "head 0", "head 1", "head 2"]
    assert "patch 1, 1" in titles[0]
    assert [ax.get_title() for ax in attention_figure(picture, maps, heads=[2]).axes][2] == "head 2"
    assert heat(picture, maps.mean).shape == picture.pixels().shape
    shown = overlay_figure([(picture, maps), (picture, maps)], titles=["$a_b", "c"])
    assert shown.axes[0].get_title() == "$a_b"
    shown.canvas.draw()
