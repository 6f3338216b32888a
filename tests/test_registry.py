"""Entry points: near names, duplicates, packages that are missing, the example plug-in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

from ibot_eval import registry, runner
from ibot_eval.cache import BankCache
from ibot_eval.data.opening import open_data
from ibot_eval.data.transforms import eval_transform
from ibot_eval.errors import ConfigError, MissingExtra
from ibot_eval.features import FeatureRequest
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, RunSettings
from protocols.knn import KNN
from tests.conftest import Run
from tests.fakes import FakeBackbone


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    found: list[EntryPoint] = []
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: found)
    registry.entries.cache_clear()
    yield found
    registry.entries.cache_clear()


def point(name: str, value: str, group: str = "ibot_eval.protocols") -> EntryPoint:
    return EntryPoint(name, value, group)


def test_unknown_names_suggest_the_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"no protocol is called 'kn'.*\n.*did you mean 'knn'"):
        registry.load("protocols", "kn")


def test_two_packages_with_one_name_are_an_error(points: list[EntryPoint]) -> None:
    points += [point("knn", "protocols.knn:KNN"), point("knn", "other.knn:KNN")]
    with pytest.raises(ConfigError, match=r"'knn' is registered twice.*other\.knn:KNN.*protocols\.knn:KNN"):
        registry.entries("protocols")


def test_one_package_seen_twice_on_the_path_is_none(points: list[EntryPoint]) -> None:
    points += [point("knn", "protocols.knn:KNN"), point("knn", "protocols.knn:KNN")]
    assert list(registry.entries("protocols")) == ["knn"]


def test_a_package_that_is_missing_is_named(points: list[EntryPoint]) -> None:
    points.append(point("x", "no_such_package_at_all.x:X"))
    with pytest.raises(MissingExtra, match="needs the package 'no_such_package_at_all'"):
        registry.load("protocols", "x")


def test_what_is_no_protocol_is_refused(points: list[EntryPoint]) -> None:
    points.append(point("x", "pathlib:Path"))
    with pytest.raises(ConfigError, match=r"pathlib:Path does not derive from EvalProtocol"):
        registry.load_protocol("x")


def test_what_draws_the_runs_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "ibot_eval.protocols": [point("knn", "protocols.knn:KNN")],
        "ibot_eval.commands": [point("knn", "x:Y"), point("draws", "protocols.knn:KNN"), point("mute", "pathlib:Path")],
    }
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: found[group])
    registry.entries.cache_clear()
    try:
        # A protocol comes first; a command without figures is nobody's to draw.
        assert registry.load_drawer("knn") is registry.load_drawer("draws") is KNN
        with pytest.raises(ConfigError, match=r"no protocol is called 'mute'"):
            registry.load_drawer("mute")
    finally:
        registry.entries.cache_clear()


def test_summaries_are_read_without_importing(points: list[EntryPoint]) -> None:
    code = (
        "import sys; from ibot_eval import registry; "
        "print({n: registry.summary(p) for g in ('protocols', 'commands') for n, p in registry.entries(g).items()}); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    summaries = eval(done.stdout)
    assert {"knn", "inspect", "doctor", "extract", "cache", "report", "plot", "list"} <= summaries.keys()
    assert all(summaries.values())
    assert registry.summary(point("x", "no_such_package_at_all:X")) == ""


def test_the_example_plugin_is_found_and_conforms(plugin: str, ibot_eval: Run) -> None:
    code = "from ibot_eval.testing import check_protocol; print(len(check_protocol('centroid')))"
    environment = {"PYTHONPATH": plugin}
    listed = ibot_eval("list", **environment)
    assert "centroid: Nearest-centroid accuracy of frozen features  [from ibot-eval-example-plugin]" in listed.stdout
    assert "--ckpt colour:…  A backbone of average patch colours" in listed.stdout
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**environment, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2"


def test_the_plugins_protocol_and_backbone_run(plugin: str, ibot_eval: Run, tmp_path: Path) -> None:
    done = ibot_eval("centroid", "--ckpt", "colour:16", "--data", "demo", "--json", PYTHONPATH=plugin)
    assert done.returncode == 0, done.stderr
    assert '"protocol": "centroid"' in done.stdout
    assert '"architecture": "colour/16"' in done.stdout
    assert len(list(tmp_path.glob("runs/*/record.json"))) == 1


def scaled(rest: str) -> FakeBackbone:
    """Its weights are the same whatever the scale."""
    return FakeBackbone(scale=float(rest))


def test_plugin_backbones_never_share_a_bank(points: list[EntryPoint], tmp_path: Path) -> None:
    points.append(point("scaled", "tests.test_registry:scaled", "ibot_eval.backbones"))
    cache = BankCache(tmp_path / "cache")
    features = []
    for reference in ("scaled:1", "scaled:2"):
        settings = RunSettings(
            checkpoint=CheckpointSettings(ckpt=reference),
            data=DataSettings(data="demo", resize=8, crop=8, test_per_class=1),
            engine=EngineSettings(workers=0),
        )
        loaded = runner.load_any(settings.checkpoint, cache, seed=0)
        data, request = open_data(settings.data, roles=("test",)), FeatureRequest("test", norm="none")
        transform = eval_transform(settings.data, loaded.backbone)
        banks, stats = runner.extract([request], loaded, data, transform, cache, settings, torch.device("cpu"))
        assert stats.reused == 0
        features.append(np.array(banks[request].features))
    np.testing.assert_array_equal(features[0] * 2, features[1])
    assert cache.ls() == []
