"""Training of mmengine models broken off and gone on with."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.training.logs import read_log
from tests.ranks import Running

pytest.importorskip("mmengine")

from protocols.openmmlab import configuration, loop, training
from protocols.openmmlab.evaluation import scalars
from tests import dense_training
from tests.dense_training import broken_off, described, run, session

TIMES = {"images_per_second", "data_wait", "peak_memory_gb"}
BY_EPOCH: dict[str, Any] = {
    "train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": 4, "val_interval": 1},
    "param_scheduler": [
        {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 4},
        {"type": "MultiStepLR", "milestones": [2, 3], "gamma": 0.1, "by_epoch": True},
    ],
    "custom_hooks": [{"type": "EMAHook", "momentum": 0.1}],
    "train_dataloader__batch_sampler": {"type": "AspectRatioBatchSampler"},
}
"""Three iterations an epoch, in which a moving average is trained along."""
GATHERED = {
    "optim_wrapper": {"type": "OptimWrapper", "accumulative_counts": 4, "optimizer": {"type": "SGD", "lr": 0.1}}
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, and those that were."""
    folder = tmp_path_factory.mktemp("runs")
    cases = {
        "killed": (9, signal.SIGKILL, {}),
        "epochs": (8, signal.SIGKILL, BY_EPOCH),
        "SIGTERM": (5, signal.SIGTERM, {}),
        "SIGINT": (5, signal.SIGINT, {}),
    }
    done = Running(broken_off, str(folder), cases).done(180)
    stopped = "stopped after iteration 5 of 14; the same command goes on from there"
    ends = {"killed": "-9", "epochs": "-9", "SIGTERM": stopped, "SIGINT": stopped}
    assert done.value == ends, done.stderr
    run(folder / "whole")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pth", weights_only=True)["state_dict"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_log(folder / "log.jsonl")]


def assert_same(one: Path, other: Path) -> None:
    before, after = weights(one), weights(other)
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
    assert rows(one) == rows(other)


def test_a_killed_run_ends_as_the_run_that_never_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dropout, batch norm, random augmentation and schedules, without loading any batch again."""
    shutil.copytree(folder / "killed", tmp_path / "run")
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())][-1] < "step_00000009.pt"
    loaded: list[int] = []
    prepare = dense_training.TinyData.prepare_data
    monkeypatch.setattr(
        dense_training.TinyData, "prepare_data", lambda self, i: loaded.append(self.test_mode) or prepare(self, i)
    )
    run(tmp_path / "run")
    assert "resumed after iteration 6 of 14" in capsys.readouterr().err
    assert loaded.count(False) == 4 * (14 - 6)
    assert_same(folder / "whole", tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [2, 4, 5, 6, 8, 10, 10, 12, 14, 14]


def test_the_number_of_workers_does_not_matter(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "killed", tmp_path / "run")
    config = configuration.finish(described(train_dataloader__num_workers=2, test_dataloader__num_workers=1))
    run(tmp_path / "run", config, keep=1, save_minutes=100, log_every=2)
    assert_same(folder / "whole", tmp_path / "run")


def test_epochs_and_moving_averages(folder: Path, tmp_path: Path) -> None:
    config = configuration.finish(described(**BY_EPOCH))
    run(tmp_path / "whole", config)
    run(folder / "epochs", config)
    assert_same(tmp_path / "whole", folder / "epochs")
    log = rows(tmp_path / "whole")
    assert [row["step"] for row in log if row.get("event") == "test"] == [3, 6, 9, 12]
    # Warm-up to 0.05 within four iterations, a tenth of it from the second and from the third epoch on.
    rates = [row["lr"] for row in log if "lr" in row]
    assert rates[1:] == pytest.approx([0.05, 0.05, 0.005, 0.0005, 0.0005])
    # What is saved is what was tested: the moving average.
    config = configuration.finish(described(**BY_EPOCH))
    tested = training.test(config, session(tmp_path / "test"), weights(tmp_path / "whole"))
    assert scalars(tested.results)["tiny/right"] == log[-1]["tiny/right"]


def test_a_stop_waits_until_gathered_gradients_are_used(tmp_path: Path) -> None:
    config = configuration.finish(described(**GATHERED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.StopRequest, "requested", property(lambda self: True))
        with pytest.raises(BaseException, match="stopped after iteration 4 of 14"):
            run(tmp_path / "stopped", config)
    run(tmp_path / "stopped", config)
    run(tmp_path / "whole", config)
    assert_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_run_that_was_asked_to_stop_has_saved_first(folder: Path, name: str) -> None:
    run(folder / name)
    assert_same(folder / "whole", folder / name)


def test_a_run_killed_after_its_last_iteration_is_only_tested(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "whole", tmp_path / "run")
    (tmp_path / "run" / "model.pth").unlink()
    monkeypatch.setattr(dense_training.TinyModel, "train_step", None)
    trained = run(tmp_path / "run")
    assert_same(folder / "whole", tmp_path / "run")
    assert trained.results["tiny/right"] == rows(tmp_path / "run")[-1]["tiny/right"]
    training.discard_states(session(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({"train_cfg__max_iters": 20}, {}, r"mmengine\.train_cfg\.max_iters \(was 14, now 20\)"),
        ({"optim_wrapper__optimizer__lr": 0.1}, {}, r"optim_wrapper\.optimizer\.lr \(was 0.05, now 0.1\)"),
        ({}, {"seed": 1}, r"seed \(was 0, now 1\)"),
        ({}, {"identity": {"tiny": 2}}, r"tiny \(was 1, now 2\)"),
    ],
)
def test_another_run_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    shutil.copytree(folder / "killed", tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", configuration.finish(described(**changes)), **arguments)
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()} == before


def test_states_that_cannot_be_gone_on_from(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "killed", tmp_path / "run")
    path = max((tmp_path / "run" / "checkpoints").iterdir())
    torch.save(torch.load(path, weights_only=True) | {"format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99"):
        run(tmp_path / "run")
    # A damaged one is passed over for the one before it.
    path.write_bytes(path.read_bytes()[:-1000])
    run(tmp_path / "run")
    assert_same(folder / "whole", tmp_path / "run")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(ConfigError, match="another process"):
        run(tmp_path)
