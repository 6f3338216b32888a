"""Masks against the published samplers' distributions, and the lists of masked tokens against a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval.errors import ConfigError
from pretrain.masking import Masking, masked_positions

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "masking.json").read_text())
SHAPES = {"block": "block", "rand": "random"}


def _masking(row: dict[str, Any], **settings: Any) -> Masking:
    ratios, variances = (np.atleast_1d(row[key]).tolist() for key in ("ratio", "var"))
    return Masking(tuple(ratios), tuple(variances), SHAPES[row["shape"]], **settings)  # type: ignore[arg-type]


def _draw(masking: Masking, n: int, side: int = 14, seed: int = 0, epoch: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([masking.sample(rng, (side, side), epoch) for _ in range(n)])


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['shape']} {row['ratio']} {row['var']} {row['size']}")
def test_published_distribution(row: dict[str, Any]) -> None:
    """Both sides are samples, so limits are 4 standard errors of the difference of two such samples."""
    n = row["n"]
    masks = _draw(_masking(row), n, row["size"] // 16)
    counts = masks.sum((1, 2))
    fractions = counts / masks[0].size
    some = counts > 0
    wide = 4 * np.sqrt(2 / n)
    assert fractions.mean() == pytest.approx(row["mean_fraction"], abs=wide * fractions.std())
    assert (~some).mean() == pytest.approx(row["empty_fraction"], abs=wide * some.std())
    assert fractions[some].mean() == pytest.approx(
        row["nonempty_mean_fraction"], abs=4 * np.sqrt(2 / some.sum()) * fractions[some].std()
    )
    # A quantile of the one is where the other has about that share below and above, whatever jumps the counts make.
    for share, quantile in zip((0, 0.05, 0.25, 0.5, 0.75, 0.95, 1), row["count_quantiles"], strict=True):
        below, up_to = (counts < np.floor(quantile)).mean(), (counts <= np.ceil(quantile)).mean()
        spread = wide * np.sqrt(share * (1 - share)) + 1 / n
        assert below - spread <= share <= up_to + spread, (share, quantile)
    left, right = masks[:, :, :-1], masks[:, :, 1:]
    assert (left & right).sum() / left.sum() == pytest.approx(row["horizontal_neighbour_agreement"], abs=0.015)


@pytest.mark.parametrize("shape", ["block", "random"])
def test_budget_is_never_exceeded(shape: str) -> None:
    for ratio in (0.05, 0.3, 0.6, 1.0):
        masks = _draw(Masking((ratio,), (0.0,), shape), 200)  # type: ignore[arg-type]
        assert masks.dtype == bool
        assert masks.sum((1, 2)).max() <= ratio * 196


def test_random_shape_masks_the_ratio_exactly() -> None:
    assert set(_draw(Masking((0.3,), (0.0,), "random"), 50).sum((1, 2))) == {58}


def test_blocks_never_span_the_crop_and_have_no_preferred_side() -> None:
    masks = _draw(Masking((0.3,), (0.2,)), 3000)
    single = [m for m in masks if m.sum() == np.outer(m.any(1), m.any(0)).sum()]
    assert single
    assert max(max(m.any(1).sum(), m.any(0).sum()) for m in single) <= 13
    share = masks.mean(0)
    assert share.min() > 0
    assert np.allclose(share, share[::-1], atol=0.05)
    assert np.allclose(share, share[:, ::-1], atol=0.05)
    assert np.allclose(share, share.T, atol=0.05)


@pytest.mark.parametrize("shape", ["block", "random"])
def test_at_least_one(shape: str) -> None:
    row = next(row for row in GOLDEN if row["ratio"] == 0.05)
    sparse = _masking(row | {"shape": "block"}, at_least_one=True)
    counts = _draw(sparse, 1000).sum((1, 2))
    assert counts.min() == 1
    assert (counts == 1).mean() == pytest.approx(row["empty_fraction"], abs=0.06)
    # Where the ratio drawn is 0, nothing is to be masked.
    published = Masking(shape=shape, at_least_one=True)  # type: ignore[arg-type]
    assert (_draw(published, 1000).sum((1, 2)) == 0).mean() == pytest.approx(0.5, abs=0.06)


def test_start_epoch() -> None:
    late = Masking((0.3,), (0.0,), start_epoch=5, at_least_one=True)
    assert not _draw(late, 5, epoch=4).any()
    assert _draw(late, 5, epoch=5).any((1, 2)).all()


def test_oblong_and_tiny_grids() -> None:
    rng = np.random.default_rng(0)
    masking = Masking((0.4,), (0.0,))
    assert masking.sample(rng, (6, 11), 0).shape == (6, 11)
    for grid in ((1, 1), (1, 8), (2, 2), (3, 3)):
        for _ in range(50):
            assert masking.sample(rng, grid, 0).sum() <= 0.4 * grid[0] * grid[1]


def test_same_generator_same_mask() -> None:
    assert np.array_equal(_draw(Masking(), 20, seed=3), _draw(Masking(), 20, seed=3))
    assert not np.array_equal(_draw(Masking(), 20, seed=3), _draw(Masking(), 20, seed=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratios": (0.1,), "variances": (0.2,)}, "leaves the range"),
        ({"ratios": (0.9,), "variances": (0.2,)}, "leaves the range"),
        ({"ratios": (0.3,), "variances": (-0.1,)}, "leaves the range"),
        ({"ratios": (float("nan"),), "variances": (0.0,)}, "leaves the range"),
        ({"ratios": (0.1, 0.2), "variances": (0.0,)}, "2 mask ratios with 1 variances"),
        ({"ratios": (), "variances": ()}, "at least one"),
        ({"shape": "rand"}, "use block or random"),
        ({"start_epoch": -1}, "start at epoch -1"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Masking(**settings)


@pytest.mark.parametrize("multiple", [1, 8, 100])
def test_positions_against_a_loop(multiple: int) -> None:
    rng = np.random.default_rng(1)
    masks = rng.random((5, 4, 7)) < 0.3
    masks[2] = False
    losses = rng.random(masks.shape)
    masked = masked_positions(masks, multiple)
    assert (masked.index.dtype, masked.weight.dtype) == (torch.int64, torch.float32)
    assert masked.count == masks.sum()
    assert len(masked.index) == len(masked.weight)
    assert len(masked.index) % multiple == 0
    assert len(masked.index) - masked.count < multiple
    assert masked.index[: masked.count].tolist() == [
        (c * 4 + y) * 7 + x for c in range(5) for y in range(4) for x in range(7) if masks[c, y, x]
    ]
    expected = sum(losses[c][masks[c]].mean() for c in range(5) if masks[c].any()) / 5
    got = (losses.reshape(-1)[masked.index.numpy()] * masked.weight.numpy()).sum()
    assert got == pytest.approx(expected, rel=1e-6)
    assert not masked.index[masked.count :].any()
    assert not masked.weight[masked.count :].any()


def test_no_masked_token_leaves_a_list_of_padding() -> None:
    masked = masked_positions(np.zeros((3, 2, 2), bool), 4)
    assert (masked.count, masked.index.tolist(), masked.weight.tolist()) == (0, [0] * 4, [0.0] * 4)
