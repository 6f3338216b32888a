"""Runs that were killed, terminated or stopped and go on as if nothing had happened; what may not change in between."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval import distributed
from ibot_eval.record import EvalRecord
from ibot_eval.training.logs import read_log
from pretrain import train as loop
from tests.pretraining import FLAGS, run
from tests.ranks import Done, Running, run_ranks

# Seven steps of two passes in an epoch; two epochs. Drop path draws from torch's generator in every step.
RUN = [*FLAGS, "--accumulate", "2", "--drop-path", "0.1", "--save-steps", "3", "--log-every", "2"]
KNN = ["--knn-every", "1", "--knn-per-class", "2"]
STEPS, EPOCH = 14, 7
KILLED_IN = int(np.random.default_rng(3).integers(4, STEPS))
"""Step, from 1, that a SIGKILL ends between the optimiser and the moving average; a checkpoint lies before it."""
TIMES = {"images_per_second", "data_wait", "mfu", "peak_memory_gb"}


def signalled(step: int, number: int, on: int = 0) -> None:
    """This process gets a signal in the middle of a step, if it is rank ``on``."""
    average, calls = loop.ema_, iter(range(1, STEPS + 1))

    def interrupted(*arguments: Any) -> None:
        if next(calls) == step and distributed.rank() == on:
            os.kill(os.getpid(), number)
        average(*arguments)

    loop.ema_ = interrupted


def run_killed(folder: str, step: int, on: int, *arguments: str) -> dict[str, Any]:
    signalled(step, signal.SIGKILL, on)
    return run(folder, *arguments)


def run_series(folder: str) -> list[dict[str, Any]]:
    """One after the other, since a process takes seconds to start."""
    again = ["--resume", "auto", *RUN, *KNN]
    done = [
        run(folder, "--name", "whole", *RUN, *KNN),
        # How data are loaded must not matter.
        run(folder, "--name", "killed", *again, "--workers", "1"),
        run(folder, "--name", "stopped", "--stop-after", "1", *RUN, *KNN),
        run(folder, "--name", "stopped", *again),
    ]
    average = loop.ema_
    signalled(5, signal.SIGTERM)
    done.append(run(folder, "--name", "terminated", *RUN, *KNN))
    for name in ("record.json", "log.jsonl"):
        shutil.copy(Path(folder) / "runs" / "terminated" / name, folder)
    loop.ema_ = average
    done.append(run(folder, "--name", "terminated", *again))
    return done


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("one")
    return folder, Running(run_killed, str(folder), KILLED_IN, 0, "--name", "killed", *RUN, *KNN).done()


@pytest.fixture(scope="module")
def series(killed: tuple[Path, Done]) -> tuple[Path, list[dict[str, Any]]]:
    assert killed[1].code == -signal.SIGKILL, killed[1].stderr
    shutil.copytree(killed[0] / "runs" / "killed", killed[0] / "before")
    done = Running(run_series, str(killed[0])).done(timeout=120)
    assert done.code == 0, done.stderr
    return killed[0], done.value


def test_kill_leaves_the_last_checkpoint_and_a_record(series: Any) -> None:
    before = series[0] / "before"
    saved = sorted(int(path.stem[5:]) for path in (before / "checkpoints").glob("step_*.pt"))
    due = [step for step in range(1, STEPS) if step % 3 == 0 or step % EPOCH == 0]
    assert saved == [step for step in due if step < KILLED_IN][-3:]
    assert EvalRecord.load(before).status == "interrupted"
    assert (before / "teacher.safetensors").exists()


@pytest.mark.parametrize("name", ["killed", "stopped", "terminated"])
def test_resumed_run_is_the_run_that_never_stopped(series: Any, name: str) -> None:
    folder, done = series
    assert [one["code"] for one in done] == [0, 0, 0, 0, 143, 0], done
    assert_same_end(folder / "runs" / name, folder / "runs" / "whole")


@pytest.mark.parametrize("name", ["whole", "killed", "stopped", "terminated"])
def test_log_has_every_step_once(series: Any, name: str) -> None:
    rows, wanted = (_comparable(series[0] / "runs" / run) for run in (name, "whole"))
    # A run that ends early logs the step that it ends with.
    extra = {"stopped": 7, "terminated": None}.get(name)
    rows = [row for row in rows if row["step"] != extra or "event" in row]
    assert rows == wanted
    assert [row["step"] for row in wanted if "event" not in row] == [2, 4, 6, 8, 10, 12, 14]
    assert [(row["step"], row["epoch"]) for row in wanted if row.get("event") == "epoch"] == [(7, 1), (14, 2)]
    assert all("knn_top1" in row for row in wanted if row.get("event") == "epoch")


def test_sigterm_saves_and_says_so(series: Any) -> None:
    folder, done = series
    record = EvalRecord.load(folder / "record.json")
    assert record.status == "interrupted"
    assert record.error is not None
    assert "after step 5" in record.error["message"]
    assert "--resume" in record.error["message"]
    assert "resumed after step 5 of 14" in done[5]["stderr"]
    assert [row["step"] for row in read_log(folder / "log.jsonl")] == [2, 4]
    assert EvalRecord.load(folder / "runs" / "terminated").status == "success"


def test_retention(series: Any) -> None:
    left = sorted(path.name for path in (series[0] / "runs" / "killed" / "checkpoints").iterdir())
    assert left == ["step_00000009.pt", "step_00000012.pt", "step_00000014.pt"]


def test_finished_run_has_nothing_to_resume(series: Any, tmp_path: Path) -> None:
    shutil.copytree(series[0] / "runs" / "whole", tmp_path / "runs" / "whole")
    before = EvalRecord.load(tmp_path / "runs" / "whole")
    assert run(tmp_path, "--name", "whole", "--resume", "auto", *RUN, *KNN)["code"] == 0
    after = EvalRecord.load(tmp_path / "runs" / "whole")
    assert after.status == before.status == "success"
    measured = [{m["name"]: m["value"] for m in record.metrics if m["name"] != "hours"} for record in (after, before)]
    assert measured[0] == measured[1]
    assert "knn_top1" in measured[0]
    assert read_log(tmp_path / "runs" / "whole" / "log.jsonl") == read_log(series[0] / "runs" / "whole" / "log.jsonl")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prototypes", "48"], "prototypes (was 32, now 48)"),
        (["--width", "30"], "width (was 24, now 30)"),
        (["--arch", "vit_tiny"], "arch (was 'vit', now 'vit_tiny')"),
        (["--seed", "1"], "seed (was 0, now 1)"),
        (["--lr", "1e-3", "--epochs", "3"], "epochs (was 2, now 3), lr (was 0.0005, now 0.001)"),
        (["--train-per-class", "4"], "train_per_class (was 3, now 4)"),
    ],
)
def test_other_settings_are_refused(series: Any, tmp_path: Path, flags: list[str], said: str) -> None:
    copy = tmp_path / "runs" / "stopped"
    shutil.copytree(series[0] / "before", copy)
    checkpoints = {path: path.read_bytes() for path in copy.glob("checkpoints/*")}
    kept = {name: (copy / name).read_bytes() for name in ("log.jsonl", "record.json", "teacher.safetensors")}
    arguments = [*RUN, *KNN, *flags]
    if flags[0] == "--arch":
        for flag in ("--width", "--depth", "--heads"):
            del arguments[arguments.index(flag) : arguments.index(flag) + 2]
        said = "width (was 24, now None)"
    done = run(tmp_path, "--name", "stopped", "--resume", "auto", *arguments)
    assert done["code"] == 2
    assert said in done["stderr"]
    assert "other settings" in done["stderr"]
    assert {path: path.read_bytes() for path in copy.glob("checkpoints/*")} == checkpoints
    assert {name: (copy / name).read_bytes() for name in kept} == kept


def test_another_number_of_processes_is_refused(series: Any, tmp_path: Path) -> None:
    shutil.copytree(series[0] / "before", tmp_path / "runs" / "one")
    path = tmp_path / "runs" / "one" / "record.json"
    record = path.read_text()
    state_file = max((tmp_path / "runs" / "one" / "checkpoints").iterdir())
    state = torch.load(state_file, weights_only=True)
    state["settings"]["processes"] = 2
    torch.save(state, state_file)
    for text in (record.replace('"world_size": 1', '"world_size": 2'), None):
        # The checkpoint tells, too, should the record be lost.
        path.unlink() if text is None else path.write_text(text)
        done = run(tmp_path, "--name", "one", "--resume", "auto", *RUN, *KNN)
        assert done["code"] == 2
        assert "processes (was 2, now 1)" in done["stderr"]


def test_names_and_folders(series: Any, tmp_path: Path) -> None:
    shutil.copytree(series[0] / "before", tmp_path / "runs" / "taken")
    (tmp_path / "runs" / "empty").mkdir()

    def refused(*arguments: str) -> str:
        done = run(tmp_path, *arguments, *RUN, *KNN)
        assert done["code"] == 2
        return done["stderr"]

    assert "exists already" in (told := refused("--name", "taken"))
    assert "--resume auto" in told
    assert "--resume auto needs the --name" in refused("--resume", "auto")
    assert "no run to resume" in refused("--resume", "runs/nowhere")
    assert "no checkpoint to resume from" in refused("--resume", "runs/empty")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["empty", "taken"], "nothing new was made"


def test_damaged_newest_checkpoint_is_passed_over(series: Any, tmp_path: Path) -> None:
    shutil.copytree(series[0] / "runs" / "whole", tmp_path / "runs" / "whole")
    newest = tmp_path / "runs" / "whole" / "checkpoints" / "step_00000014.pt"
    newest.write_bytes(newest.read_bytes()[:-2000])
    done = Running(run, str(tmp_path), "--resume", "runs/whole", *RUN, *KNN).done()
    assert done.code == 0, done.stderr
    assert done.value["code"] == 0
    assert "damaged" in done.value["stderr"]
    assert "resumed after step 12 of 14" in done.value["stderr"]
    assert_same_end(tmp_path / "runs" / "whole", series[0] / "runs" / "whole")


ON_TWO = [*RUN, "--accumulate", "1", "--sharing", "semi-shared-2"]
"""As many images per step as :data:`RUN`."""
PLAIN = [*ON_TWO, "--drop-path", "0", "--lr", "0.02"]


def run_on_two(folder: str) -> list[dict[str, Any]]:
    return [run(folder, "--name", "whole", *ON_TWO), run(folder, "--name", "plain", *PLAIN)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds two runs of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    for rank in run_ranks(2, run_on_two, str(folder), timeout=120):
        assert [one["code"] for one in rank] == [0, 0], rank
    return folder


def test_two_ranks_do_what_one_does_with_a_batch_twice_as_large(two_ranks: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "--name", "one", *PLAIN, "--batch-size", "4")
    assert done["code"] == 0, done["stderr"]
    one, two = (
        torch.load(path / "checkpoints" / f"step_{STEPS:08d}.pt", weights_only=True)
        for path in (tmp_path / "runs" / "one", two_ranks / "runs" / "plain")
    )
    for name in ("cls.mean", "patch.mean"):
        torch.testing.assert_close(two["centres"][name], one["centres"][name], rtol=0, atol=1e-5)
    for role in ("student", "teacher"):
        for name, tensor in one[role].items():
            # A bias of keys has no effect, and its gradient is rounding.
            if not name.endswith("qkv.bias"):
                torch.testing.assert_close(
                    two[role][name], tensor, rtol=0, atol=1e-4, msg=lambda t, n=name: f"{n}: {t}"
                )
    rows = [
        [row for row in read_log(path / "log.jsonl") if "event" not in row]
        for path in (tmp_path / "runs" / "one", two_ranks / "runs" / "plain")
    ]
    for ours, theirs in zip(*rows, strict=True):
        for name in ("lr", "loss", "cls_loss", "patch_loss", "teacher_entropy", "kl", "gradient_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), (ours["step"], name)


def test_two_ranks_one_of_which_is_killed(two_ranks: Path, tmp_path: Path) -> None:
    """Killed, then continued by --launch local:2; against two ranks that were never stopped."""
    arguments = ON_TWO
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(free.getsockname()[1])
    step = min(KILLED_IN, STEPS - 1)
    ranks = [
        Running(run_killed, str(tmp_path), step, 1, "--name", "killed", *arguments, **world, RANK=r, LOCAL_RANK=r)
        for r in "01"
    ]
    done = [rank.done() for rank in ranks]
    assert done[1].code == -signal.SIGKILL
    assert done[0].code != -signal.SIGKILL, "the other rank must end by itself"
    assert done[0].code != 0 or done[0].value["code"] != 0
    resumed = ["--name", "killed", "--resume", "auto"]
    again = subprocess.run(
        [sys.executable, "-m", "ibot_eval", "pretrain", "--launch", "local:2", *resumed, *arguments],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "runs" / "killed", two_ranks / "runs" / "whole")
    assert _comparable(tmp_path / "runs" / "killed") == _comparable(two_ranks / "runs" / "whole")
    assert EvalRecord.load(tmp_path / "runs" / "killed").environment["world_size"] == 2


def assert_same_end(one: Path, other: Path) -> None:
    """Final checkpoints equal to the last bit, but for how long it took and what the run is called."""
    states = [torch.load(path / "checkpoints" / f"step_{STEPS:08d}.pt", weights_only=True) for path in (one, other)]
    for state in states:
        assert state.pop("seconds") > 0
        state["last"] = {name: value for name, value in state["last"].items() if name not in TIMES}
        state["settings"] = {n: v for n, v in state["settings"].items() if n not in loop.MAY_CHANGE}
    assert set(states[0]) >= {"student", "teacher", "centres", "optimiser", "random", "predictions", "step"}
    assert list(_differences(*states)) == []


def _differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            yield from _differences(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _differences(*pair, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        if not torch.equal(one, other):
            yield where
    elif one != other and not (one != one and other != other):
        yield f"{where}: {one} and {other}"


def _comparable(run: Path) -> list[dict[str, Any]]:
    return [{n: v for n, v in row.items() if n not in TIMES} for row in read_log(run / "log.jsonl")]
