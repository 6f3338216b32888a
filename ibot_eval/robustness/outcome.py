"""From who was right at which damage to metrics: accuracy per level, and the area under what is retained of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ibot_eval.metrics.intervals import wilson
from ibot_eval.protocol import Metric

RESAMPLES = 1000
# Weights of (resamples x images) held at a time: 32 MB.
_WEIGHTS = 1 << 22


def level_metrics(
    params: Sequence[Mapping[str, Any]], correct: np.ndarray, loss: np.ndarray | None = None
) -> Iterator[Metric]:
    """``top1`` of each level, in percent.

    The interval is Wilson's over images for one repeat, or several in which the same images are right; else Student's
    over the repeats: mean +- t s / sqrt(R), which holds for these images and says how much the draws of the damage
    matter.

    Args:
        params: what distinguishes each of the L levels.
        correct: (R, n, L) bool, of R repeats and n images.
        loss: (R, n, L) shares of the image that were removed, 0 to 1. Their mean, in percent, is ``params["loss"]``.
    """
    n = correct.shape[1]
    for index, named in enumerate(params):
        shares = 100 * correct[:, :, index].mean(axis=1)
        # Clean images are the same in every repeat, whose spread says nothing then.
        if (correct[:, :, index] == correct[:1, :, index]).all():
            interval = wilson(int(correct[0, :, index].sum()), n)
        else:
            interval = student(shares)
        reached = {} if loss is None else {"loss": round(100 * float(loss[:, :, index].mean()), 2)}
        yield Metric("top1", float(shares.mean()), params={**named, **reached}, n=n, interval=interval)


def student(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of ``values`` (R,), R above 1, by Student's t with R - 1 degrees of freedom."""
    from scipy.stats import t

    mean, half = float(values.mean()), float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
    return mean - half, mean + half


def area_metric(positions: Sequence[float], correct: np.ndarray, params: Mapping[str, Any], seed: int = 0) -> Metric:
    """``area_under_curve`` of one kind of damage, with a bootstrap interval over images.

    Images are resampled with all their levels and repeats, so that the clean accuracy varies along.

    Args:
        positions: (L,) ascending; the first level is the clean image.
        correct: (R, n, L) bool.
        seed: of the resampling.
    """
    right = correct.mean(axis=0)
    n = len(right)
    whole = retained_area(positions, right.mean(axis=0))
    interval = None
    if whole is not None:
        generator = np.random.default_rng(seed)
        step = max(1, _WEIGHTS // n)
        rows = []
        for start in range(0, RESAMPLES, step):
            weights = generator.multinomial(n, np.full(n, 1 / n), size=min(step, RESAMPLES - start))
            rows.append(weights @ right / n)
        areas = [area for row in np.concatenate(rows) if (area := retained_area(positions, row)) is not None]
        low, high = np.percentile(areas, [2.5, 97.5])
        interval = float(low), float(high)
    return Metric("area_under_curve", whole, params=params, n=n, interval=interval)


def retained_area(positions: Sequence[float], accuracy: np.ndarray) -> float | None:
    """Mean share of the clean accuracy that is retained over the damage, in percent; None where that is 0.

    The area under accuracy / accuracy[0] by the trapezoidal rule, over positions scaled to 0 … 1: 100 where nothing is
    lost. An own measure; the papers show curves.

    Args:
        positions: (L,) ascending.
        accuracy: (L,), the first of the clean images.
    """
    if not accuracy[0] > 0:
        return None
    x = np.asarray(positions, np.float64)
    retained = accuracy / accuracy[0]
    return 100 * float(np.sum((retained[1:] + retained[:-1]) / 2 * np.diff(x)) / (x[-1] - x[0]))


def cell_positions(cells: Sequence[int]) -> list[float]:
    """Where grids of so many cells stand on the axis: log2, since each published grid has about twice as many."""
    return [math.log2(number) for number in cells]
