"""One detection step of ours against the same step under plain mmengine, taking turns within one run.

    python tests/benchmarks/bench_detect.py [--ckpt random:vit_small_patch16_224] [--side 160] [--batch 2] \
        [--steps 20] [--threads 2] [--device cpu] [--precision fp32] [--width 64 --regions 64]

Ours is the product's own loop (protocols.openmmlab.training). Whenever it asks for its next batch, its last step is
timed, and then one of mmengine's own loop with its usual hooks, on the same batch, with the same weights, draws and
optimiser, since what a detector has to do depends on what it finds. What is not compared is data loading. ``--width 256
--regions 512`` are the published heads.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import repository  # noqa: F401
import torch

from ibot_eval.checkpoint import load_checkpoint
from ibot_eval.data.coco import CocoSplit, open_coco
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.protocol import Session
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings
from protocols.detect import DetectConfig
from protocols.openmmlab import ready
from tests.dense_data import coco_folder

ALLOWED = 5.0
"""Percent by which our step may be slower."""
WARM_UP = 3
"""Steps that are not counted."""


class Turns:
    """The batches of the product's loop, with a step of mmengine before each; what both take, in seconds."""

    def __init__(self, cfg: Any, folder: Path, device: torch.device) -> None:
        from mmengine.runner import Runner

        self.device, self.ours, self.theirs = device, [], []
        plain = copy.deepcopy(cfg)
        plain.work_dir, plain.log_level = str(folder), "WARNING"
        plain.train_cfg = {"type": "IterBasedTrainLoop", "max_iters": 10**6}
        plain.param_scheduler = []
        for key in ("test_dataloader", "test_cfg", "test_evaluator"):
            plain.pop(key)
        plain.train_dataloader.sampler = {"type": "DefaultSampler", "shuffle": True}
        plain.default_hooks = {"checkpoint": None, "logger": {"type": "LoggerHook", "interval": 50}}
        self.runner: Any = Runner.from_cfg(plain)
        self.runner.model.to(device)
        self.runner.optim_wrapper = self.runner.build_optim_wrapper(self.runner.optim_wrapper)
        self.runner._train_loop = self.runner.build_train_loop(self.runner._train_loop)
        self.runner.optim_wrapper.initialize_count_status(self.runner.model, 0, 10**6)
        for place in ("before_run", "before_train", "before_train_epoch"):
            self.runner.call_hook(place)
        self.runner.model.train()

    ours: list[float]
    theirs: list[float]
    loop: Any = None
    """The product's."""

    def batches(self, data: Any, first: int, last: int) -> Iterator[tuple[Any, int]]:
        """In place of ``TrainingData.batches``."""
        from mmengine.dataset import pseudo_collate

        from protocols.openmmlab import loop

        given: float | None = None
        batch = pseudo_collate([data.dataset[index] for index in range(data.batch_size)])
        for _ in range(first, last):
            asked = self._now()
            if given is not None:
                self.ours.append(asked - given)
            # Each changes what it is given.
            own, other = copy.deepcopy(batch), copy.deepcopy(batch)
            self.runner.model.load_state_dict(self.loop.runner.model.state_dict())
            loop._draw_from(self.device, loop._ITERATION, data.seed, self.loop.iter, 0)
            begin = self._now()
            self.runner.train_loop.run_iter(other)
            self.theirs.append(self._now() - begin)
            given = self._now()
            yield own, 0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def compare(options: argparse.Namespace, folder: Path) -> float:
    """Percent by which our step is slower."""
    from protocols.openmmlab import backbone, dense_run, detection, loop, training
    from protocols.openmmlab.configuration import finish
    from protocols.openmmlab.seeded_data import TrainingData

    images = (options.steps + WARM_UP + 1) * options.batch
    data = open_coco(DataSettings(data=str(coco_folder(folder / "data", images, 1, height=120, width=160))))
    train, test = (data.splits[role] for role in ("train", "test"))
    assert isinstance(train, CocoSplit)
    assert isinstance(test, CocoSplit)
    loaded = load_checkpoint(CheckpointSettings(ckpt=options.ckpt))
    network = loaded.backbone
    session = Session(
        torch.device(options.device),
        folder,
        data.class_names,
        data=data,
        progress=False,
        checkpoint={"reference": options.ckpt},
        transform=EvalTransform(224, 224, "bicubic", network.mean, network.std),
        engine=EngineSettings(device=options.device, precision=options.precision, workers=0),
        loaded=loaded,
    )
    side = options.side
    config = DetectConfig(
        **{"epochs": 1, "steps": (), "train_batch": options.batch, "crops": False, "draw": 0},
        **{"short_sides": (side,), "test_side": side, "long_side": 2 * side, "rois": options.regions},
        **{"channels": options.width, "head_width": options.width, "fc_width": 4 * options.width},
    )
    backbone.hand_over(dense_run.checkpoint_of(session), loaded)
    cfg = finish(detection.configuration(config, session, train, test, truth=test.annotation_file, masks=True))
    turns = Turns(cfg, folder / "plain", session.device)
    run = loop.TrainLoop.run

    def noticed(self: Any) -> Any:
        turns.loop = self
        return run(self)

    batches = mock.patch.object(TrainingData, "batches", lambda data, first, last: turns.batches(data, first, last))
    with batches, mock.patch.object(loop.TrainLoop, "run", noticed):
        training.train(cfg, session, identity={}, save_minutes=10**6, train_only=True)
    ours, theirs = turns.ours[WARM_UP:], turns.theirs[WARM_UP:-1]
    for name, values in (("ours", ours), ("mmengine", theirs)):
        print(f"  {name:<9} median {statistics.median(values):8.4f} s   best {min(values):8.4f} s")
    # Of pairs, since other programs slow down both of one pair.
    slower = statistics.median([100 * (a / b - 1) for a, b in zip(ours, theirs, strict=True)])
    print(
        f"our step is slower by {slower:.1f} % (median of {len(ours)} pairs; allowed {ALLOWED:g} %), "
        f"{100 * (min(ours) / min(theirs) - 1):.1f} % (best)"
    )
    return slower


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", default="random:vit_small_patch16_224")
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--regions", type=int, default=64)
    options, _ = parser.parse_known_args(arguments)
    torch.set_num_threads(options.threads)
    ready.prepare()
    print(
        f"{options.ckpt} at {options.side} px, batch {options.batch}, {options.precision}, {options.device}, "
        f"{options.threads} threads of {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as folder:
        slower = compare(options, Path(folder))
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    return int(slower > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
