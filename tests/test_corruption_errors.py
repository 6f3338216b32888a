"""mCE by hand, and AlexNet's errors against their sources."""

from __future__ import annotations

import numpy as np
import pytest

from ibot_eval.robustness.corruption_errors import ALEXNET, corruption_error, mean_corruption_error

BY_SEVERITY = {
    "gaussian_noise": (69.528, 82.542, 93.554, 98.138, 99.452),
    "shot_noise": (71.224, 85.108, 93.574, 98.182, 99.146),
    "impulse_noise": (78.374, 89.808, 94.87, 98.72, 99.548),
    "defocus_blur": (65.624, 73.202, 85.036, 91.364, 94.714),
    "glass_blur": (64.308, 75.054, 88.806, 91.622, 93.344),
    "motion_blur": (58.43, 70.048, 82.108, 89.75, 92.638),
    "zoom_blur": (70.008, 76.992, 80.784, 84.198, 87.198),
    "snow": (71.726, 88.392, 86.468, 91.87, 94.952),
    "frost": (61.39, 79.734, 88.79, 89.942, 93.43),
    "fog": (67.474, 76.05, 84.378, 87.26, 94.5),
    "brightness": (45.14, 48.502, 54.048, 62.166, 72.44),
    "contrast": (64.548, 76.15, 88.874, 97.76, 99.27),
    "elastic_transform": (52.596, 70.116, 55.686, 64.076, 80.554),
    "pixelate": (52.218, 54.62, 73.728, 87.092, 91.262),
    "jpeg_compression": (51.002, 54.718, 57.294, 65.458, 74.778),
}
"""AlexNet's errors as an evaluation of public use lists them, one by one: another source than that of the means."""


def test_means_are_those_of_the_severities() -> None:
    assert ALEXNET.keys() == BY_SEVERITY.keys()
    assert {name: pytest.approx(np.mean(errors), abs=5e-5) for name, errors in BY_SEVERITY.items()} == ALEXNET


def test_alexnet_itself_has_100() -> None:
    assert mean_corruption_error(BY_SEVERITY) == pytest.approx(100, abs=1e-4)
    assert mean_corruption_error(BY_SEVERITY, clean=43.5) == pytest.approx(100, abs=1e-3)


def test_resnet50_as_published() -> None:
    """The errors of the paper's table, which are rounded (23.9 on clean images), give its mCE 76.7 and relative 105."""
    table = (80, 82, 83, 75, 89, 78, 80, 78, 75, 66, 57, 71, 85, 77, 77)
    errors = {name: [ce / 100 * alexnet] for ce, (name, alexnet) in zip(table, ALEXNET.items(), strict=True)}
    assert mean_corruption_error(errors) == pytest.approx(76.7, abs=0.3)
    # An error of AlexNet on clean images that were off by 0.5 would move this by 1.7.
    assert mean_corruption_error(errors, clean=23.9) == pytest.approx(105, abs=0.6)
    # Torchvision's ResNet-50 has 29.29 % accuracy on Gaussian noise, and publications give a CE of 79.77.
    assert corruption_error([100 - 29.29], "gaussian_noise") == pytest.approx(79.77, abs=0.01)


def test_fewer_than_15_corruptions_have_no_mean() -> None:
    assert mean_corruption_error({"fog": [50.0] * 5}) is None
    assert mean_corruption_error({name: [50.0] for name in list(ALEXNET)[1:]}) is None
