"""ibot_eval.training.checkpoints: kills, full disks, damage, retention, ranks."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ibot_eval import distributed
from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.parameter_groups import parameter_groups
from ibot_eval.training.random_states import random_state, restore_random_state
from ibot_eval.training.updates import adamw, clip_each_, set_rates
from tests.ranks import Running, run_ranks

CPU = torch.device("cpu")


def state(step: int, size: int = 1000) -> dict[str, Any]:
    """Every element tells which step it belongs to, so a mixture of two states would show."""
    return {"weights": torch.full((size,), float(step)), "inner": {"step": step, "list": [step, "text", None, (1.5,)]}}


def assert_whole(step: int, found: dict[str, Any], size: int = 1000) -> None:
    expected = state(step, size)
    assert torch.equal(found.pop("weights"), expected.pop("weights"))
    assert found == expected


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "bit":
        place = data.find(torch.full((1000,), 3.0).numpy().tobytes())
        assert place > 0
        data[place + 1000] ^= 1
    elif kind == "end":
        del data[len(data) // 2 :]
    elif kind == "empty":
        data.clear()
    elif kind == "text":
        data[:] = b"<html>not found</html>"
    path.write_bytes(data)


def test_nothing_saved_yet(tmp_path):
    store = TrainingCheckpoints(tmp_path / "none")
    assert store.steps() == []
    assert store.latest() is None
    assert not store.folder.exists(), "looking makes no folder"


def test_round_trip_and_retention(tmp_path):
    store = TrainingCheckpoints(tmp_path / "states", keep=2)
    for step in (0, 9, 10, 123_456_789_012):
        path = store.save(step, state(step))
        assert path.is_file()
        found = store.latest()
        assert found is not None
        assert found[0] == step
        assert_whole(*found)
    assert store.steps() == [10, 123_456_789_012]
    assert sorted(p.name for p in store.folder.iterdir()) == ["step_00000010.pt", "step_123456789012.pt"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = TrainingCheckpoints(tmp_path, keep=2)
    for step in (1, 2):
        store.save(step, state(0))
    store.save(2, state(2))
    assert store.steps() == [1, 2]
    assert_whole(*store.latest())


def test_other_files_are_left_alone(tmp_path):
    names = ["step_.pt", "step_5.pth", "step_00000001.pt.bak", "notes.txt", ".other.tmp"]
    for name in names:
        (tmp_path / name).write_text("mine")
    store = TrainingCheckpoints(tmp_path, keep=1)
    for step in (1, 2, 3):
        store.save(step, state(step))
    assert store.steps() == [3]
    assert {p.name for p in tmp_path.iterdir()} == {*names, "step_00000003.pt"}


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--keep 0"):
        TrainingCheckpoints(tmp_path, keep=0)


@pytest.mark.parametrize("kind", ["bit", "end", "empty", "text"])
def test_a_damaged_newest_state_is_passed_over(tmp_path, capsys, kind):
    store = TrainingCheckpoints(tmp_path, keep=2)
    for step in (2, 3):
        store.save(step, state(step))
    damage(store.path(3), kind)
    if kind == "bit":
        torch.load(store.path(3), weights_only=True)  # which is why the checksums are looked at
    step, found = store.latest()
    assert step == 2
    assert_whole(2, found)
    warning = capsys.readouterr().err
    assert str(store.path(3)) in warning
    assert warning.count("\n") == 1
    assert store.steps() == [2, 3], "looking deletes nothing"


def test_a_damaged_state_takes_no_good_one_s_place(tmp_path):
    store = TrainingCheckpoints(tmp_path, keep=2)
    store.save(2, state(2))
    store.path(5).write_bytes(b"damaged")
    assert store.latest()[0] == 2
    store.save(4, state(4))
    assert store.steps() == [2, 4]
    assert_whole(*store.latest())


def test_nothing_but_damaged_states(tmp_path):
    store = TrainingCheckpoints(tmp_path)
    for step in (1, 2):
        store.path(step).write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the 2 training states"):
        store.latest()


class _FullDisk:
    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


@pytest.mark.parametrize("room", [0, 100, 3000, 5000])
def test_a_full_disk_leaves_the_earlier_states(tmp_path, monkeypatch, room):
    store = TrainingCheckpoints(tmp_path, keep=1)
    store.save(1, state(1))
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda value, file: save(value, _FullDisk(file, room)))
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written: No space left on device; .*steps \[1\]"):
        store.save(2, state(2))
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"], "no remains"
    assert_whole(*store.latest())
    store.save(2, state(2))
    assert store.steps() == [2]


def test_fewer_states_make_room_before_the_next_is_written(tmp_path, monkeypatch):
    """A disk that three states fill: --keep 1 is the advice, and has to help."""
    for step in (1, 2, 3):
        TrainingCheckpoints(tmp_path, keep=3).save(step, state(step))
    there = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *a, **k: (there.append(sorted(tmp_path.glob("step_*"))), save(*a, **k)))
    TrainingCheckpoints(tmp_path, keep=1).save(4, state(4))
    assert [path.name for path in there[0]] == ["step_00000003.pt"]
    assert TrainingCheckpoints(tmp_path, keep=1).steps() == [4]


@pytest.mark.parametrize("keep", [1, 3])
def test_a_full_disk_says_what_to_do_for_every_command_that_trains(tmp_path, monkeypatch, keep):
    """Only pretrain has --resume, and those that keep one state only have no --keep."""
    monkeypatch.setattr(torch, "save", _refuse)
    with pytest.raises(CheckpointError) as caught:
        TrainingCheckpoints(tmp_path, keep=keep).save(1, state(1))
    assert caught.value.todo is not None
    assert "then give the same command again (pretrain goes on with --resume auto)" in caught.value.todo
    assert ("--keep 1" in caught.value.todo) == (keep > 1)


def save_beyond_the_limit(folder: str) -> list[Any]:
    store = TrainingCheckpoints(Path(folder))
    store.save(1, state(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        store.save(2, state(2, size=100_000))
    except CheckpointError as error:
        return [str(error), store.steps(), store.latest()[0], os.listdir(folder)]
    return []


def test_a_file_that_the_system_refuses_to_grow(tmp_path):
    done = Running(save_beyond_the_limit, str(tmp_path)).done()
    assert done.code == 0, done.stderr
    text, steps, latest, files = done.value
    assert os.strerror(errno.EFBIG) in text
    assert (steps, latest, files) == ([1], 1, ["step_00000001.pt"])


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="none was saved before"):
        TrainingCheckpoints(tmp_path / "file" / "states").save(1, state(1))


def test_what_cannot_be_saved_is_our_fault_and_changes_nothing(tmp_path):
    store = TrainingCheckpoints(tmp_path, keep=1)
    store.save(1, state(1))
    with pytest.raises(AttributeError):
        store.save(2, {"function": lambda: None})
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"]


def save_for_ever(folder: str, done: str, step: int) -> None:
    store = TrainingCheckpoints(Path(folder), keep=2)
    with open(done, "a") as file:
        while True:
            step += 1
            store.save(step, state(step, 400_000))
            print(step, file=file, flush=True)


def test_killed_at_any_moment_of_a_save(tmp_path):
    store, done, interrupted = TrainingCheckpoints(tmp_path / "states", keep=2), tmp_path / "done", 0
    done.touch()
    for attempt in range(8):
        before = done.read_text().count("\n")
        saving = Running(save_for_ever, str(store.folder), str(done), max(store.steps(), default=0))
        deadline = time.monotonic() + 30
        while done.read_text().count("\n") == before and time.monotonic() < deadline:
            time.sleep(0.001)
        # Most kills come while a file is being written, each at another place in it.
        while not list(store.folder.glob(".step_*.tmp")) and time.monotonic() < deadline:
            pass
        time.sleep(0.0005 * attempt)
        assert saving.process.pid is not None
        os.kill(saving.process.pid, signal.SIGKILL)
        assert saving.done().code == -signal.SIGKILL
        saved = [int(line) for line in done.read_text().split()]
        assert len(saved) > before
        interrupted += bool(list(store.folder.glob(".step_*.tmp")))
        found = store.latest()
        assert found is not None
        assert found[0] >= saved[-1], "what was reported as saved is there"
        assert found[0] == max(store.steps()), "no file under its final name is ever damaged"
        assert_whole(*found, 400_000)
        assert len(store.steps()) <= 3
    assert interrupted, "no kill hit a save"
    store.save(10**6, state(0))
    assert not list(store.folder.glob(".*")), "what killed saves left is removed"


def draws(device: torch.device = CPU) -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
    ]


def test_random_states_survive_a_file(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draws()  # leaves second halves of Gaussian pairs behind, which are part of the state
    store = TrainingCheckpoints(tmp_path)
    store.save(1, {"random": random_state(CPU)})
    expected = draws()
    assert draws() != expected
    restore_random_state(store.latest()[1]["random"], CPU)
    assert draws() == expected


def test_taking_the_state_draws_nothing():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    random_state(CPU)
    assert torch.equal(torch.rand(2), expected)


def test_a_resumed_loop_makes_the_same_steps(tmp_path):
    """Module, optimiser and random state through a file: the next weights are equal to the last bit."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 4))
        return module, adamw(parameter_groups(module))

    def steps(module: nn.Module, optimiser: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            set_rates(optimiser, 1e-3 * (step + 1), 0.1 * step)
            optimiser.zero_grad()
            module(torch.randn(5, 8)).square().mean().backward()
            clip_each_(module.parameters(), 0.1)
            optimiser.step()

    module, optimiser = build(0)
    steps(module, optimiser, 0, 3)
    saved = {"module": module.state_dict(), "optimiser": optimiser.state_dict(), "random": random_state(CPU)}
    TrainingCheckpoints(tmp_path).save(3, saved)
    steps(module, optimiser, 3, 6)

    again, other = build(1)
    step, found = TrainingCheckpoints(tmp_path).latest()
    again.load_state_dict(found["module"])
    other.load_state_dict(found["optimiser"])
    restore_random_state(found["random"], CPU)
    steps(again, other, step, 6)
    for name, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def on_every_rank(folder: str) -> dict[str, Any]:
    distributed.init("cpu")
    rank = distributed.rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    store = TrainingCheckpoints(Path(folder), keep=1)
    out: dict[str, Any] = {"empty": store.latest() is None}
    store.save(7, {"random": distributed.gather_objects(random_state(CPU)), "writer": rank})
    store.save(8, {"random": distributed.gather_objects(random_state(CPU)), "writer": rank})
    out["first"] = draws()
    step, found = store.latest()
    out |= {"step": step, "writer": found["writer"], "steps": store.steps()}
    restore_random_state(found["random"][rank], CPU)
    out["again"] = draws()

    def message() -> str:
        try:
            store.save(9, {})
        except CheckpointError as error:
            return str(error)
        return ""

    if rank == 0:
        torch.save = _refuse
    out["refused"] = message()
    # A file that one rank alone does not see.
    distributed.barrier()
    if rank == 1:
        store.folder = store.folder / "elsewhere"
    try:
        store.latest()
    except CheckpointError as error:
        out["unseen"] = str(error)
    return out


def _refuse(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_two_ranks(tmp_path):
    first, second = run_ranks(2, on_every_rank, str(tmp_path))
    for one in (first, second):
        assert one["empty"]
        assert (one["step"], one["writer"], one["steps"]) == (8, 0, [8])
        assert one["again"] == one["first"]
        assert "No space left" in one["refused"]
        assert re.search(r"rank 1 cannot read .*elsewhere", one["unseen"], re.DOTALL)
    assert first["first"] != second["first"], "each rank has a state of its own"
