"""Mean IoU and pixel accuracies of segmentations, from pixels counted by image and class."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

INTERSECTION, PREDICTED, LABELLED = range(3)
"""What the three rows of an image's counts hold."""


def count_pixels(predicted: np.ndarray, label: np.ndarray, classes: int, ignore: int) -> np.ndarray:
    """Pixels of one image by class: predicted rightly, predicted, and labelled so.

    Pixels labelled ``ignore`` count nowhere, whatever is predicted there.

    Args:
        predicted: (H, W) integers, 0 … classes - 1.
        label: (H, W) integers, 0 … classes - 1 or ``ignore``.

    Returns:
        (3, classes) int64; rows are ``INTERSECTION``, ``PREDICTED`` and ``LABELLED``.

    Raises:
        ValueError: another shape, or another class.
    """
    if predicted.shape != label.shape:
        raise ValueError(f"predicted {predicted.shape} and labelled {label.shape} pixels are not of one image")
    counted = label != ignore
    predicted, label = predicted[counted].astype(np.int64), label[counted].astype(np.int64)
    for values in (predicted, label):
        if len(values) and not 0 <= values.min() <= values.max() < classes:
            raise ValueError(f"classes {values.min()} to {values.max()} where there are {classes}")
    rows = (predicted[predicted == label], predicted, label)
    return np.stack([np.bincount(values, minlength=classes) for values in rows])


@dataclass(frozen=True)
class Regions:
    """Scores in percent. A class that is neither labelled nor predicted has none and leaves the means as they are."""

    iou: np.ndarray
    """(…, C): intersection over union; NaN where there is no union."""
    accuracy: np.ndarray
    """(…, C): share of the class's pixels that are predicted so; NaN where it has none."""
    miou: np.ndarray
    """(…): mean of the IoUs."""
    macc: np.ndarray
    """(…): mean of the classes' accuracies."""
    aacc: np.ndarray
    """(…): share of all pixels that are right."""


def region_scores(counts: np.ndarray) -> Regions:
    """Scores of counts that are already summed over images, as the PASCAL VOC and ADE20K benchmarks take them.

    Args:
        counts: (…, 3, C), as of :func:`count_pixels`.

    Returns:
        float64 arrays; NaN for all means where no pixel has a label.
    """
    counts = np.asarray(counts, dtype=np.float64)
    right, predicted, labelled = (counts[..., row, :] for row in (INTERSECTION, PREDICTED, LABELLED))
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        # numpy warns of means over nothing, which are the NaN that is promised.
        warnings.simplefilter("ignore", RuntimeWarning)
        iou = 100 * right / (predicted + labelled - right)
        accuracy = 100 * right / labelled
        return Regions(
            iou=iou,
            accuracy=accuracy,
            miou=np.nanmean(iou, axis=-1),
            macc=np.nanmean(accuracy, axis=-1),
            aacc=100 * right.sum(-1) / labelled.sum(-1),
        )


def region_intervals(
    counts: np.ndarray, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> dict[str, Any]:
    """Percentile bootstrap over images (Efron 1979) of all scores of a data set.

    A resample counts only through how often it holds each image, so counts are weighted, not gathered. A class that a
    resample lacks is left out of its means, and of the class's own interval.

    Args:
        counts: (n, 3, C) integers, by image.
        resamples: how many; one matrix product of (resamples, n) with (n, 3 C) does them in chunks.
        level: of the intervals, 0 to 1.

    Returns:
        ``miou``, ``macc`` and ``aacc``: (low, high) in percent; ``iou`` and ``accuracy``: (2, C), NaN for classes
        that never occur.

    Raises:
        ValueError: no images or resamples.
    """
    n, rows, classes = counts.shape
    if not n or resamples < 1:
        raise ValueError(f"{resamples} resamples of {n} images")
    generator = np.random.default_rng(seed)
    flat = counts.reshape(n, rows * classes).astype(np.float64)
    drawn = []
    for start in range(0, resamples, 100):
        times = generator.multinomial(n, np.full(n, 1 / n), size=min(100, resamples - start))
        drawn.append(region_scores((times @ flat).reshape(-1, rows, classes)))
    tail = 50 * (1 - level)
    names = ("miou", "macc", "aacc", "iou", "accuracy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return {
            name: np.nanpercentile(np.concatenate([getattr(part, name) for part in drawn]), [tail, 100 - tail], axis=0)
            for name in names
        }
