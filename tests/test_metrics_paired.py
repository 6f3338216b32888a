"""Paired differences, against a naive bootstrap, scipy and McNemar's test written out."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from scipy.stats import bootstrap

from ibot_eval.metrics.paired import paired_difference


def outcomes(both: int, only_a: int, only_b: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Right and wrong of A and of B, in an order that has nothing to do with them."""
    a = np.repeat([True, True, False, False], [both, only_a, only_b, neither])
    b = np.repeat([True, False, True, False], [both, only_a, only_b, neither])
    order = np.random.default_rng(0).permutation(len(a))
    return a[order], b[order]


def test_difference_is_that_of_the_accuracies_b_minus_a() -> None:
    a, b = outcomes(50, 4, 11, 35)
    result = paired_difference(a, b)
    assert result.difference == pytest.approx(100 * (b.mean() - a.mean())) == pytest.approx(7)
    assert (result.only_a, result.only_b, result.n) == (4, 11, 100)
    assert result.interval[0] < 7 < result.interval[1]


@pytest.mark.parametrize(("only_a", "only_b"), [(4, 11), (0, 5), (30, 30), (1, 0), (0, 0)])
def test_p_is_exact(only_a: int, only_b: int) -> None:
    # Two-sided at probability 1/2: twice the smaller tail, in exact fractions.
    n, few = only_a + only_b, min(only_a, only_b)
    tail = sum(Fraction(comb(n, i), 2**n) for i in range(few + 1))
    result = paired_difference(*outcomes(20, only_a, only_b, 20))
    assert result.mcnemar_p == pytest.approx(float(min(1, 2 * tail)))


@pytest.mark.parametrize("cells", [(150, 12, 25, 13), (3, 10, 2, 5), (400, 0, 6, 94)])
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_interval_is_the_percentile_bootstrap(cells: tuple[int, int, int, int], level: float) -> None:
    a, b = outcomes(*cells)
    gain = 100 * (b.astype(float) - a)
    generator = np.random.default_rng(1)
    naive = [gain[generator.integers(0, len(gain), len(gain))].mean() for _ in range(10_000)]
    tail = 50 * (1 - level)
    reference = bootstrap(
        (gain,), np.mean, confidence_level=level, method="percentile", n_resamples=10_000, batch=1000, rng=generator
    ).confidence_interval
    found = paired_difference(a, b, level=level).interval
    # One image moves a mean by 100 / n, and so much may a bound of 10,000 draws lie aside.
    tolerance = max(0.03 * float(np.std(gain)), 100 / len(gain))
    assert found == pytest.approx(np.percentile(naive, [tail, 100 - tail]), abs=tolerance)
    assert found == pytest.approx((reference.low, reference.high), abs=tolerance)


def test_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    kinds = np.array([0.6, 0.08, 0.14, 0.18])
    covered = 0
    for _ in range(300):
        low, high = paired_difference(*outcomes(*generator.multinomial(500, kinds)), resamples=1000).interval
        covered += low <= 100 * (kinds[2] - kinds[1]) <= high
    # 95 % of 300, give or take three standard deviations.
    assert 274 <= covered <= 296


def test_only_the_pairing_counts() -> None:
    # The same accuracies, told apart only by how often the two differ.
    close, far = paired_difference(*outcomes(80, 0, 10, 10)), paired_difference(*outcomes(50, 30, 40, 0)[:2])
    assert close.difference == pytest.approx(10)
    assert far.difference == pytest.approx(100 * 10 / 120)
    assert close.mcnemar_p < 0.01 < 0.2 < far.mcnemar_p
    assert close.interval[1] - close.interval[0] < far.interval[1] - far.interval[0]


def test_seeded() -> None:
    a, b = outcomes(150, 12, 25, 13)
    assert paired_difference(a, b) == paired_difference(a, b)
    assert len({paired_difference(a, b, seed=seed, resamples=200).interval for seed in range(10)}) > 1


def test_without_any_difference() -> None:
    a, _ = outcomes(3, 0, 0, 2)
    result = paired_difference(a, a)
    assert (result.difference, result.interval, result.mcnemar_p) == (0, (0, 0), 1)
    one = paired_difference(np.array([False]), np.array([True]))
    assert (one.difference, one.interval, one.mcnemar_p) == (100, (100, 100), 1)


def test_swapping_the_two_turns_the_signs() -> None:
    a, b = outcomes(150, 12, 25, 13)
    one, two = paired_difference(a, b), paired_difference(b, a)
    assert one.difference == -two.difference
    assert one.mcnemar_p == two.mcnemar_p
    assert one.interval == pytest.approx((-two.interval[1], -two.interval[0]), abs=0.5)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (np.zeros(0, bool), np.zeros(0, bool), "no samples"),
        (np.zeros(3, bool), np.zeros(4, bool), "not the same samples"),
        (np.zeros((3, 1), bool), np.zeros((3, 1), bool), "not the same samples"),
        (np.zeros(3, int), np.zeros(3, bool), "int64"),
    ],
)
def test_what_cannot_be_paired(a: np.ndarray, b: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_difference(a, b)
