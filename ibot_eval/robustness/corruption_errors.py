"""Corruption errors relative to AlexNet's: mCE and relative mCE (Hendrycks and Dietterich 2019, ImageNet-C)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

ALEXNET = {
    "gaussian_noise": 88.6428,
    "shot_noise": 89.4468,
    "impulse_noise": 92.2640,
    "defocus_blur": 81.9880,
    "glass_blur": 82.6268,
    "motion_blur": 78.5948,
    "zoom_blur": 79.8360,
    "snow": 86.6816,
    "frost": 82.6572,
    "fog": 81.9324,
    "brightness": 56.4592,
    "contrast": 85.3204,
    "elastic_transform": 64.6056,
    "pixelate": 71.7840,
    "jpeg_compression": 60.6500,
}
"""AlexNet's error in percent on each corruption of ImageNet-C, averaged over the five severities: the values that
evaluations take from the public repository of the benchmark."""

ALEXNET_CLEAN = 43.5
"""AlexNet's error in percent on the clean validation images, as the paper's table rounds it. With it, the table's
corruption errors of ResNet-50 give the table's relative mCE, 105, within what rounding allows."""

EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The four corruptions that ImageNet-C keeps for validation; no mCE counts them."""

GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": EXTRA,
}
"""The parts of ImageNet-C, which may be folders of their own."""


def corruption_error(errors: Sequence[float], corruption: str) -> float:
    """CE: the mean error over severities, in percent of AlexNet's on the same corruption.

    Args:
        errors: one error in percent per severity.
        corruption: a key of :data:`ALEXNET`.
    """
    return 100 * float(np.mean(errors)) / ALEXNET[corruption]


def relative_corruption_error(errors: Sequence[float], corruption: str, clean: float) -> float:
    """Relative CE: by how much the error rises above the clean one, in percent of AlexNet's rise.

    Args:
        errors: one error in percent per severity.
        corruption: a key of :data:`ALEXNET`.
        clean: the classifier's error on clean images, in percent.
    """
    return 100 * (float(np.mean(errors)) - clean) / (ALEXNET[corruption] - ALEXNET_CLEAN)


def mean_corruption_error(errors: Mapping[str, Sequence[float]], clean: float | None = None) -> float | None:
    """mCE, or relative mCE where ``clean`` is given: the mean of the 15 corruption errors.

    Args:
        errors: corruption -> one error in percent per severity.
        clean: the classifier's error on clean images, in percent.

    Returns:
        None where one of the 15 is missing: a mean over fewer compares with nothing published.
    """
    if not ALEXNET.keys() <= errors.keys():
        return None
    if clean is None:
        return float(np.mean([corruption_error(errors[name], name) for name in ALEXNET]))
    return float(np.mean([relative_corruption_error(errors[name], name, clean) for name in ALEXNET]))
