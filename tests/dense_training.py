"""A network, data and a metric of mmengine's that are as small as can be, and runs of them that end in many ways.

Imports mmengine; :func:`tests.dense` decides whether that is there.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from PIL import Image
from torch import Tensor, nn

from ibot_eval import distributed
from ibot_eval.errors import UserError
from ibot_eval.interruption import Interrupted
from ibot_eval.protocol import Session
from ibot_eval.settings import DataSettings, EngineSettings
from protocols.openmmlab import configuration, loop, training

SIDE, IMAGES, TESTS, CLASSES = 8, 13, 7, 3


@MODELS.register_module()
class TinyModel(BaseModel):
    """A convolution, batch norm, dropout and a linear layer; the loss has two parts. No norm: no draws."""

    def __init__(
        self, width: int = 6, num_classes: int = CLASSES, norm: str = "BN", scale: float = 1.0, idle: bool = False
    ) -> None:
        super().__init__(data_preprocessor={"type": "BaseDataPreprocessor"})
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = {"BN": nn.BatchNorm2d, "SyncBN": nn.SyncBatchNorm, "none": nn.Identity}[norm](width)
        self.draws = norm != "none"
        self.drop = nn.Dropout(0.3 if self.draws else 0.0)
        self.head = nn.Linear(width, num_classes)
        self.scale = scale
        if idle:
            self.idle = nn.Linear(2, 2)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, inputs: list[Tensor], labels: list[int], places: list[int], mode: str = "tensor") -> Any:
        images = torch.stack(inputs)
        logits = self.head(self.drop(self.norm(self.conv(images)).relu()).mean((2, 3)))
        if mode == "loss":
            # NumPy's and Python's generators too, as mmdet's samplers and assigners use them.
            noise = 0.01 * (random.random() + np.random.random()) * self.draws
            targets = torch.tensor(labels, device=logits.device)
            return {
                "loss_class": self.scale * nn.functional.cross_entropy(logits + noise * logits.detach(), targets),
                "loss_size": 0.01 * logits.square().mean(),
                "accuracy": (logits.argmax(1) == targets).float().mean(),
            }
        return [
            {"place": place, "label": label, "logits": row}
            for place, label, row in zip(places, labels, logits, strict=True)
        ]


@DATASETS.register_module()
class TinyData(BaseDataset):
    """Noise about a colour per class, with noise of the augmentation added; some files cannot be decoded."""

    METAINFO: ClassVar = {"classes": ("red", "green", "blue")}

    def __init__(self, images: int = IMAGES, folder: str = "", bad: Sequence[int] = (), **arguments: Any) -> None:
        self.images, self.folder, self.bad = images, folder, tuple(bad)
        super().__init__(**arguments)

    def load_data_list(self) -> list[dict[str, Any]]:
        return [
            {"img_path": f"{self.folder}/{i}.png", "label": i % CLASSES, "width": 8 if i % 2 else 6, "height": 7}
            for i in range(self.images)
        ]

    def prepare_data(self, idx: int) -> dict[str, Any]:
        if idx in self.bad:
            with Image.open(self.get_data_info(idx)["img_path"]):
                pass
        generator = np.random.default_rng(idx)
        pixels = generator.normal(size=(3, SIDE, SIDE)).astype(np.float32)
        pixels[idx % CLASSES] += 1
        if not self.test_mode:
            pixels += np.float32(random.random()) + np.random.rand(3, 1, 1).astype(np.float32) + torch.rand(1).numpy()
        return {"inputs": torch.from_numpy(pixels), "labels": idx % CLASSES, "places": idx}


@METRICS.register_module()
class TinyMetric(BaseMetric):
    """The share that is right, and each image's logits in the order of the data."""

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Any]]) -> None:
        self.results += [
            (sample["place"], sample["label"], sample["logits"].float().cpu().numpy()) for sample in data_samples
        ]

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        places, labels, logits = (np.array(column) for column in zip(*results, strict=True))
        return {"right": 100 * float((logits.argmax(1) == labels).mean()), "places": places, "logits": logits}


def described(**changes: Any) -> dict[str, Any]:
    """Fourteen iterations of four images, a look after every fifth. Dotted keys with ``__`` change it."""
    config: dict[str, Any] = {
        "default_scope": "mmengine",
        "model": {"type": "TinyModel"},
        "train_dataloader": {
            "batch_size": 4,
            "num_workers": 0,
            "sampler": {"type": "InfiniteSampler", "shuffle": True},
            "dataset": {"type": "TinyData"},
        },
        "test_dataloader": {
            "batch_size": 2,
            "num_workers": 0,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "dataset": {"type": "TinyData", "images": TESTS, "test_mode": True},
        },
        "test_evaluator": {"type": "TinyMetric", "prefix": "tiny"},
        "train_cfg": {"by_epoch": False, "max_iters": 14, "val_interval": 5},
        "optim_wrapper": {
            "type": "OptimWrapper",
            "optimizer": {"type": "AdamW", "lr": 0.05, "weight_decay": 0.01},
            "paramwise_cfg": {"norm_decay_mult": 0.0},
            "clip_grad": {"max_norm": 1.0},
        },
        "param_scheduler": [
            {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 4},
            {"type": "PolyLR", "power": 1.0, "by_epoch": False, "begin": 4, "end": 14, "eta_min": 0.0},
        ],
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    return config


def session(folder: Path, **engine: Any) -> Session:
    folder.mkdir(parents=True, exist_ok=True)
    seed = engine.pop("seed", 0)
    return Session(
        torch.device("cpu"),
        folder,
        TinyData.METAINFO["classes"],
        seed=seed,
        progress=engine.pop("progress", False),
        data_settings=DataSettings(bad_images=engine.pop("bad_images", "stop")),
        engine=EngineSettings(**({"device": "cpu", "seed": seed} | engine)),
    )


def run(folder: Path, config: Config | None = None, **arguments: Any) -> training.Trained:
    engine = {key: arguments.pop(key) for key in ("seed", "precision", "bad_images", "progress") if key in arguments}
    arguments = {"identity": {"tiny": 1}, "log_every": 2, "save_minutes": 0.05, **arguments}
    return training.train(config or configuration.finish(described()), session(folder, **engine), **arguments)


@contextmanager
def signalled(iteration: int | None, number: int = signal.SIGKILL, on: int = 0) -> Iterator[None]:
    """A signal comes in the middle of an iteration, from 1, if this is rank ``on``; a second passes at each look."""
    step, calls, clock = torch.optim.AdamW.step, iter(range(1, 10**9)), iter(range(10**9))

    def interrupted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if next(calls) == iteration and distributed.rank() == on:
            os.kill(os.getpid(), number)
        return step(self, *arguments, **keywords)

    ticking = SimpleNamespace(perf_counter=lambda: next(clock))
    with mock.patch.object(torch.optim.AdamW, "step", interrupted), mock.patch.object(loop, "time", ticking):
        yield


def broken_off(folder: str, cases: Mapping[str, tuple[int, int, Mapping[str, Any]]]) -> dict[str, str]:
    """Runs that a signal stops, by name: iteration, signal, changes. What each said, or the signal that ended it.

    All of them from one process, since importing mmengine takes seconds.
    """
    said = {}
    for name, (iteration, number, changes) in cases.items():
        text = Path(folder, f"{name}.txt")
        child = os.fork()
        if child == 0:
            try:
                with signalled(iteration, number):
                    run(Path(folder, name), configuration.finish(described(**changes)))
            except (Interrupted, KeyboardInterrupt) as error:
                text.write_text(str(error))
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said[name] = text.read_text() if text.exists() else str(ended)
    return said


def on_ranks(folder: str, cases: Mapping[str, tuple[int | None, Mapping[str, Any]]]) -> dict[str, Any]:
    """Results of runs on ranks, by name, some of which SIGTERM to rank 1 stops in an iteration first."""
    distributed.init("cpu")
    return {name: _on_ranks(Path(folder, name), fails_in, changes) for name, (fails_in, changes) in cases.items()}


def _on_ranks(folder: Path, fails_in: int | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    changes = dict(changes)
    bad_images = changes.pop("bad_images", "stop")
    config = configuration.finish(described(**changes))
    said = ""
    if fails_in is not None:
        try:
            with signalled(fails_in, signal.SIGTERM, on=1):
                run(folder, config)
        except Interrupted as error:
            said = str(error)
    try:
        trained = run(folder, config, bad_images=bad_images)
    except UserError as error:
        return {"error": error.what, "kind": type(error).__name__}
    return {
        "said": said,
        "right": trained.results["tiny/right"],
        "places": trained.results["tiny/places"].tolist(),
        "logits": trained.results["tiny/logits"].tolist(),
        "replaced": trained.replaced,
    }
