"""linear-augment broken off and gone on with, and on several processes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.probes.head_file import load_head
from ibot_eval.probes.holdout import hold_out
from ibot_eval.record import EvalRecord, load_predictions
from tests.augmented_runs import CONFIG, broken_off, demo_run, run, run_on_ranks, session
from tests.fakes import FakeBackbone, FakeSplit
from tests.ranks import Running, run_ranks


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_gives_the_same(world: int, tmp_path: Path) -> None:
    """Also after all of them failed in the seventh step. Three ranks train two heads."""
    wanted = run_on_ranks(str(tmp_path / "one"), 29, [4])
    results = run_ranks(world, run_on_ranks, str(tmp_path / "many"), 29, [4], 7)
    assert {result.pop("refused") for result in results} == {
        "rank 1 differs from rank 0 in seed, so they cannot train together"
    }
    assert wanted.pop("refused") == ""
    assert all(result == wanted for result in results)
    one, many = (load_head(tmp_path / name) for name in ("one", "many"))
    torch.testing.assert_close(many.weight, one.weight, rtol=1e-5, atol=1e-6)
    assert wanted["warnings"]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    folder = tmp_path_factory.mktemp("series")
    killed = Running(demo_run, str(folder), "killed", 9).done()
    assert killed.code == -signal.SIGKILL, killed.stderr
    done = Running(broken_off, str(folder)).done(120)
    assert done.code == 0, done.stderr
    return folder, done.value, done.stderr


@pytest.mark.parametrize("name", ["killed", "terminated"])
def test_a_run_gone_on_with_is_the_run_that_never_stopped(series: Any, name: str) -> None:
    """15 steps; killed in the 9th, in the middle of an epoch, the last state being some steps older."""
    folder = series[0]
    one, other = (EvalRecord.load(folder / n) for n in ("whole", name))
    assert one.status == other.status == "success"
    assert one.metrics == other.metrics
    assert one.warnings == other.warnings
    assert (folder / "whole" / "sweep.json").read_bytes() == (folder / name / "sweep.json").read_bytes()
    heads = [load_head(folder / n) for n in ("whole", name)]
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert torch.equal(heads[0].bias, heads[1].bias)
    tables = [load_predictions(folder / n / "predictions.npz") for n in ("whole", name)]
    for column in ("image_ids", "label", "top1"):
        np.testing.assert_array_equal(tables[0][column], tables[1][column])


def test_states_and_messages(series: Any) -> None:
    folder, said, stderr = series
    assert said == ["interrupted"]
    (state,) = (folder / "copy" / "training").iterdir()
    assert state.name in ("step_00000006.pt", "step_00000007.pt", "step_00000008.pt")
    assert f"resumed after step {int(state.stem[5:])} of 15" in stderr
    for name in ("whole", "killed", "terminated"):
        assert not (folder / name / "training").exists()
        with pytest.raises(ConfigError, match="exists already"):
            demo_run(str(folder), name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 4}, r"epochs \(was 3, now 4\)"),
        ({"lrs": (0.01, 0.1)}, r"lrs \(was \[0.01, 0.1, 0.5\], now \[0.01, 0.1\]\)"),
        ({"seed": 1}, r"seed \(was 0, now 1\)"),
        ({"train_per_class": 7}, "images.train"),
        ({"features": "cls"}, "features"),
    ],
)
def test_other_settings_or_data_are_refused(series: Any, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    shutil.copytree(series[0] / "copy", tmp_path / "run")
    (before,) = (tmp_path / "run" / "training").iterdir()
    content = before.read_bytes()
    with pytest.raises(ConfigError, match=said):
        demo_run(str(tmp_path), "run", **changes)
    assert before.read_bytes() == content
    assert list((tmp_path / "run" / "training").iterdir()) == [before]


def test_what_does_not_matter_may_change(series: Any, tmp_path: Path) -> None:
    shutil.copytree(series[0] / "copy", tmp_path / "run")
    demo_run(str(tmp_path), "run", save_head=False, save_minutes=100, bad_images="skip")
    assert EvalRecord.load(tmp_path / "run").metrics == EvalRecord.load(series[0] / "whole").metrics
    assert not (tmp_path / "run" / "head.safetensors").exists()


def test_state_of_another_version_is_refused(series: Any, tmp_path: Path) -> None:
    shutil.copytree(series[0] / "copy", tmp_path / "run")
    (path,) = (tmp_path / "run" / "training").iterdir()
    torch.save(torch.load(path, weights_only=True) | {"format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99"):
        demo_run(str(tmp_path), "run")


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = FakeSplit(20), FakeSplit(9, "test")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    run(CONFIG, session(tmp_path / "run", train, test))
    with pytest.raises(ConfigError, match=r"checkpoint\.sha256"):
        run(CONFIG, session(tmp_path / "run", train, test, sha256="b" * 64))
    # A run whose last state is that of its end only has to be reported.
    backbone = FakeBackbone()
    run(CONFIG, session(tmp_path / "run", train, test), backbone)
    assert backbone.forwarded == 9 + hold_out(train.labels, 0.1, 0).sum()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    where = session(tmp_path / "run", FakeSplit(20), FakeSplit(9, "test"))
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(ConfigError, match="another process"):
        run(CONFIG, where)
    run(CONFIG, where)
