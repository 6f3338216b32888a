"""Differences between two classifiers that saw the same samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Paired:
    """How B differs from A on n samples that both classified."""

    difference: float
    """Accuracy of B minus accuracy of A, in percentage points."""
    interval: tuple[float, float]
    """95 % interval of the difference, in percentage points."""
    mcnemar_p: float
    """How likely samples on which only one is right would be divided at least as unevenly if A and B were as good."""
    only_a: int
    """Samples on which A is right and B is wrong."""
    only_b: int
    """Samples on which B is right and A is wrong."""
    n: int


def paired_difference(
    right_a: np.ndarray, right_b: np.ndarray, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Paired:
    """The difference in accuracy of two classifiers, B minus A, with its interval and its significance.

    The interval is the percentile bootstrap over samples (Efron 1979). A resample of pairs counts only through how
    many pairs of each kind it holds, and those counts are multinomial, so the counts are drawn, not the samples. Where
    the two never differ it has no width. The p-value is that of McNemar's test in its exact form: given that only one
    of the two is right, each is it with probability 1/2; two-sided binomial test, 1 where there is no such sample.

    Args:
        right_a, right_b: (n,) bool, whether each sample was classified rightly; the same samples in the same order.
        level: of the interval, 0 to 1.

    Raises:
        ValueError: no samples, or arrays that are not bool or not of one length.
    """
    if right_a.dtype != bool or right_b.dtype != bool:
        raise ValueError(f"right and wrong are given as bool, not {right_a.dtype} and {right_b.dtype}")
    if right_a.ndim != 1 or right_a.shape != right_b.shape:
        raise ValueError(f"not the same samples: shapes {right_a.shape} and {right_b.shape}")
    if not len(right_a):
        raise ValueError("no samples to compare")
    from scipy.stats import binomtest

    n = len(right_a)
    only_a, only_b = int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum())
    kinds = np.array([only_a, only_b, n - only_a - only_b]) / n
    drawn = np.random.default_rng(seed).multinomial(n, kinds, size=resamples)
    tail = 50 * (1 - level)
    low, high = np.percentile(100 * (drawn[:, 1] - drawn[:, 0]) / n, [tail, 100 - tail])
    p = binomtest(only_b, only_a + only_b).pvalue if only_a + only_b else 1.0
    return Paired(100 * (only_b - only_a) / n, (float(low), float(high)), float(p), only_a, only_b, n)
