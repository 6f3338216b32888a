"""Small fine-tuning runs, on ranks and broken off too. Imports little, for processes that start often."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ibot_eval import distributed
from ibot_eval.checkpoint import LoadedCheckpoint
from ibot_eval.data.splits import Data, ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import BadImage, UserError
from ibot_eval.finetuning import train as loop
from ibot_eval.finetuning.config import FinetuneConfig
from ibot_eval.own_network import from_module
from ibot_eval.protocol import Event, Metric, Session
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings
from protocols.finetune import Finetune
from tests import layouts

SIDE = 32
TRANSFORM = EvalTransform(SIDE, SIDE, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
CONFIG = FinetuneConfig(
    epochs=3, train_batch=4, accumulate=2, lr=2e-3, scale_lr=False, warmup_epochs=1, drop_path=0.2, head_scale=1.0
)
"""Of 21 images, two steps per epoch."""
STEPS = 6


class Colours(ImageSplit):
    """Images of noise around a colour per class, the same in every process."""

    def __init__(self, labels: Sequence[int], name: str = "train", bad: Sequence[int] = ()) -> None:
        self.name, self.bad = name, frozenset(bad)
        self.numbers = np.arange(len(labels))
        self.labels = np.asarray(labels, dtype=np.int64)
        self.image_ids = [f"{name}/{i:03d}.png" for i in self.numbers]

    def _fingerprint(self) -> str:
        return f"{self.name} {self.numbers.tolist()} {self.labels.tolist()}"

    def load(self, i: int) -> Image.Image:
        number, label = int(self.numbers[i]), int(self.labels[i])
        if number in self.bad:
            raise BadImage(f"{self.image_ids[i]} cannot be decoded")
        colour = 255 * np.random.default_rng(label).random(3)
        noise = np.random.default_rng([number, len(self.name)]).normal(0, 40, (SIDE, SIDE, 3))
        return Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8))

    def take(self, indices: Sequence[int] | np.ndarray) -> Colours:
        taken = Colours(self.labels[indices].tolist(), self.name, tuple(self.bad))
        taken.numbers = self.numbers[indices]
        taken.image_ids = [self.image_ids[int(i)] for i in indices]
        return taken


def labels(images: int, classes: int = 3) -> list[int]:
    return [i % classes for i in range(images)]


def loaded() -> LoadedCheckpoint:
    """A ViT of width 48 with two blocks, as if it came from a file."""
    torch.manual_seed(0)
    return from_module(layouts.vit())


def session(
    output: Path, train: ImageSplit, test: ImageSplit, checkpoint: LoadedCheckpoint | None = None, **engine: Any
) -> Session:
    """With settings of the engine and, among them, seed, sha256 and bad_images."""
    names = tuple(f"class {label}" for label in range(1 + int(max(train.labels.max(), test.labels.max()))))
    output.mkdir(exist_ok=True, parents=True)
    seed = engine.pop("seed", 0)
    return Session(
        torch.device("cpu"),
        output,
        names,
        seed=seed,
        data=Data("colours", names, {"train": train, "test": test}, {"train": "train", "test": "test"}),
        progress=False,
        checkpoint={"sha256": engine.pop("sha256", "a" * 64), "reference": "tiny.pth"},
        transform=TRANSFORM,
        data_settings=DataSettings(bad_images=engine.pop("bad_images", "stop")),
        engine=EngineSettings(**({"device": "cpu", "workers": 0, "seed": seed} | engine)),
        loaded=checkpoint or loaded(),
    )


def run(config: FinetuneConfig, where: Session) -> list[Event]:
    assert where.loaded is not None
    return list(Finetune(config).run(where.loaded.backbone, where))


def metrics(events: Sequence[Event]) -> dict[str, Metric]:
    """Those that are not of a single class."""
    return {e.name: e for e in events if isinstance(e, Metric) and e.name != "per_class_top1"}


class Failed(Exception):
    pass


@contextmanager
def disturbed(step: int | None, number: int | None = None) -> Iterator[None]:
    """A signal comes, or without a number an error, between forward and backward pass of step ``step``, from 1."""
    clip, calls = loop.Parallel.clip_, iter(range(1, 10**9))

    def disturbed_clip(self: Any, limit: float) -> Tensor:
        if next(calls) == step:
            if number is None:
                raise Failed
            os.kill(os.getpid(), number)
        return clip(self, limit)

    with mock.patch.object(loop.Parallel, "clip_", disturbed_clip):
        yield


@contextmanager
def ending_before_its_report() -> Iterator[None]:
    """An error once all steps are done and saved."""
    with mock.patch.object(loop, "Outcome", side_effect=Failed):
        yield


def demo_run(
    folder: str, name: str, die_in: int | None = None, number: int = signal.SIGKILL, **changes: Any
) -> dict[str, Any]:
    """Digits through the runner, a state after every second step; a signal comes in step ``die_in``, from 1."""
    from ibot_eval import runner

    engine = {key: changes.pop(key) for key in ("seed", "workers", "precision") if key in changes}
    per_class = changes.pop("train_per_class", 5)
    settings = RunSettings(
        CheckpointSettings(ckpt="demo"),
        DataSettings(data="demo", train_per_class=per_class, test_per_class=6),
        EngineSettings(**({"device": "cpu", "workers": 0} | engine)),
        OutputSettings(output=Path(folder), name=name),
    )
    config = FinetuneConfig(**{**DEMO, **changes})
    clock = iter(range(10**9))
    ticking = SimpleNamespace(perf_counter=lambda: next(clock))
    with mock.patch.object(loop, "time", ticking), disturbed(die_in, number):
        record = runner.run("finetune", Finetune(config), settings)
    return record.as_dict()


DEMO: dict[str, Any] = {
    **{"epochs": 3, "train_batch": 7, "accumulate": 2, "warmup_epochs": 1, "drop_path": 0.2, "ema": 0.9},
    **{"hold_out": 0.2, "save_minutes": 0.05, "log_every": 1, "lr": 0.02},
}
"""Of 40 images two steps of 14 per epoch. The clock of :func:`demo_run` goes a second further at each look."""


def broken_off(folder: str) -> str:
    """A run that SIGTERM stops is gone on with in the same process; what the exception said."""
    from ibot_eval.interruption import Interrupted

    said = ""
    try:
        demo_run(folder, "terminated", 3, signal.SIGTERM)
    except Interrupted as error:
        said = str(error)
    demo_run(folder, "terminated")
    return said


def on_ranks(folder: str, fsdp: bool, fails_in: int | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Values and parameters of the metrics of a run, perhaps broken off twice and gone on with."""
    distributed.init("cpu")
    changes = dict(changes)
    train, test = Colours(labels(21), bad=changes.pop("bad", ())), Colours(labels(11), "test")
    where = session(Path(folder), train, test, bad_images=changes.pop("bad_images", "skip"), batch_size=2)
    config = FinetuneConfig(**{**vars(CONFIG), "save_minutes": 0, "fsdp": fsdp, **changes})
    if fails_in is not None:
        with disturbed(fails_in), suppress(Failed):
            run(config, where)
        with ending_before_its_report(), suppress(Failed):
            run(config, where)
    try:
        events = run(config, where)
    except UserError as error:
        return {"error": error.what}
    return {m.name: [m.value, dict(m.params)] for m in metrics(events).values()}
