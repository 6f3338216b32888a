"""Runs that a signal ends somewhere, and whether two runs ended alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibot_eval import distributed
from ibot_eval.training.logs import read_log
from pretrain import train as loop
from tests.pretraining import FLAGS, run

# Seven steps of two passes in an epoch; two epochs. Drop path draws from torch's generator in every step.
RUN = [*FLAGS, "--accumulate", "2", "--drop-path", "0.1", "--save-steps", "3", "--log-every", "2"]
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


def comparable(run: Path) -> list[dict[str, Any]]:
    return [{n: v for n, v in row.items() if n not in TIMES} for row in read_log(run / "log.jsonl")]
