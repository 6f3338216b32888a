from __future__ import annotations

from pathlib import Path

import pytest

from ibot_eval.errors import ConfigError
from ibot_eval.training.resuming import compare_settings

SAVED = {"lr": 0.1, "model": {"width": 64, "K": 512}, "scale": (0.25, 1.0), "output": Path("runs"), "extra": {}}


def test_equal_settings_in_other_containers():
    compare_settings(SAVED, SAVED | {"scale": [0.25, 1.0], "output": "runs"})
    compare_settings({}, {})


def test_every_difference_is_named_with_both_values():
    now = SAVED | {"lr": 0.2, "model": {"width": 64, "K": 1024}, "scale": (0.32, 1.0), "new": None}
    with pytest.raises(ConfigError) as caught:
        compare_settings(SAVED, now)
    text = str(caught.value)
    for part in (
        "lr (was 0.1, now 0.2)",
        "model.K (was 512, now 1024)",
        "scale (was [0.25, 1.0], now [0.32, 1.0])",
        "new (was absent, now None)",
    ):
        assert part in text
    assert "width" not in text
    assert "output" not in text


def test_a_setting_that_is_gone():
    with pytest.raises(ConfigError, match=r"model\.K \(was 512, now absent\)"):
        compare_settings(SAVED, SAVED | {"model": {"width": 64}})


@pytest.mark.parametrize("may_differ", [["model.K"], {"model"}, ("other", "model.K")])
def test_what_may_differ(may_differ):
    compare_settings(SAVED, SAVED | {"model": {"width": 64, "K": 1024}}, may_differ)


def test_a_name_allows_itself_only():
    with pytest.raises(ConfigError, match=r"model\.K"):
        compare_settings(SAVED, SAVED | {"model": {"width": 64, "K": 1}}, ["K", "mod", "model.width"])


def test_hashes_are_not_shown():
    """Nobody learns anything from their digits."""
    saved = {"images": {"train": "a" * 64, "test": "b" * 64}, "checkpoint": {"sha256": "c" * 64}}
    now = {"images": {"train": "a" * 64, "test": "d" * 64}, "checkpoint": {"sha256": "e" * 64}}
    with pytest.raises(ConfigError) as caught:
        compare_settings(saved, now)
    expected = "images.test (other images, or their files were changed), checkpoint.sha256 (another file)"
    assert caught.value.what.endswith(expected)
