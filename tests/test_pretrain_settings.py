"""Settings of pre-training: their names, and what contradicts what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ibot_eval.errors import ConfigError
from pretrain import train as loop
from pretrain.config import PretrainSettings
from pretrain.consistency import check
from tests.pretraining import tiny


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"arch": "vit", "width": None}, "needs --width"),
        ({"arch": "vit_tiny"}, "--width belongs to --arch vit"),
        ({"width": 25}, "not a multiple of --heads 3"),
        ({"epochs": 0}, "--epochs 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"accumulate": 0}, "--accumulate 0"),
        ({"save_every": 0}, "--save-every 0"),
        ({"keep": 0}, "--keep 0"),
        ({"student_temp": 0.0}, "--student-temp 0.0: it must be above 0"),
        ({"patch_teacher_temp": -1.0}, "--patch-teacher-temp -1.0"),
        ({"teacher_temp": float("nan")}, "--teacher-temp nan"),
        ({"momentum": 1.5}, "--momentum 1.5"),
        ({"centre_momentum": -0.1}, "--centre-momentum -0.1"),
        ({"drop_path": 1.0}, "--drop-path 1.0"),
        ({"cls_weight": -1.0}, "--cls-weight -1.0"),
        ({"patch_weight": float("inf")}, "--patch-weight inf"),
        ({"clip": -3.0}, "--clip -3.0"),
        ({"cls_weight": 0.0, "patch_weight": 0.0}, "leaves no loss"),
        ({"global_crops": 1, "local_crops": 0}, "compares two views"),
        ({"global_crops": 1, "patch_objective": "feature"}, "compares two global views"),
        ({"tokenizer": "x.pth", "patch_objective": "position"}, "--tokenizer gives targets for masked patches"),
        ({"patch_prototypes": 8}, "--sharing vanilla"),
        ({"patch_prototypes": 8, "sharing": "semi-shared"}, "--sharing vanilla"),
        ({"pred_ratio": (0.0,)}, "needs masked patches"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tiny(**flags))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"cls_weight": 0.0, "global_crops": 1, "local_crops": 0},
        {"patch_weight": 0.0, "pred_ratio": (0.0,), "pred_ratio_var": (0.0,)},
        {"sharing": "vanilla", "patch_prototypes": 8},
        {"momentum": 1.0, "centre_momentum": 0.0, "clip": 0.0},
        {"global_crops": 1, "local_crops": 1},
    ],
    ids=str,
)
def test_settings_that_are_allowed(flags: dict[str, Any]) -> None:
    check(tiny(**flags))


def test_flags_and_settings_are_the_same_names() -> None:
    settings = PretrainSettings()
    flat = settings.flat()
    assert settings.with_flags({"prototypes": 7}).flat() == flat | {"prototypes": 7}
    json.dumps(flat)
    with pytest.raises(ConfigError, match="no setting 'prototype'"):
        settings.with_flags({"prototype": 7})
    # A recipe has become flags by then.
    assert flat.keys() >= loop.MAY_CHANGE - {"recipe"}, "every name of what may change is a setting"
