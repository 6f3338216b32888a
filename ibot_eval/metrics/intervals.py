"""Confidence intervals of proportions."""

from __future__ import annotations


def wilson(correct: int, n: int, level: float = 0.95) -> tuple[float, float] | None:
    """Wilson's score interval of the proportion ``correct / n``, in percent; None for n = 0.

    Wilson (1927), computed by ``scipy.stats.binomtest``. Unlike the normal approximation it stays within 0 and 100
    and has a width at 0 and n correct.

    Raises:
        ValueError: correct outside of 0 … n, or level outside of 0 … 1.
    """
    if n == 0 and correct == 0:
        return None
    from scipy.stats import binomtest

    interval = binomtest(int(correct), int(n)).proportion_ci(confidence_level=level, method="wilson")
    return 100 * float(interval.low), 100 * float(interval.high)
