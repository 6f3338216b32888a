"""Values by step and epoch, above all where warm-ups meet masks that start late or the end of the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pretrain.schedule import Schedule, schedule
from tests.pretraining import tiny

TEMPERATURES = {"teacher_temp_start": 0.04, "teacher_temp": 0.07, "teacher_temp_warmup": 30, "lr_warmup": 0}


def planned(**flags: Any) -> Schedule:
    return schedule(tiny(**TEMPERATURES | flags), steps_per_epoch=2, images_per_step=256)


def ramp(epochs: int, warmup: int, start: int = 0, low: float = 0.04, high: float = 0.07) -> list[float]:
    """Epoch by epoch."""
    steps = max(warmup - 1, 1)
    rising = [low + (high - low) * i / steps for i in range(warmup)]
    return [low] * start + rising + [high] * (epochs - start - warmup)


def test_temperatures_rise_together() -> None:
    plan = planned(epochs=100)
    np.testing.assert_allclose(plan.teacher_temp, ramp(100, 30), rtol=1e-12)
    np.testing.assert_array_equal(plan.patch_teacher_temp, plan.teacher_temp)
    assert plan.notices == ()
    assert plan.temperatures(2 * 99 + 1) == (0.07, 0.07)


def test_the_patches_temperature_waits_for_the_first_masks() -> None:
    plan = planned(epochs=100, mask_start_epoch=50)
    np.testing.assert_allclose(plan.teacher_temp, ramp(100, 30), rtol=1e-12)
    np.testing.assert_allclose(plan.patch_teacher_temp, ramp(100, 30, start=50), rtol=1e-12)
    assert plan.notices == ()
    # Both of them with values of their own.
    own = planned(epochs=100, mask_start_epoch=50, patch_teacher_temp_start=0.01, patch_teacher_temp=0.05)
    np.testing.assert_allclose(own.patch_teacher_temp, ramp(100, 30, 50, 0.01, 0.05), rtol=1e-12)
    np.testing.assert_array_equal(own.teacher_temp, plan.teacher_temp)


@pytest.mark.parametrize(("start", "left"), [(71, 10), (90, 10), (95, 5), (99, 1)])
def test_a_warmup_that_would_outlast_the_run_is_shortened(start: int, left: int) -> None:
    plan = planned(epochs=100, mask_start_epoch=start)
    np.testing.assert_allclose(plan.teacher_temp, ramp(100, 30), rtol=1e-12)
    np.testing.assert_allclose(plan.patch_teacher_temp, ramp(100, left, start), rtol=1e-12)
    (notice,) = plan.notices
    assert f"patch temperature is {left} epoch" in notice
    assert f"100 epochs, masks from epoch {start}, too few for 30" in notice


@pytest.mark.parametrize("start", [100, 130])
def test_masks_that_never_start(start: int) -> None:
    plan = planned(epochs=100, mask_start_epoch=start)
    assert plan.patch_teacher_temp.tolist() == [0.04] * 100
    np.testing.assert_allclose(plan.teacher_temp, ramp(100, 30), rtol=1e-12)


def test_short_runs() -> None:
    plan = planned(epochs=20, lr_warmup=25)
    np.testing.assert_allclose(plan.teacher_temp, ramp(20, 2), rtol=1e-12)
    assert plan.lr_warmup == plan.temp_warmup == 2
    assert len(plan.notices) == 2, "one for both temperatures"
    assert "learning rate is 2 epochs long: the run has 20 epochs, too few for 25" in plan.notices[0]
    assert "left out" in planned(epochs=5).notices[0]
