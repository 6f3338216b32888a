"""One fine-tuning step against the bare forward pass, backward pass and optimiser, within one run; and the data's wait.

    python tests/benchmarks/bench_finetune.py [--arch vit_small_patch16_224] [--size 224] [--batch 16] [--steps 20] \
        [--threads 2] [--device cpu] [--precision fp32] [--data FOLDER --workers 2]

The first part runs the product's own loop (ibot_eval.finetuning.train) on batches that lie in memory. Whenever it asks
for its next batch, its last step is timed, and then a bare step of the same network on as many images: forward pass,
soft cross entropy, backward pass, AdamW over all parameters in one group. So both take turns, and only data loading is
left out; normalising, erasing, mixing, layer-wise rates, the watch for NaN and the log belong to our step.

With --data the second part is a run on the images of that folder: which share of its time it waits for batches, and how
many images a second the loader makes alone and the bare step takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import repository  # noqa: F401
import torch
from timm.loss.cross_entropy import SoftTargetCrossEntropy

from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import Data, ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.finetuning import train as loop
from ibot_eval.finetuning.augmentation import TrainTransform
from ibot_eval.finetuning.config import FinetuneConfig
from ibot_eval.finetuning.loader import Batch, training_loader
from ibot_eval.finetuning.network import build_classifier
from ibot_eval.finetuning.run import finetune
from ibot_eval.own_network import from_module
from ibot_eval.protocol import Metric, Session
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings
from ibot_eval.training.logs import read_log
from tests import layouts
from tests.finetuning_runs import Colours

ALLOWED, WAIT = 5.0, 5.0
"""Percent: by how much our step may be slower, and how long data may be waited for."""
WARM_UP = 3
"""Steps that are not counted."""


class Turns:
    """The batches of the product's loop, with a bare step before each; what both take, in seconds."""

    def __init__(self, bare: Callable[[], None], batch: Batch, steps: int, device: torch.device) -> None:
        self.bare, self.batch, self.steps, self.device = bare, batch, steps, device
        self.ours: list[float] = []
        self.bares: list[float] = []

    def __call__(self, *arguments: Any, **named: Any) -> Iterator[Batch]:
        given: float | None = None
        for _ in range(self.steps):
            asked = self._now()
            if given is not None:
                self.ours.append(asked - given)
            self.bare()
            given = self._now()
            self.bares.append(given - asked)
            yield self.batch

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def bare_step(network: LoadedCheckpoint, config: FinetuneConfig, options: argparse.Namespace) -> Callable[[], None]:
    """What cannot be left out of a step, on noise."""
    device = torch.device(options.device)
    classifier = build_classifier(network, options.classes, options.size, drop_path=config.drop_path).to(device).train()
    optimiser = torch.optim.AdamW(classifier.parameters(), lr=1e-4, weight_decay=config.weight_decay, fused=True)
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    targets = torch.rand(options.batch, options.classes, device=device).softmax(1)
    loss_of = SoftTargetCrossEntropy()
    if options.compile:
        classifier.compile()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = loss_of(classifier(images), targets)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def ready_batch(options: argparse.Namespace) -> Batch:
    """Bytes as workers give them, a quarter of the images with an erased box."""
    drawn = np.random.default_rng(0)
    side = options.size // 3
    boxes = tuple((index, side, side, side, side) for index in range(0, options.batch, 4))
    shape = (options.batch, 3, options.size, options.size)
    return Batch(
        images=torch.from_numpy(drawn.integers(0, 256, shape, dtype=np.uint8)),
        boxes=boxes,
        noise=torch.randn(3 * side * side * len(boxes)),
        labels=torch.arange(options.batch) % options.classes,
        indices=torch.arange(options.batch),
        replaced=0,
    )


def session(folder: Path, data: Data, loaded: LoadedCheckpoint, options: argparse.Namespace) -> Session:
    backbone = loaded.backbone
    return Session(
        torch.device(options.device),
        folder,
        data.class_names,
        data=data,
        progress=False,
        transform=EvalTransform(options.size, options.size, "bicubic", backbone.mean, backbone.std),
        data_settings=DataSettings(),
        engine=EngineSettings(
            device=options.device, precision=options.precision, workers=options.workers, batch_size=options.batch
        ),
        loaded=loaded,
    )


def run(config: FinetuneConfig, where: Session) -> float:
    """A whole run; its top-1."""
    assert where.data is not None
    splits = where.data.splits
    events = finetune(config, where, splits["train"], splits["test"], protocol="finetune", version=1)
    return next(e.value or 0.0 for e in list(events) if isinstance(e, Metric) and e.name == "top1")


def step_part(loaded: LoadedCheckpoint, config: FinetuneConfig, options: argparse.Namespace) -> tuple[float, float]:
    """Percent by which our step is slower, and the bare step's images per second."""
    steps = options.steps + WARM_UP + 1
    turns = Turns(bare_step(loaded, config, options), ready_batch(options), steps, torch.device(options.device))
    labels = np.arange(steps * options.batch) % options.classes
    names = tuple(map(str, range(options.classes)))
    splits: dict[str, ImageSplit] = {"train": Colours(labels), "test": Colours([0, 1], "test")}
    data = Data("colours", names, splits, {"train": "train", "test": "test"})
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(loop, "training_loader", turns):
        run(config, session(Path(folder), data, loaded, options))
    ours, bares = turns.ours[WARM_UP:], turns.bares[WARM_UP:-1]
    for name, values in (("ours", ours), ("bare", bares)):
        print(f"  {name:<5} median {statistics.median(values):8.4f} s   best {min(values):8.4f} s")
    pairs = [100 * (a / b - 1) for a, b in zip(ours, bares, strict=True)]
    # Of pairs, since other programs slow down both of one pair.
    slower = statistics.median(pairs)
    print(
        f"our step is slower by {slower:.1f} % (median of {len(pairs)} pairs; allowed {ALLOWED:g} %), "
        f"{100 * (min(ours) / min(bares) - 1):.1f} % (best)"
    )
    return slower, options.batch / statistics.median(bares)


def data_part(loaded: LoadedCheckpoint, config: FinetuneConfig, options: argparse.Namespace, speed: float) -> None:
    """A run on real images.

    Args:
        speed: images per second of the bare step.
    """
    data = open_data(DataSettings(data=options.data, train_per_class=options.per_class, test_per_class=1))
    train = data.splits["train"]
    mean, std = loaded.backbone.mean, loaded.backbone.std
    transform = TrainTransform(options.size, mean=mean, std=std)
    loader = training_loader(
        train, transform, batch_size=options.batch, seed=0, epochs=1, workers=options.workers, pin_memory=False
    )
    first = next(loader)
    begin = time.perf_counter()
    images = sum(len(batch.images) for batch in loader)
    alone = images / (time.perf_counter() - begin)
    loader.close()
    with tempfile.TemporaryDirectory() as folder:
        top1 = run(config, session(Path(folder), data, loaded, options))
        rows = [row for row in read_log(Path(folder) / "log.jsonl") if "data_wait" in row]
    waits = [100 * row["data_wait"] for row in rows]
    print(
        f"{len(train)} images of {options.data} at {options.size} px, {options.workers} workers: the loader alone "
        f"makes {alone:.0f} images/s from its second batch of {len(first.images)} on, the bare step takes {speed:.0f}"
    )
    print(
        f"a run waits for data for {statistics.median(waits):.1f} % of its time (median of {len(waits)} lines of the "
        f"log; aim: below {WAIT:g} %), at {rows[-1]['images_per_second']:.0f} images/s; top-1 {top1:.1f} %"
    )
    if alone < speed:
        print(f"what bounds it is the loader: it makes {alone / speed:.2f} of what the bare step takes")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="vit_small_patch16_224", help="timm name; its weights are random")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--data", help="folder with train/ and val/")
    parser.add_argument("--per-class", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a network that only tries this script")
    options, _ = parser.parse_known_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    # All of them must have an image, or the product's head would be the smaller.
    options.classes = min(options.classes, options.steps * options.batch)
    config = FinetuneConfig(epochs=1, train_batch=options.batch, warmup_epochs=0, compile=options.compile)
    if options.tiny:
        loaded = from_module(layouts.vit())
    else:
        loaded = load_checkpoint(CheckpointSettings(ckpt=f"random:{options.arch}"))
    loaded.backbone.to(options.device)
    name = "tiny" if options.tiny else options.arch
    print(
        f"{name} at {options.size} px, batch {options.batch}, {options.precision}, {options.device}, {options.threads} "
        f"threads of {os.cpu_count()} cores"
    )
    slower, speed = step_part(loaded, config, options)
    if options.data:
        data_part(loaded, config, options, speed)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    return int(slower > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
