"""Average precision of detections as COCO defines it, with weights on the images.

The matching of detections with objects is pycocotools' (``COCOeval.evaluate``); what follows from the matches is
computed here, since a bootstrap over images needs it a thousand times, and pycocotools' own accumulation takes a minute
each on COCO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""IoU from which on a detection may be matched with an object."""
RECALLS = np.linspace(0, 1, 101)
"""Where the curve of precision against recall is read."""
SIZES = ("all", "small", "medium", "large")
"""Ranges of object area in COCOeval's order: all, below 32², from there to 96², and above."""

Summary = dict[str, float]
"""``ap``, ``ap50``, ``ap75`` of objects of all sizes, and ``small``, ``medium``, ``large``: AP in percent, NaN where no
class has an object of that size."""


@dataclass(frozen=True)
class Matches:
    """How the detections of one class fare against its objects of one range of sizes, best scores first."""

    images: np.ndarray
    """(d,) int64, index of each detection's image."""
    hits: np.ndarray
    """(T, d) bool: matched with an object that counts, at each of the T thresholds."""
    misses: np.ndarray
    """(T, d) bool: matched with nothing. What matched a crowd or an object of another size is neither."""
    objects: np.ndarray
    """(n,) int64, objects of each image that count."""

    @cached_property
    def places(self) -> _Places:
        """Where a curve can rise, which is all that a resample needs to look at."""
        ignored = ~(self.hits | self.misses)
        rises, odd = np.flatnonzero(self.hits.any(axis=0)), np.flatnonzero(ignored.any(axis=0))
        before = np.searchsorted(odd, rises, side="right")
        return _Places(rises, self.hits[:, rises], odd, ignored[:, odd], before)


class _Places(NamedTuple):
    rises: np.ndarray
    """(r,) indices of the detections that hit at some threshold."""
    hits: np.ndarray
    """(T, r) of these."""
    odd: np.ndarray
    """(o,) indices of the detections that do not count at some threshold."""
    ignored: np.ndarray
    """(T, o): of these, at which."""
    before: np.ndarray
    """(r,) how many of the odd ones come before each rise."""


Table = Sequence[Sequence[Matches]]
"""By class, then by size in the order of ``SIZES``."""


def matches_of(evaluated: Sequence[Mapping[str, Any] | None], classes: int, images: int) -> list[list[Matches]]:
    """What ``COCOeval.evalImgs`` says, class by class.

    Args:
        evaluated: one entry per class, size and image, the last index moving fastest; None where neither has any.
        classes: number of classes.
        images: number of images, n.

    Returns:
        (classes) lists of matches for each of ``SIZES``.

    Raises:
        ValueError: another number of entries.
    """
    if len(evaluated) != classes * len(SIZES) * images:
        raise ValueError(f"{len(evaluated)} entries are not {classes} classes x {len(SIZES)} sizes x {images} images")
    entries = iter(evaluated)
    return [[_one([next(entries) for _ in range(images)]) for _ in SIZES] for _ in range(classes)]


def _one(entries: Sequence[Mapping[str, Any] | None]) -> Matches:
    found = [(index, entry) for index, entry in enumerate(entries) if entry is not None]
    objects = np.zeros(len(entries), dtype=np.int64)
    for index, entry in found:
        objects[index] = np.count_nonzero(np.asarray(entry["gtIgnore"]) == 0)
    scores = np.concatenate([np.asarray(e["dtScores"], dtype=float) for _, e in found] or [np.zeros(0)])
    order = np.argsort(-scores, kind="stable")
    where = np.concatenate([np.full(len(e["dtScores"]), i) for i, e in found] or [np.zeros(0, np.int64)])[order]
    empty = [np.zeros((len(THRESHOLDS), 0), dtype=bool)]
    matched = np.concatenate([e["dtMatches"] != 0 for _, e in found] or empty, axis=1)[:, order]
    ignored = np.concatenate([np.asarray(e["dtIgnore"], bool) for _, e in found] or empty, axis=1)[:, order]
    hits, misses = matched & ~ignored, ~matched & ~ignored
    counted = (hits | misses).any(axis=0)
    return Matches(where[counted].astype(np.int64), hits[:, counted], misses[:, counted], objects)


def class_precision(matches: Matches, weights: np.ndarray | None = None) -> np.ndarray:
    """AP of one class at each threshold, in percent.

    Precision is made monotone from the right and averaged over 101 recalls (COCO, as COCOeval.accumulate).

    Args:
        matches: of one class and size.
        weights: (n,) how often each image counts, as if it were there so many times. Default: once.

    Returns:
        (T,) float64, NaN where there are no objects, 0 where there are no detections.
    """
    weights = np.ones(len(matches.objects), dtype=np.int64) if weights is None else weights
    total = int(weights @ matches.objects)
    if not total:
        return np.full(len(THRESHOLDS), np.nan)
    rises, at_rises, odd, ignored, before = matches.places
    last = len(rises) - 1
    if last < 0:
        return np.zeros(len(THRESHOLDS))
    weight = weights[matches.images]
    hits = np.cumsum(at_rises * weight[rises], axis=1)
    left_out = np.cumsum(np.insert(ignored * weight[odd], 0, 0, axis=1), axis=1)[:, before]
    counted = np.cumsum(weight)[rises] - left_out
    # Between two hits precision only falls, so its envelope and the places of all recalls are known from the hits.
    precision = hits / (counted + np.spacing(1))
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    recall = hits / total
    values = np.empty(len(THRESHOLDS))
    for index in range(len(THRESHOLDS)):
        places = np.searchsorted(recall[index], RECALLS, side="left")
        values[index] = 100 * np.where(places <= last, envelope[index, np.minimum(places, last)], 0).mean()
    return values


def precision_table(table: Table, weights: np.ndarray | None = None) -> np.ndarray:
    """(classes, sizes, T) AP in percent, NaN where a class has no objects of a size; arguments as above."""
    return np.array([[class_precision(matches, weights) for matches in sizes] for sizes in table])


def summary(values: np.ndarray) -> Summary:
    """The means over the classes that have objects.

    Args:
        values: of :func:`precision_table`.
    """
    return {
        "ap": _mean(values[:, 0]),
        "ap50": _mean(values[:, 0, 0]),
        "ap75": _mean(values[:, 0, 5]),
        **{size: _mean(values[:, index]) for index, size in enumerate(SIZES) if index},
    }


def _mean(values: np.ndarray) -> float:
    kept = values[~np.isnan(values)]
    return float(kept.mean()) if len(kept) else float("nan")


@dataclass(frozen=True)
class Intervals:
    """Percentile intervals; None where no resample has such objects."""

    of_summary: dict[str, tuple[float, float] | None]
    of_class: list[tuple[float, float] | None]
    """Of each class's AP at all sizes."""


def bootstrap(table: Table, resamples: int = 1000, *, seed: int = 0, level: float = 0.95) -> Intervals:
    """Intervals of AP from drawing as many images as there are, with replacement (Efron 1979).

    Classes of which a resample has no object are left out of its means.

    Args:
        table: of :func:`matches_of`.
        resamples: number of draws; at least 1.
        level: 0 to 1.

    Raises:
        ValueError: no classes or images, or no resamples.
    """
    if not table or not len(table[0][0].objects) or resamples < 1:
        raise ValueError("a bootstrap needs classes, images and resamples")
    n = len(table[0][0].objects)
    generator = np.random.default_rng(seed)
    summaries, classes = [], []
    for _ in range(resamples):
        values = precision_table(table, np.bincount(generator.integers(n, size=n), minlength=n))
        summaries.append(summary(values))
        classes.append(values[:, 0].mean(axis=1))
    drawn = {name: np.array([s[name] for s in summaries]) for name in summaries[0]}
    return Intervals(
        {name: _percentiles(values, level) for name, values in drawn.items()},
        [_percentiles(values, level) for values in np.array(classes).T],
    )


def _percentiles(values: np.ndarray, level: float) -> tuple[float, float] | None:
    kept = values[~np.isnan(values)]
    if not len(kept):
        return None
    tail = 50 * (1 - level)
    low, high = np.percentile(kept, [tail, 100 - tail])
    return float(low), float(high)
