"""Checkpoints of mmengine are read, and nothing in them runs."""

from __future__ import annotations

import functools
import importlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval.errors import CheckpointError
from protocols.openmmlab import state_files
from tests.dense import prepared


def save(path: Path, **contents: Any) -> Path:
    torch.save({"state_dict": OrderedDict(weight=torch.arange(3.0)), **contents}, path)
    return path


def test_a_file_with_mmengines_history_is_read(tmp_path: Path) -> None:
    prepared()
    history = importlib.import_module("mmengine.logging").HistoryBuffer([3.0, 2.0], [1, 1])
    hub = {"log_scalars": OrderedDict(loss=history), "runtime_info": {"iter": 2, "best": np.float64(0.5)}}
    path = save(tmp_path / "iter_2.pth", meta={"dataset_meta": {"classes": ("a", "b")}}, message_hub=hub)
    with pytest.raises(Exception, match="HistoryBuffer"):
        torch.load(path, weights_only=True)
    contents = state_files.read(path)
    assert contents["state_dict"]["weight"].tolist() == [0, 1, 2]
    assert contents["meta"] == {"dataset_meta": {"classes": ("a", "b")}}
    values = contents["message_hub"]["log_scalars"]["loss"]
    assert isinstance(values, state_files.PastValues)
    assert vars(values)["_log_history"].tolist() == [3, 2]
    assert contents["message_hub"]["runtime_info"] == {"iter": 2, "best": 0.5}


def test_what_a_runner_of_mmengine_saves_is_read(tmp_path: Path) -> None:
    prepared()
    engine: Any = importlib.import_module("mmengine.runner")
    models: Any = importlib.import_module("mmengine.model")

    class Line(models.BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> Any:
            return {"loss": self.linear(inputs).square().mean()}

    engine.Runner(
        Line(),
        work_dir=str(tmp_path),
        train_dataloader={
            "batch_size": 2,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "dataset": [{"inputs": torch.ones(1)}] * 4,
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": False, "max_iters": 2},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.1}},
        param_scheduler={"type": "PolyLR", "by_epoch": False, "end": 2},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 2}},
        experiment_name="state_files",
        log_level="ERROR",
    ).train()
    contents = state_files.read(tmp_path / "iter_2.pth")
    assert set(contents) >= {"state_dict", "meta", "optimizer", "param_schedulers", "message_hub"}
    assert set(contents["state_dict"]) == {"linear.weight", "linear.bias"}
    assert len(contents["optimizer"]["state"]) == 2


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    "code",
    [
        lambda marker: Runs(os.mkdir, marker),
        lambda marker: Runs(getattr, Path, "mkdir"),
        lambda marker: Runs(getattr, OrderedDict, "fromkeys"),
        lambda marker: Runs(getattr, torch.Tensor, "__class__"),
        lambda marker: Runs(functools.partial, os.mkdir, marker),
    ],
)
def test_code_in_a_file_does_not_run(tmp_path: Path, code: Any) -> None:
    marker = tmp_path / "ran"
    path = save(tmp_path / "bad.pth", meta=code(str(marker)))
    with pytest.raises(CheckpointError):
        state_files.read(path)
    assert not marker.exists()


def test_getattr_gives_methods_of_the_history_only() -> None:
    assert state_files._named(state_files.PastValues, "mean").name == "mean"
    for owner, name in (
        (state_files.PastValues, "__init__"),
        (OrderedDict, "fromkeys"),
        (state_files.PastValues(), "mean"),
    ):
        with pytest.raises(Exception, match="HistoryBuffer only"):
            state_files._named(owner, name)


def test_the_allow_list_is_not_left_open(tmp_path: Path) -> None:
    before = torch.serialization.get_safe_globals()
    state_files.read(save(tmp_path / "good.pth"))
    with pytest.raises(CheckpointError):
        state_files.read(save(tmp_path / "bad.pth", meta=Runs(getattr, Path, "mkdir")))
    assert torch.serialization.get_safe_globals() == before


def test_files_that_are_no_checkpoints_of_mmengine(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        state_files.read(tmp_path / "missing.pth")
    (tmp_path / "empty.pth").touch()
    with pytest.raises(CheckpointError, match="empty"):
        state_files.read(tmp_path / "empty.pth")
    whole = save(tmp_path / "whole.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        state_files.read(tmp_path / "half.pth")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "bare.pth")
    torch.save(torch.zeros(1), tmp_path / "tensor.pth")
    save(tmp_path / "numbers.pth", state_dict={"weight": 1.0})
    for name in ("bare", "tensor", "numbers"):
        with pytest.raises(CheckpointError, match="no state_dict of tensors"):
            state_files.read(tmp_path / f"{name}.pth")
