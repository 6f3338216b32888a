"""robustness.outcome and config: hand-computed areas and intervals, and settings that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t as student_t

from ibot_eval.errors import ConfigError
from ibot_eval.metrics.intervals import wilson
from ibot_eval.robustness.config import (
    DamageSettings,
    check_damage,
    check_levels,
    divides,
    on_patch_grid,
    parse_grids,
)
from ibot_eval.robustness.outcome import area_metric, cell_positions, level_metrics, retained_area


def test_the_area_by_hand():
    # 1 -> 1/2 -> 0 over unequal steps: (1 + 1/2) / 2 * 1/4 + (1/2 + 0) / 2 * 3/4
    assert retained_area([0, 25, 100], np.array([80.0, 40.0, 0.0])) == pytest.approx(100 * (0.1875 + 0.1875))
    assert retained_area([0, 50, 90], np.array([0.3, 0.3, 0.3])) == pytest.approx(100)
    assert retained_area([0, 90], np.array([0.0, 0.5])) is None


def test_the_area_does_not_depend_on_the_axis_units():
    accuracy = np.array([90.0, 70.0, 10.0])
    assert retained_area([0, 1, 9], accuracy) == pytest.approx(retained_area([0, 10, 90], accuracy / 100))
    assert retained_area(cell_positions([1, 4, 16]), accuracy) == pytest.approx(retained_area([0, 1, 2], accuracy))


def test_one_repeat_has_wilsons_interval():
    correct = np.array([[[1, 1], [1, 0], [1, 0], [0, 0]]], bool)
    clean, damaged = level_metrics([{"level": 0}, {"level": 50}], correct)
    assert (clean.value, damaged.value, clean.n) == (75.0, 25.0, 4)
    assert clean.interval == wilson(3, 4)
    assert damaged.params == {"level": 50}


def test_repeats_have_an_interval_of_their_mean():
    correct = np.zeros((3, 10, 1), bool)
    for repeat, right in enumerate((4, 5, 9)):
        correct[repeat, :right] = True
    (metric,) = level_metrics([{}], correct)
    assert metric.value == pytest.approx(60)
    expected = student_t.interval(0.95, 2, loc=60, scale=np.std([40, 50, 90], ddof=1) / 3**0.5)
    assert metric.interval == pytest.approx(expected)


def test_repeats_that_change_nothing_have_the_interval_over_images():
    correct = np.tile(np.array([True, True, False, True])[None, :, None], (3, 1, 1))
    (metric,) = level_metrics([{}], correct)
    assert (metric.value, metric.interval) == (75, wilson(3, 4))


def test_the_loss_reached_is_a_mean_in_percent():
    loss = np.array([[[0.0, 0.25], [0.0, 0.75]]])
    metrics = list(level_metrics([{"level": 0}, {"level": 40}], np.ones((1, 2, 2), bool), loss))
    assert [(m.name, m.value, m.params) for m in metrics] == [
        ("top1", 100.0, {"level": 0, "loss": 0.0}),
        ("top1", 100.0, {"level": 40, "loss": 50.0}),
    ]


def test_the_interval_of_the_area_is_that_of_a_plain_bootstrap():
    generator = np.random.default_rng(1)
    correct = generator.random((2, 200, 3)) < np.array([0.9, 0.6, 0.2])
    metric = area_metric([0, 1, 2], correct, {"kind": "random"}, seed=5)
    areas = []
    for _ in range(4000):
        drawn = correct[:, generator.integers(0, 200, 200)].mean((0, 1))
        areas.append(retained_area([0, 1, 2], drawn))
    assert metric.value == pytest.approx(retained_area([0, 1, 2], correct.mean((0, 1))))
    assert metric.interval == pytest.approx(np.percentile(areas, [2.5, 97.5]), abs=1)
    assert metric == area_metric([0, 1, 2], correct, {"kind": "random"}, seed=5)


def test_a_classifier_that_is_never_right_has_no_area():
    metric = area_metric([0, 1], np.zeros((1, 4, 2), bool), {})
    assert (metric.value, metric.interval) == (None, None)


def test_grids():
    assert parse_grids(["4x8", "1x1", "2X2"]) == [(1, 1), (2, 2), (4, 8)]
    assert divides((4, 8), 224)
    assert not divides((16, 16), 120)
    aligned = [grid for grid in ((1, 1), (2, 2), (4, 4), (8, 8), (14, 14), (16, 16)) if on_patch_grid(grid, 224, 16)]
    assert aligned == [(1, 1), (2, 2), (14, 14)], "cells of 56 and 28 pixels cut patches of 16"


@pytest.mark.parametrize("texts", [["4"], ["axb"], ["0x2"], ["2x2"], ["1x1"], ["1x1", "2x2", "2x2"]])
def test_grids_that_cannot_be(texts):
    with pytest.raises(ConfigError):
        parse_grids(texts)


@pytest.mark.parametrize("levels", [(), (0,), (10, 20), (0, 20, 10), (0, 0, 10), (0, 110)])
def test_levels_that_cannot_be(levels):
    with pytest.raises(ConfigError, match="levels"):
        check_levels(levels)


@pytest.mark.parametrize("changes", [{"k": 0}, {"temperature": 0.0}, {"repeats": 0}, {"sheet": -1}])
def test_settings_that_cannot_be(changes):
    check_damage(DamageSettings())
    with pytest.raises(ConfigError):
        check_damage(DamageSettings(**changes))
