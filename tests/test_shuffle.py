"""protocols.shuffle: grids that fit, metrics by hand, the figure, and a run from the command line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PathCollection

from ibot_eval import cli
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError
from ibot_eval.protocol import Metric, Predictions
from ibot_eval.record import EvalRecord
from protocols.shuffle import Shuffle, ShuffleConfig

TRANSFORM = EvalTransform(128, 112, "bicubic", (0.5,) * 3, (0.5,) * 3)


def test_default_grids_are_those_that_divide_the_crop():
    network: Any = None
    fitted = Shuffle(ShuffleConfig()).for_network(network, TRANSFORM, frozenset())
    assert fitted.config.grids == ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "14x14", "16x16")
    small = EvalTransform(96, 96, "bicubic", (0.5,) * 3, (0.5,) * 3)
    assert "14x14" not in Shuffle(ShuffleConfig()).for_network(network, small, frozenset()).config.grids
    assert Shuffle(ShuffleConfig()).for_network(network, small, frozenset()).left_out == ["14x14"]
    asked = Shuffle(ShuffleConfig(grids=("1x1", "5x5"), resize_to_fit=True))
    assert asked.for_network(network, small, frozenset({"grids"})).config.grids == ("1x1", "5x5")
    with pytest.raises(ConfigError, match=r"5x5.*96 pixels"):
        Shuffle(ShuffleConfig(grids=("1x1", "5x5"))).for_network(network, small, frozenset({"grids"}))


def test_a_size_that_no_default_grid_divides_and_one_of_too_few_pixels():
    network: Any = None
    odd = EvalTransform(47, 47, "bicubic", (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(ConfigError, match="no default grid divides 47 pixels"):
        Shuffle(ShuffleConfig()).for_network(network, odd, frozenset())
    assert len(Shuffle(ShuffleConfig(resize_to_fit=True)).for_network(network, odd, frozenset()).grids) == 8
    with pytest.raises(ConfigError, match="64x1"):
        Shuffle(ShuffleConfig(grids=("1x1", "64x1"), resize_to_fit=True)).for_network(network, odd, frozenset())


def test_metrics_by_hand():
    protocol = Shuffle(ShuffleConfig(grids=("1x1", "2x2", "4x4")))
    params = protocol.levels(64, 16)
    assert [p["on_patch_grid"] for p in params] == [True, True, True]
    labels = np.array([0, 1, 2, 0])
    predicted = np.array([[[0, 0, 1], [1, 1, 0], [2, 0, 2], [0, 1, 1]]])
    events = list(protocol.events(params, labels, predicted, list("abcd"), seed=0))
    top1 = [e.value for e in events if isinstance(e, Metric) and e.name == "top1"]
    (area,) = [e for e in events if isinstance(e, Metric) and e.name == "area_under_curve"]
    (saved,) = [e for e in events if isinstance(e, Predictions)]
    assert top1 == [100, 50, 25]
    assert area.value == pytest.approx(100 * ((1 + 0.5) / 2 + (0.5 + 0.25) / 2) / 2)
    assert saved.values["top1@grid=2x2"].tolist() == [0, 1, 0, 1]


def test_the_figure_rings_grids_that_cut_no_patch():
    protocol = Shuffle(ShuffleConfig(grids=("1x1", "2x2", "4x4")))
    params = protocol.levels(96, 16)
    events = protocol.events(params, np.zeros(2, int), np.array([[[0, 0, 0], [0, 0, 1]]]), ["a", "b"], 0)
    record = EvalRecord("one", "shuffle", 1, metrics=[asdict(e) for e in events if isinstance(e, Metric)])
    (figure,) = Shuffle.figures(record).values()
    (line,) = figure.axes[0].lines
    assert line.get_xdata().tolist() == [1, 4, 16]
    assert line.get_ydata().tolist() == [100, 100, 50]
    rings = [c for c in figure.axes[0].collections if isinstance(c, PathCollection)]
    assert [ring.get_offsets().tolist() for ring in rings] == [[[1, 100], [4, 100]]], "cells of 24 pixels cut patches"


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Digits by k-NN: grids that do not divide 64 pixels are left out, resized, or refused."""
    monkeypatch.chdir(tmp_path)
    few = ("--train-per-class", 4, "--test-per-class", 2, "--resize", 64, "--crop", 64, "--workers", 0, "--sheet", 2)

    def shuffle(*more: str) -> int:
        return cli.main(["shuffle", *map(str, few), "--k", "3", *more])

    assert shuffle("--name", "first") == 0
    record = EvalRecord.load(tmp_path / "runs" / "first")
    assert any("14x14" in w for w in record.warnings)
    top1 = {m["params"]["grid"]: m for m in record.metrics if m["name"] == "top1"}
    assert list(top1) == ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "16x16"]
    assert list(record.config["grids"]) == list(top1)
    assert [grid for grid, m in top1.items() if not m["params"]["on_patch_grid"]] == ["16x16"]
    assert (tmp_path / "runs" / "first" / "sheet.png").is_file()
    assert shuffle("--name", "second", "--grids", "1x1", "3x3", "--resize-to-fit") == 0
    assert "3x3 at 63x63" in capsys.readouterr().err
    again = EvalRecord.load(tmp_path / "runs" / "second")
    assert again.metrics[0]["value"] == top1["1x1"]["value"]
    assert again.metrics[1]["params"]["resized"] is True
    assert shuffle("--grids", "1x1", "3x3") == 2
    assert "3x3: an image of 64 pixels" in capsys.readouterr().err
    assert cli.main(["plot", "runs/first", "runs/second"]) == 0
    assert (tmp_path / "figures" / "shuffle-accuracy_by_cells.png").is_file()


def test_1x1_is_the_accuracy_that_the_head_was_saved_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    few = ("--train-per-class", "8", "--test-per-class", "6", "--workers", "0")
    assert cli.main(["linear", *few, "--save-head", "--epochs", "5", "--lrs", "0.1", "--name", "linear"]) == 0
    assert cli.main(["shuffle", *few, "--head", "runs/linear", "--grids", "1x1", "2x2", "--name", "shuffle"]) == 0
    saved, damaged = (EvalRecord.load(tmp_path / "runs" / name).metrics for name in ("linear", "shuffle"))
    top1 = next(m for m in saved if m["name"] == "top1")
    assert damaged[0]["params"]["head"] == "linear"
    assert (damaged[0]["value"], damaged[0]["n"]) == (top1["value"], top1["n"])
    assert damaged[1]["value"] != top1["value"]
