"""How well a classifier's confidence tells when it is right."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

BIN_SIZE = 100


def rms_calibration_error(
    confidence: np.ndarray, correct: np.ndarray, *, bin_size: int = BIN_SIZE, all_bins: bool = False
) -> float | None:
    """Root mean square difference between confidence and accuracy, in percent.

    Samples are sorted by confidence and cut into bins of equal number, the last one taking the remainder; the square of
    each bin's |mean confidence - accuracy| is weighted by its share of the samples (Hendrycks et al. 2021, ImageNet-A).
    The published code leaves the last bin, that of the most confident samples, out of the sum while still dividing by
    all samples: that is the default here, so that numbers compare with published ones.

    Args:
        confidence: (n,) probability of the predicted class, 0 to 1.
        correct: (n,) bool.
        bin_size: samples per bin.
        all_bins: whether the last bin counts as well.

    Returns:
        None where no bin is left: below two bins (one with ``all_bins``).

    Raises:
        ValueError: arrays of different lengths, or a bin size below 1.
    """
    confidence, correct = _checked(confidence, correct)
    if bin_size < 1:
        raise ValueError(f"a bin of {bin_size} samples")
    bins = len(confidence) // bin_size
    used = bins if all_bins else bins - 1
    if used < 1:
        return None
    order = np.argsort(confidence, kind="stable")
    edges = [*(bin_size * np.arange(bins)), len(confidence)]
    parts = [order[start:stop] for start, stop in pairwise(edges[: used + 1])]
    squares = [len(part) * (confidence[part].mean() - correct[part].mean()) ** 2 for part in parts]
    return 100 * float(np.sqrt(sum(squares) / len(confidence)))


def aurra(confidence: np.ndarray, correct: np.ndarray) -> float | None:
    """Area under the response-rate accuracy curve, in percent; None for no samples.

    The mean, over m = 1 … n, of the accuracy on the m most confident samples (Hendrycks et al. 2021, ImageNet-A). Of
    equally confident samples the order is that of the input.

    Args:
        confidence: (n,) probability of the predicted class.
        correct: (n,) bool.

    Raises:
        ValueError: arrays of different lengths.
    """
    confidence, correct = _checked(confidence, correct)
    if not len(confidence):
        return None
    ranked = correct[np.argsort(-confidence, kind="stable")]
    return 100 * float((np.cumsum(ranked) / np.arange(1, len(ranked) + 1)).mean())


def _checked(confidence: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if np.ndim(confidence) != 1 or np.shape(confidence) != np.shape(correct):
        raise ValueError(f"confidence and correctness of different shapes: {np.shape(confidence)}, {np.shape(correct)}")
    return np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
