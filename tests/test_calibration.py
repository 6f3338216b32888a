"""Calibration measures against hand-computed cases and a plain second loop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ibot_eval.metrics.calibration import aurra, rms_calibration_error


def samples(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0, 1, n)
    return confidence, rng.uniform(0, 1, n) < confidence**2


@pytest.mark.parametrize("n", [200, 250, 1234])
@pytest.mark.parametrize("all_bins", [False, True])
def test_rms_equals_a_plain_loop(n: int, all_bins: bool) -> None:
    confidence, correct = samples(n)
    ranked = sorted(zip(confidence.tolist(), correct.tolist(), strict=True))
    total, bins = 0.0, n // 100
    for index in range(bins if all_bins else bins - 1):
        part = ranked[100 * index :] if index == bins - 1 else ranked[100 * index : 100 * index + 100]
        gap = sum(c for c, _ in part) / len(part) - sum(r for _, r in part) / len(part)
        total += len(part) / n * gap * gap
    assert rms_calibration_error(confidence, correct, all_bins=all_bins) == pytest.approx(100 * math.sqrt(total))


def test_rms_by_hand() -> None:
    confidence, correct = np.array([0.9, 0.1, 0.2, 0.8]), np.array([True, False, True, True])
    # Bins (0.1, 0.2) and (0.8, 0.9): gaps 0.15 - 0.5 and 0.85 - 1, half of the samples each.
    assert rms_calibration_error(confidence, correct, bin_size=2) == pytest.approx(100 * math.sqrt(0.35**2 / 2))
    both = rms_calibration_error(confidence, correct, bin_size=2, all_bins=True)
    assert both == pytest.approx(100 * math.sqrt((0.35**2 + 0.15**2) / 2))


def test_too_few_samples_have_no_calibration_error() -> None:
    assert rms_calibration_error(*samples(199)) is None
    assert rms_calibration_error(*samples(199), all_bins=True) is not None
    assert rms_calibration_error(*samples(0), all_bins=True) is None


def test_aurra_by_hand() -> None:
    confidence, correct = np.array([0.2, 0.9, 0.5]), np.array([True, True, False])
    # Most confident first: right, wrong, right.
    assert aurra(confidence, correct) == pytest.approx(100 * (1 + 1 / 2 + 2 / 3) / 3)
    assert aurra(np.zeros(0), np.zeros(0, bool)) is None


def test_aurra_is_the_mean_accuracy_over_response_rates() -> None:
    confidence, correct = samples(300)
    ranked = [right for _, right in sorted(zip(-confidence, correct, strict=True))]
    assert aurra(confidence, correct) == pytest.approx(100 * np.mean([np.mean(ranked[:m]) for m in range(1, 301)]))


def test_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        aurra(np.zeros(3), np.zeros(2, bool))
