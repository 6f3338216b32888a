"""Accuracy from scores or predictions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int64).max
"""Rank of a right class that has no score: it is not among the k best however large k."""


def target_ranks(scores: Tensor, targets: Tensor) -> Tensor:
    """Number of classes that are ranked before the right one; 0 means that it comes first.

    Equal scores are ranked by class index, lowest first, as ``argmax`` does: a classifier that says the same of all
    classes gains nothing. A right class without a score (NaN) comes last.

    Args:
        scores: (n, C), the larger the likelier.
        targets: (n,) int64, the right classes.

    Returns:
        (n,) int64, 0 … C - 1; ``NEVER`` where the target is outside of 0 … C - 1 or its score is NaN.
    """
    classes = scores.shape[1]
    known = (targets >= 0) & (targets < classes)
    index = torch.where(known, targets, 0)[:, None]
    own = scores.gather(1, index)
    known &= ~own.squeeze(1).isnan()
    # Counted in 32 bits, which takes a quarter of the time.
    ranks = (scores > own).sum(1, dtype=torch.int32).long()
    tied = torch.nonzero(known & ((scores == own).sum(1, dtype=torch.int32) > 1)).flatten()
    if len(tied):
        earlier = torch.arange(classes, device=scores.device) < index[tied]
        ranks[tied] += ((scores[tied] == own[tied]) & earlier).sum(1)
    return torch.where(known, ranks, NEVER)


def topk_accuracy(scores: Tensor, targets: Tensor, k: int = 1) -> float:
    """Percent of the samples whose right class is among the ``k`` best; arguments as in :func:`target_ranks`.

    Raises:
        ValueError: no samples.
    """
    if not len(targets):
        raise ValueError("accuracy of no samples")
    return 100 * int((target_ranks(scores, targets) < k).sum()) / len(targets)


def per_class_accuracy(predictions: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accuracy of each class that occurs in ``labels``.

    Args:
        predictions: (n,) integers.
        labels: (n,) integers, in any range.

    Returns:
        the classes in ascending order (c,), percent right of each (c,) float64, and its number of samples (c,).
    """
    classes, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    right = np.bincount(index, weights=predictions == labels, minlength=len(classes))
    return classes, 100 * right / counts, counts
