"""Runs that were killed, terminated or stopped and go on as if nothing had happened; what may not change in between."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ibot_eval.record import EvalRecord
from ibot_eval.training.logs import read_log
from pretrain import train as loop
from tests.interrupting import EPOCH, KILLED_IN, RUN, STEPS, assert_same_end, comparable, run_killed, signalled
from tests.pretraining import run
from tests.ranks import Done, Running

KNN = ["--knn-every", "1", "--knn-per-class", "2"]


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
    done.append(run(folder, "--name", "terminated", "--stop-after", "1", *RUN, *KNN))
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
    rows, wanted = (comparable(series[0] / "runs" / run) for run in (name, "whole"))
    # A run that ends early logs the step that it ends with.
    extra = {"stopped": 7, "terminated": None}.get(name)
    rows = [row for row in rows if row["step"] != extra or "event" in row]
    assert rows == wanted
    assert [row["step"] for row in wanted if "event" not in row] == [2, 4, 6, 8, 10, 12, 14]
    assert [(row["step"], row["epoch"]) for row in wanted if row.get("event") == "epoch"] == [(7, 1), (14, 2)]
    # k-NN comes after the epoch's checkpoint, so it has a row of its own.
    for event, values in (("epoch", {"agreement", "nmi"}), ("knn", {"knn_top1"})):
        assert [row["epoch"] for row in wanted if row.get("event") == event and values <= row.keys()] == [1, 2]


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


def test_finished_run_without_its_networks_files_gets_them_back(series: Any, tmp_path: Path) -> None:
    """As after a kill between the last checkpoint and its networks."""
    folder = tmp_path / "runs" / "whole"
    shutil.copytree(series[0] / "runs" / "whole", folder)
    names = ("teacher.safetensors", "student.safetensors")
    before = {name: load_file(folder / name) for name in names}
    for name in names:
        (folder / name).unlink()
    assert run(tmp_path, "--name", "whole", "--resume", "auto", *RUN, *KNN)["code"] == 0
    for name in names:
        after = load_file(folder / name)
        assert after.keys() == before[name].keys()
        assert all(torch.equal(after[key], before[name][key]) for key in after)
    assert {item["path"] for item in EvalRecord.load(folder).artifacts} >= set(names)


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
    # The checkpoint tells, too.
    for text in (record.replace('"world_size": 1', '"world_size": 2'), record):
        path.write_text(text)
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
    assert "not a pre-training run" in refused("--resume", "runs/empty")
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
