"""The part of the train split that settings are chosen on, so that none is chosen on the reported split."""

from __future__ import annotations

import numpy as np


def hold_out(labels: np.ndarray, fraction: float = 0.1, seed: int = 0) -> np.ndarray:
    """Which images to hold out: the same share of every class.

    Of a class with n images, ``fraction * n`` (rounded) are held out, but at least one and at most n - 1; a class of
    one image is not held out at all. Which ones depends on the seed, the label and n only, not on other classes.

    Args:
        labels: (n,) integers from 0 up.
        fraction: at least 0 and below 1; 0 holds nothing out.

    Returns:
        (n,) bool; all False where nothing can be held out.

    Raises:
        ValueError: any other fraction.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the fraction to hold out must be at least 0 and below 1, not {fraction}")
    held = np.zeros(len(labels), dtype=bool)
    if not fraction or not len(labels):
        return held
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(np.asarray(labels)[order], return_index=True)
    for label, rows in zip(classes, np.split(order, starts[1:]), strict=True):
        if len(rows) > 1:
            count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
            held[np.random.default_rng([seed, int(label)]).permutation(rows)[:count]] = True
    return held
