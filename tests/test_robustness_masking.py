"""robustness.masking and filling: cases by hand, the published rule, and what all masks have in common."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ibot_eval.robustness import draws
from ibot_eval.robustness.filling import fill_values, filled
from ibot_eval.robustness.masking import (
    attention_masks,
    information_loss,
    random_masks,
    resampled,
    shifted_attention,
    to_pixels,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "occlusion_saliency.json").read_text(encoding="utf-8"))
LEVELS = tuple(range(0, 101, 10))


def test_random_masks_by_hand():
    masks = random_masks(torch.tensor([[3, 0, 2, 1]]), (0, 25, 60, 100))
    assert masks[:, 0].int().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]]


def test_random_levels_are_the_published_numbers_of_patches():
    masks = random_masks(draws.permutations(torch.arange(3), 196, 0), LEVELS[:-1])
    assert masks.sum(2).tolist() == [[tenths * 196 // 10] * 3 for tenths in range(10)]


def test_attention_masks_by_hand():
    # Shares of 4x4 patches: 0, 13 times 1/20, 3/20 and 4/20; added up from the least 0, 1/20 … 13/20, 16/20, 1.
    attention = torch.full((1, 16), 1.0)
    attention[0, 5], attention[0, 10] = 4.0, 3.0
    attention[0, 0] = 0.0
    attention = attention * 0.7
    salient = attention_masks(attention, (0, 15, 37, 100), most=True)[:, 0]
    assert [torch.nonzero(mask).flatten().tolist() for mask in salient[:3]] == [[], [5], [5, 10, 15]]
    assert salient[3].tolist() == [False] + [True] * 15, "a patch of no attention has no mass to lose"
    least = attention_masks(attention, (0, 12, 70, 100), most=False)[:, 0]
    assert [torch.nonzero(mask).flatten().tolist() for mask in least[:2]] == [[], [0, 1, 2]]
    assert torch.nonzero(~least[2]).flatten().tolist() == [5, 10]
    assert least[3].all()
    assert information_loss(salient).tolist() == [0, 1 / 16, 3 / 16, 15 / 16]


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=lambda row: str(row["drop_lambda"]))
def test_attention_masks_are_the_published_ones(row):
    attention, level = torch.tensor(GOLDEN["attention"]), round(100 * row["drop_lambda"])
    (salient,) = attention_masks(attention, (level,), most=True)
    assert ["".join(map(str, mask)) for mask in salient.int().tolist()] == row["salient"]
    assert information_loss(salient).tolist() == row["information_loss_salient"]
    # Published: what is left of non-salient dropping is the salient part.
    (least,) = attention_masks(attention, (100 - level,), most=False)
    assert torch.equal(least, ~salient)
    assert information_loss(least).tolist() == pytest.approx(row["information_loss_non_salient"])


def test_a_level_drops_what_lower_levels_drop():
    attention = torch.rand(5, 49, generator=torch.Generator().manual_seed(0)) ** 4
    ranks = draws.permutations(torch.arange(5), 49, 0)
    for masks in (random_masks(ranks, LEVELS), *(attention_masks(attention, LEVELS, most=m) for m in (True, False))):
        assert not masks[0].any()
        assert masks[-1].all()
        assert (masks[1:] | masks[:-1]).equal(masks[1:])
    with_least = attention_masks(attention, LEVELS, most=False)
    assert (information_loss(with_least) >= information_loss(attention_masks(attention, LEVELS, most=True))).all()


def test_equal_attention_drops_by_position():
    (salient,) = attention_masks(torch.ones(1, 4), (50,), most=True)
    assert salient.tolist() == [[False, False, True, True]]


def test_pixels_by_hand():
    mask = torch.tensor([[[True, False], [False, False]]])
    plain = to_pixels(mask, 2)
    assert plain[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(to_pixels(mask, 2, torch.zeros(1, 2, dtype=torch.long)), plain)
    both = to_pixels(mask.expand(2, -1, -1), 2, torch.tensor([[1, 0], [0, 3]]))
    assert both[0, 0].int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert both[1, 0].int().tolist() == [[1, 0, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_shifted_attention_is_what_lies_in_the_shifted_squares():
    generator = torch.Generator().manual_seed(1)
    attention, side = torch.rand(3, 4, 5, generator=generator), 4
    offsets = torch.tensor([[0, 0], [1, 3], [2, 0]])
    found = shifted_attention(attention, offsets, side)
    for image in range(3):
        # Attention spread over pixels, and summed up over the pixels of each square.
        pixels = attention[image].repeat_interleave(side, 0).repeat_interleave(side, 1) / side**2
        for row in range(4):
            for column in range(5):
                one = torch.zeros(1, 4, 5, dtype=torch.bool)
                one[0, row, column] = True
                square = to_pixels(one, side, offsets[image : image + 1])[0, 0]
                assert found[image, row, column] == pytest.approx(float(pixels[square].sum()), rel=1e-5)


def test_resampling_keeps_the_mass_where_it_is():
    attention = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    assert resampled(attention, 2, 3) is attention
    # Columns: of three, the first and half of the second make the left one.
    assert resampled(attention, 2, 2)[0].tolist() == [[2.0, 4.0], [6.5, 8.5]]
    finer = resampled(attention, 4, 6)
    assert finer[0, :2, :2].tolist() == [[0.25, 0.25], [0.25, 0.25]]
    odd = resampled(attention, 5, 7)
    assert odd.sum() == pytest.approx(21)
    assert (odd >= 0).all()


def test_fills():
    mean, std = (0.5, 0.4, 0.2), (0.25, 0.2, 0.1)
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    pixels = to_pixels(torch.tensor([[[True, False], [False, False]]] * 2), 2)
    indices = torch.tensor([8, 9])
    values = {fill: fill_values(fill, images, indices, mean, std, 0, 0) for fill in ("mean", "black", "noise")}
    for value in values.values():
        shown = filled(images, pixels, value)
        assert torch.equal(shown[:, :, 2:], images[:, :, 2:])
        assert not torch.isclose(shown[:, :, :2, :2], images[:, :, :2, :2]).any()
    assert (filled(images, pixels, values["mean"])[:, :, :2, :2] == 0).all()
    black = filled(images, pixels, values["black"])[:, :, :2, :2]
    assert torch.allclose(black * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None], torch.zeros(1))
    alone = fill_values("noise", images[1:], indices[1:], mean, std, 0, 0)
    assert torch.equal(alone[0], values["noise"][1])
    assert not torch.equal(fill_values("noise", images, indices, mean, std, 0, 1), values["noise"])
