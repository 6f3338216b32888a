"""Learning rates and steps of fine-tuning, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.config import FinetuneConfig, check
from ibot_eval.finetuning.plan import make_plan


def test_published_vit_small_on_imagenet():
    """1,281,167 images by 8 processes of 128: the numbers of BEiT's scheduler at its default rate."""
    plan = make_plan(FinetuneConfig(epochs=200, lr=4e-3), 1_281_167, 8)
    assert (plan.steps_per_epoch, plan.images_per_step, plan.steps) == (1251, 1024, 250_200)
    assert plan.notices == ()
    warmup = 20 * 1251
    assert plan.lr[0] == 0
    assert plan.lr[1] == pytest.approx(4e-3 / (warmup - 1))
    assert plan.lr[warmup - 1] == plan.lr[warmup] == plan.top_lr == 4e-3
    middle = warmup + (250_200 - warmup) // 2
    assert plan.lr[middle] == pytest.approx((4e-3 + 1e-6) / 2)
    angle = math.pi * (250_199 - warmup) / (250_200 - warmup)
    assert plan.lr[-1] == pytest.approx(1e-6 + (4e-3 - 1e-6) / 2 * (1 + math.cos(angle)))


@pytest.mark.parametrize(
    ("changes", "world", "top"),
    [
        ({}, 1, 1e-3 * 128 / 1024),
        ({"accumulate": 2}, 4, 1e-3),
        ({"scale_lr": False}, 1, 1e-3),
        # The split is smaller than a step.
        ({"train_batch": 10_000}, 1, 1e-3 * 5000 / 1024),
    ],
)
def test_the_rate_goes_with_the_images_of_a_step(changes: dict[str, Any], world: int, top: float):
    assert make_plan(FinetuneConfig(**changes), 5000, world).top_lr == pytest.approx(top)


@pytest.mark.parametrize(
    ("changes", "images", "said"),
    [
        ({"epochs": 10}, 1280, r"the warm-up is 20 of 100 steps: the run has 10 epochs, too few for 20 of warm-up"),
        ({"epochs": 1}, 1280, r"the warm-up is 2 of 10 steps: the run has 1 epoch, too few for 20 of warm-up"),
        ({"epochs": 20}, 1280, r"the warm-up is 40 of 200 steps"),
        ({"train_batch": 40, "accumulate": 2}, 100, r"20 of 100 train images, others each time, sit every epoch out"),
        ({}, 50, r"steps are of 50 images, not of 128: train has no more than 50"),
        (
            {"lr": 1e-5, "min_lr": 1e-5},
            1280,
            r"the learning rate rises, from 1.25e-06 after the warm-up to --min-lr 1e-05 at the end",
        ),
    ],
)
def test_what_is_not_as_asked_is_told(changes: dict[str, Any], images: int, said: str):
    (notice,) = make_plan(FinetuneConfig(**changes), images).notices
    assert notice.startswith(said)


def test_a_run_of_one_step():
    plan = make_plan(FinetuneConfig(epochs=1, warmup_epochs=5, scale_lr=False), 8)
    assert plan.lr.tolist() == [1e-3]


def test_fewer_images_than_passes():
    with pytest.raises(ConfigError, match="3 images, fewer than the 4 forward passes"):
        make_plan(FinetuneConfig(accumulate=4), 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 0}, "--epochs 0: it is 1 or above"),
        ({"train_batch": 0}, "--train-batch 0"),
        ({"accumulate": -1}, "--accumulate -1"),
        ({"lr": 0.0}, "--lr 0.0: it must be above 0"),
        ({"lr": math.inf}, "--lr inf"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1"),
        ({"layer_decay": 0.0}, "--layer-decay 0.0: it is above 0, and at most 1"),
        ({"layer_decay": 1.1}, "--layer-decay 1.1"),
        ({"drop_path": 1.0}, "--drop-path 1.0"),
        ({"smoothing": 1.0}, "--smoothing 1.0"),
        ({"ema": math.nan}, "--ema nan"),
        ({"erasing": 1.5}, "--erasing 1.5"),
        ({"crop_scale": (0.0, 1.0)}, "--crop-scale 0.0"),
        ({"crop_scale": (0.9, 0.5)}, "--crop-scale 0.9 0.5: the first is the smaller"),
        ({"hold_out": 1.0}, "--hold-out 1.0"),
        ({"save_minutes": math.nan}, "--save-minutes nan"),
        ({"keep": 0}, "--keep 0"),
        ({"keep_head": True}, "--keep-head goes on with a trained classifier"),
        ({"fsdp": True, "ema": 0.9}, "--ema keeps a whole copy"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        check(FinetuneConfig(**changes))
    assert caught.value.what.startswith(said)


def test_settings_at_their_limits():
    check(FinetuneConfig())
    check(FinetuneConfig(weight_decay=0.0, layer_decay=1.0, warmup_epochs=0, mixup=0, cutmix=0, crop_scale=(1.0, 1.0)))
