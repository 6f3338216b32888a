"""Mixup and CutMix: timm's under the same seeds, what odd batches get, and the losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data import Mixup
from torch import Tensor
from torch.nn import functional as F

from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.mixing import Mixing

CLASSES = 5


def batch(n: int, side: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, side, side, generator=generator), torch.arange(n) % CLASSES


def smoothed(targets: Tensor, smoothing: float) -> Tensor:
    """(B, CLASSES) by the definition: the right class shares ``smoothing`` with all."""
    return (1 - smoothing) * F.one_hot(targets, CLASSES).float() + smoothing / CLASSES


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("settings", [{}, {"cutmix": 0.0}, {"mixup": 0.0}, {"probability": 0.5, "smoothing": 0.0}])
def test_equals_timm_under_the_same_seed(mode: Any, settings: dict[str, Any]) -> None:
    mixing = Mixing(CLASSES, mode=mode, **settings)
    reference = Mixup(
        mixup_alpha=mixing.mixup,
        cutmix_alpha=mixing.cutmix,
        prob=mixing.probability,
        switch_prob=0.5,
        mode=mode,
        label_smoothing=mixing.smoothing,
        num_classes=CLASSES,
    )
    changed = 0
    for step in range(6):
        images, targets = mixing(*batch(6), seed=3, step=step, rank=1)
        np.random.seed(int(np.random.SeedSequence((4, 3, 1, step)).generate_state(3)[1]))
        expected_images, expected_targets = reference(*batch(6))
        assert torch.equal(images, expected_images)
        assert torch.equal(targets, expected_targets)
        assert torch.allclose(targets.sum(1), torch.ones(6))
        changed += not torch.equal(images, batch(6)[0])
    assert changed >= 2


def test_mixup_by_its_definition() -> None:
    """Images and targets with the same weight, each with the one as far from the end as it is from the beginning."""
    images, targets = batch(4)
    mixed, soft = Mixing(CLASSES, cutmix=0)(images.clone(), targets, seed=0, step=2)
    difference = images - images.flip(0)
    weight = float(((mixed - images.flip(0)) * difference).sum() / difference.square().sum())
    assert 0 < weight < 1
    torch.testing.assert_close(mixed, weight * images + (1 - weight) * images.flip(0))
    plain = smoothed(targets, 0.1)
    torch.testing.assert_close(soft, weight * plain + (1 - weight) * plain.flip(0))


def test_cutmix_by_its_definition() -> None:
    """The weight of the targets is the area that was left."""
    images, targets = batch(4, side=16)
    for step in range(5):
        mixed, soft = Mixing(CLASSES, mixup=0)(images.clone(), targets, seed=0, step=step)
        kept = (mixed == images).all(1)
        assert torch.equal(mixed.permute(0, 2, 3, 1)[~kept], images.flip(0).permute(0, 2, 3, 1)[~kept])
        weight = float(kept[0].float().mean())
        plain = smoothed(targets, 0.1)
        torch.testing.assert_close(soft, weight * plain + (1 - weight) * plain.flip(0))


def test_draws_come_from_seed_rank_and_step_alone() -> None:
    mixing = Mixing(CLASSES)
    wanted = [mixing(*batch(4), seed=1, step=step)[0] for step in range(4)]
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    for step in (3, 1, 0, 2):
        assert torch.equal(Mixing(CLASSES)(*batch(4), seed=1, step=step)[0], wanted[step])
    assert (np.random.get_state()[1] == before).all()
    others = [mixing(*batch(4), seed=2, step=0)[0], mixing(*batch(4), seed=1, step=0, rank=1)[0]]
    assert not any(torch.equal(a, b) for i, a in enumerate([*wanted, *others]) for b in [*wanted, *others][:i])


def test_distribution_of_draws() -> None:
    """Half CutMix, and weights as often as the beta distributions have them."""
    mixing, images, targets = Mixing(CLASSES, smoothing=0), torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])
    images[0] = 1
    cut, weights = 0, []
    for step in range(800):
        mixed, soft = mixing(images.clone(), targets, seed=0, step=step)
        values = torch.unique(mixed[0])
        if set(values.tolist()) <= {0.0, 1.0}:
            cut += 1
        else:
            weights.append(float(soft[0, 0]))
    assert stats.binomtest(cut, 800).pvalue > 1e-3
    test: Any = stats.kstest(weights, stats.beta(0.8, 0.8).cdf)
    assert test.pvalue > 1e-3


@pytest.mark.parametrize("n", [3, 7])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_the_last_of_an_odd_batch_is_only_smoothed(n: int, mode: Any) -> None:
    images, targets = batch(n)
    mixing = Mixing(CLASSES, mode=mode)
    mixed, soft = mixing(images.clone(), targets, seed=0, step=5)
    assert mixed.shape == images.shape
    assert torch.equal(mixed[-1], images[-1])
    torch.testing.assert_close(soft[-1], smoothed(targets, 0.1)[-1])
    rest, rest_soft = mixing(images[:-1].clone(), targets[:-1], seed=0, step=5)
    assert torch.equal(mixed[:-1], rest)
    assert torch.equal(soft[:-1], rest_soft)


def test_batch_of_one() -> None:
    images, targets = batch(1)
    mixed, soft = Mixing(CLASSES)(images.clone(), targets, seed=0, step=0)
    assert torch.equal(mixed, images)
    torch.testing.assert_close(soft, smoothed(targets, 0.1))
    assert Mixing(CLASSES).loss(torch.zeros(1, CLASSES), soft).item() == pytest.approx(np.log(CLASSES))


@pytest.mark.parametrize("settings", [{"mixup": 0.0, "cutmix": 0.0}, {"probability": 0.0}])
def test_nothing_to_mix(settings: dict[str, Any]) -> None:
    mixing = Mixing(CLASSES, **settings)
    images, targets = batch(4)
    mixed, same = mixing(images, targets, seed=0, step=0)
    assert mixed is images
    assert same is targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixup", [0.0, 0.8])
def test_losses(smoothing: float, mixup: float) -> None:
    """torch's cross entropy, which takes probabilities and smoothing as well."""
    mixing = Mixing(CLASSES, mixup=mixup, cutmix=0, smoothing=smoothing)
    images, targets = batch(6)
    logits = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0))
    _, given = mixing(images, targets, seed=0, step=0)
    expected = F.cross_entropy(logits, given) if mixup else F.cross_entropy(logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(mixing.loss(logits, given), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixup": -1.0}, "mixup -1"),
        ({"cutmix": float("inf")}, "cutmix inf"),
        ({"smoothing": 1.0}, "label smoothing 1"),
        ({"probability": 1.1}, "probability of mixing 1.1"),
        ({"switch": -0.1}, "switching -0.1"),
    ],
)
def test_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixing(CLASSES, **settings)
