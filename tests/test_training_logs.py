from __future__ import annotations

import json
import math
import os
import resource
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ibot_eval import distributed
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.training.logs import TrainingLog, read_log
from tests.ranks import Running, run_ranks


def log(folder: Path, *steps: int) -> Path:
    writer = TrainingLog(folder)
    for step in steps:
        writer.write(step, {"loss": step / 3})
    writer.close()
    return writer.path


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_log(path)]


def test_round_trip(tmp_path):
    writer = TrainingLog(tmp_path / "new" / "run")
    values = {"loss": 1 / 3, "epoch": 2, "event": "epoch", "knn": None, "lr": np.float32(0.1), "n": np.int64(7)}
    writer.write(5, values)
    writer.write(6, {"loss": math.nan, "kl": math.inf, "norm": -math.inf})
    assert read_log(writer.path) == [
        {"step": 5, **values, "lr": float(np.float32(0.1))},
        {"step": 6, "loss": None, "kl": None, "norm": None},
    ], "readable while it is still open"
    assert '"n": 7}' in writer.path.read_text()
    for line in writer.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON, without NaN


def test_a_second_process_appends(tmp_path):
    log(tmp_path, 1, 2)
    assert steps_of(log(tmp_path, 3)) == [1, 2, 3]


def test_a_torn_last_line(tmp_path):
    path = log(tmp_path, 1, 2)
    whole = path.read_bytes()
    for length in range(len(whole) // 2 + 1, len(whole)):
        path.write_bytes(whole[:length])
        assert steps_of(path) == [1]
        assert steps_of(log(tmp_path, 7)) == [1, 7], "a line after a torn one is whole"


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"step": "1"}', "null", "\0\0"])
def test_other_damage_is_named(tmp_path, line):
    path = log(tmp_path, 1)
    path.write_text(path.read_text() + line + '\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2 of the training log"):
        read_log(path)


def test_no_log(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_log(tmp_path / "log.jsonl")


def test_truncation_on_resume(tmp_path):
    path = log(tmp_path, 1, 2, 3)
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 4, "lo')
    writer = TrainingLog(tmp_path)
    writer.truncate(2)
    assert before.startswith(path.read_bytes())
    assert steps_of(path) == [1, 2]
    writer.write(3, {"loss": 9.0})
    writer.truncate(2)
    writer.write(3, {"loss": 8.0})
    assert read_log(path)[2:] == [{"step": 3, "loss": 8.0}]
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_truncation_of_nothing(tmp_path):
    writer = TrainingLog(tmp_path / "run")
    writer.truncate(5)
    assert not writer.path.parent.exists()


def write_beyond_the_limit(folder: str) -> list[Any]:
    writer = TrainingLog(Path(folder))
    writer.write(1, {"loss": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        for step in range(2, 999):
            writer.write(step, {"loss": 1.0})
    except ConfigError as error:
        return [str(error), steps_of(writer.path)]
    return []


def test_a_file_that_cannot_grow(tmp_path):
    done = Running(write_beyond_the_limit, str(tmp_path)).done()
    assert done.code == 0, done.stderr
    text, steps = done.value
    assert "the training log cannot be written: File too large" in text
    assert "then give the same command again (pretrain goes on with --resume auto)" in text
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 50
    assert steps_of(log(tmp_path, 999)) == [*steps, 999]


class _Writer:
    """Stands for TensorBoard's, whose package is optional."""

    made: ClassVar[list[_Writer]] = []

    def __init__(self, folder: str, purge_step: int | None) -> None:
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(_Writer, "made", [])
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = _Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    TrainingLog(tmp_path).write(1, {"loss": 1.0})
    assert not _Writer.made
    writer = TrainingLog(tmp_path, tensorboard=True)
    writer.truncate(3)
    writer.write(4, {"loss": 0.5, "event": "epoch", "kl": math.nan, "epoch": 2, "knn": None})
    writer.close()
    (made,) = _Writer.made
    assert made.scalars == [("loss", 0.5, 4), ("epoch", 2, 4)]
    assert (made.folder, made.purge_step, made.closed) == (str(tmp_path / "tensorboard"), 4, True)


def test_tensorboard_itself(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TrainingLog(tmp_path, tensorboard=True)
    writer.write(4, {"loss": 0.5, "event": "epoch"})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(4, 0.5)]


def test_without_tensorboard_a_notice_comes_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    writer = TrainingLog(tmp_path, tensorboard=True)
    for step in (1, 2):
        writer.write(step, {"loss": 1.0})
    assert capsys.readouterr().err.count("TensorBoard is not installed") == 1
    assert steps_of(writer.path) == [1, 2]


def log_on_every_rank(folder: str) -> int:
    distributed.init("cpu")
    writer = TrainingLog(Path(folder), tensorboard=True)
    writer.truncate(1)
    writer.write(2, {"rank": distributed.rank()})
    distributed.barrier()
    return len(read_log(writer.path))


def test_one_rank_writes(tmp_path):
    path = log(tmp_path, 1, 2, 3)
    assert run_ranks(2, log_on_every_rank, str(tmp_path)) == [2, 2]
    assert read_log(path)[1:] == [{"step": 2, "rank": 0}]
