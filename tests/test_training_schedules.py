from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from ibot_eval.errors import ConfigError
from ibot_eval.training.schedules import cosine, warmup_then_constant

GOLDEN = json.loads((Path(__file__).parent / "golden" / "schedules.json").read_text())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr", cosine(2e-3, 1e-6, 200, warmup_steps=100)),
        ("wd", cosine(0.04, 0.4, 200)),
        ("momentum", cosine(0.996, 1.0, 200)),
    ],
)
def test_published_schedules_to_the_last_bit(name, values):
    assert values.dtype == np.float64
    assert values.tolist() == GOLDEN["schedules"][name]


def test_published_training_steps_to_the_last_bit():
    train, rows = GOLDEN["train"], GOLDEN["rows"]
    epoch = train["steps_per_epoch"]
    steps = train["epochs"] * epoch
    lr = cosine(train["lr"], train["min_lr"], steps, warmup_steps=train["warmup_epochs"] * epoch)
    decay = cosine(*train["wd"], steps)
    momentum = cosine(train["momentum"], 1.0, steps)
    temperature = warmup_then_constant(*train["teacher_temp"], train["epochs"], train["temp_warmup_epochs"])
    assert len(rows) == train["steps"]
    for row in rows:
        step = row["step"]
        assert (lr[step], decay[step], momentum[step]) == (row["lr"], row["wd"], row["momentum"])
        assert temperature[row["epoch"]] == row["teacher_temp"] == row["teacher_patch_temp"]


def test_formula():
    values = cosine(5.0, 1.0, 10, warmup_steps=3, warmup_start=2.0)
    assert values[:3].tolist() == [2.0, 3.5, 5.0]
    for i, value in enumerate(values[3:]):
        assert value == pytest.approx(1 + 4 * math.cos(math.pi * i / 14) ** 2)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_short_runs(steps):
    for warmup in range(steps + 1):
        values = cosine(1.0, 0.0, steps, warmup_steps=warmup)
        assert values.shape == warmup_then_constant(0.04, 0.07, steps, warmup).shape == (steps,)
        assert np.isfinite(values).all()
        assert values.max() == (1 if warmup != 1 or steps > 1 else 0)


def test_constant_from_the_start():
    assert warmup_then_constant(0.04, 0.07, 3, 0).tolist() == [0.07] * 3
    assert warmup_then_constant(1, 2, 4, 2).tolist() == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(("steps", "warmup"), [(0, 0), (-1, 0), (5, 6), (5, -1)])
def test_impossible_lengths(steps, warmup):
    with pytest.raises(ConfigError, match=f"{steps}"):
        cosine(1, 0, steps, warmup_steps=warmup)
    with pytest.raises(ConfigError, match=f"{steps}"):
        warmup_then_constant(1, 0, steps, warmup)
