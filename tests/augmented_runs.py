"""Runs of linear-augment: on the fakes, on ranks, and broken off. Imports little, for processes that start often."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ibot_eval import distributed
from ibot_eval.data.splits import Data, ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError
from ibot_eval.probes import augmented_probe
from ibot_eval.probes.sweep import Sweep
from ibot_eval.protocol import Event, Metric, Predictions, Session, Warning
from ibot_eval.record import EvalRecord
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings
from protocols.linear_augment import LinearAugment, LinearAugmentConfig
from tests.fakes import TRANSFORM, FakeBackbone, FakeSplit

RATES = (0.03, 0.3, 3.0)
CONFIG = LinearAugmentConfig(features="last4", blocks=(-3, -1), epochs=3, batch=7, lrs=RATES)
DEMO = {"epochs": 3, "lrs": (0.01, 0.1, 0.5), "batch": 16, "save_head": True}


def session(
    output: Path, train: ImageSplit, test: ImageSplit, transform: EvalTransform = TRANSFORM, **engine: Any
) -> Session:
    """With settings of the engine and, among them, seed, sha256 and bad_images."""
    names = tuple(str(label) for label in range(1 + int(max(train.labels.max(), test.labels.max()))))
    output.mkdir(exist_ok=True)
    return Session(
        torch.device("cpu"),
        output,
        names,
        seed=engine.pop("seed", 0),
        data=Data("fake", names, {"train": train, "test": test}, {"train": "train", "test": "test"}),
        progress=False,
        checkpoint={"sha256": engine.pop("sha256", "a" * 64), "reference": "fake.pth"},
        transform=transform,
        data_settings=DataSettings(bad_images=engine.pop("bad_images", "stop")),
        engine=EngineSettings(**({"device": "cpu", "workers": 0} | engine)),
    )


def run(
    config: LinearAugmentConfig, where: Session, backbone: Any = None
) -> tuple[dict[str, Metric], Predictions, list[str], list[Event]]:
    """Metrics by name, predictions, warnings, and all events."""
    events = list(LinearAugment(config).run(backbone or FakeBackbone(), where))
    metrics = {event.name: event for event in events if isinstance(event, Metric)}
    (predictions,) = [event for event in events if isinstance(event, Predictions)]
    return metrics, predictions, [event.message for event in events if isinstance(event, Warning)], events


class Failed(Exception):
    pass


def fail() -> None:
    raise Failed


@contextmanager
def disturbed(at: int | None, action: Callable[[], None]) -> Iterator[None]:
    """``action`` is called in the middle of step ``at``, from 1."""
    calls, step = iter(range(1, 10**9)), Sweep.step

    def disturbed_step(self: Sweep, *arguments: Any) -> None:
        if next(calls) == at:
            action()
        step(self, *arguments)

    with mock.patch.object(Sweep, "step", disturbed_step):
        yield


def run_on_ranks(folder: str, images: int, bad: list[int], fails_at: int | None = None) -> dict[str, Any]:
    """What a run gives that failed once and was gone on with, and what is said to ranks of different seeds."""
    distributed.init("cpu")
    where = session(Path(folder), FakeSplit(images, bad=bad), FakeSplit(25, "test"), bad_images="skip", batch_size=2)
    config = LinearAugmentConfig(**{**vars(CONFIG), "save_head": True, "lrs": RATES[:2], "save_minutes": 0})
    if fails_at is not None:
        with disturbed(fails_at, fail), suppress(Failed):
            run(config, where)
        assert (where.output / "training").is_dir()
    metrics, predictions, warnings, _ = run(config, where)
    refused = ""
    try:
        run(config, session(where.output / "other", FakeSplit(9), FakeSplit(9, "test"), seed=distributed.rank()))
    except ConfigError as error:
        refused = error.what
    return {
        "refused": refused,
        "metrics": [[m.name, m.value, dict(m.params)] for m in metrics.values()],
        "predicted": predictions.values["top1"].tolist(),
        "warnings": warnings,
    }


def demo_run(folder: str, name: str, die_at: int | None = None, number: int = signal.SIGKILL, **changes: Any) -> None:
    """Digits through the runner, states after every third step; a signal ends step ``die_at`` in its middle."""
    from ibot_eval import runner

    clock = iter(range(0, 10**9, 60))
    per_class, bad_images = changes.pop("train_per_class", 8), changes.pop("bad_images", "stop")
    settings = RunSettings(
        CheckpointSettings(ckpt="demo"),
        DataSettings(data="demo", train_per_class=per_class, test_per_class=10, bad_images=bad_images),
        EngineSettings(device="cpu", workers=changes.pop("workers", 0), seed=changes.pop("seed", 0)),
        OutputSettings(output=Path(folder), name=name),
    )
    config = LinearAugmentConfig(**{**DEMO, "save_minutes": 3, **changes})
    with (
        mock.patch.object(augmented_probe, "time", SimpleNamespace(monotonic=lambda: next(clock))),
        disturbed(die_at, lambda: os.kill(os.getpid(), number)),
    ):
        runner.run("linear-augment", LinearAugment(config), settings)


def broken_off(folder: str) -> list[str]:
    """SIGTERM leaves an exception in the process; then everything that is gone on with, one after the other."""
    from ibot_eval.interruption import Interrupted

    said = []
    try:
        demo_run(folder, "terminated", 12, signal.SIGTERM)
    except Interrupted:
        said.append(EvalRecord.load(Path(folder) / "terminated").status)
    shutil.copytree(Path(folder) / "killed", Path(folder) / "copy")
    for name, workers in (("whole", 0), ("killed", 1), ("terminated", 0)):
        demo_run(folder, name, workers=workers)
    return said
