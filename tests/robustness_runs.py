"""Occlusion and shuffling of images of noise, by a small ViT and a head of fixed weights. Imports little, for ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ibot_eval import distributed
from ibot_eval.data.splits import Data
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.own_network import from_module
from ibot_eval.protocol import Event, Metric, Predictions, Session
from ibot_eval.settings import DataSettings, EngineSettings
from protocols.occlusion import Occlusion, OcclusionConfig
from protocols.shuffle import Shuffle, ShuffleConfig
from tests import layouts
from tests.finetuning_runs import Colours, labels

SIDE, CLASSES = 32, 3
TRANSFORM = EvalTransform(SIDE, SIDE, "bicubic", (0.5, 0.4, 0.3), (0.25, 0.25, 0.2))
CLASSIFIER = "ibot_eval.robustness.classifier"


class Counted(Colours):
    """Colours that count how often an image is decoded."""

    decoded = 0

    def load(self, i: int) -> Any:
        self.decoded += 1
        return super().load(i)


def session(output: Path, images: int = 12, *, bad: Sequence[int] = (), module: Any = None, **engine: Any) -> Session:
    """With images of three classes in turn, in a test split."""
    test = Counted(labels(images, CLASSES), "val", bad)
    names = tuple(f"class {label}" for label in range(CLASSES))
    seed = engine.pop("seed", 0)
    return Session(
        torch.device("cpu"),
        output,
        names,
        seed=seed,
        data=Data("colours", names, {"test": test}, {"test": "val"}),
        progress=False,
        transform=TRANSFORM,
        data_settings=DataSettings(bad_images=engine.pop("bad_images", "stop")),
        engine=EngineSettings(**({"device": "cpu", "workers": 0, "seed": seed} | engine)),
        loaded=from_module(module if module is not None else layouts.vit()),
    )


class Planted:
    """A head of random weights on [CLS], or on the mean of the patches; it counts what it is given."""

    def __init__(
        self, where: Session, classes: Sequence[int], mean: bool = False, spoil: bool = False, seed: int = 3
    ) -> None:
        assert where.loaded is not None
        self.backbone, self.mean, self.spoil, self.batches = where.loaded.backbone, mean, spoil, 0
        self.classes = np.asarray(classes, np.int64)
        self.about, self.warnings = {"head": "planted", "classes": len(self.classes)}, ["planted"]
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(len(self.classes), self.backbone.dims[-1], generator=generator)
        # Around the features of a few images, so that no class wins all of them.
        with torch.no_grad():
            self.centre = self._features(torch.randn(8, 3, SIDE, SIDE, generator=generator)).mean(0)

    def _features(self, images: Tensor) -> Tensor:
        output = self.backbone.outputs(images).blocks[0]
        return output.patches.mean((1, 2)) if self.mean else output.cls

    def logits(self, images: Tensor) -> Tensor:
        self.batches += 1
        logits = (self._features(images) - self.centre) @ self.weight.T
        return logits * float("nan") if self.spoil and self.batches == 3 else logits


def plant(classes: Sequence[int] = range(CLASSES), **options: Any) -> SimpleNamespace:
    """Puts the head in the place of ``open_classifier``; the result's ``made`` lists those that were opened."""
    found = SimpleNamespace(made=[])

    def open_classifier(where: Session, head: str, *, k: int = 20, temperature: float = 0.07) -> Planted:
        found.made.append(Planted(where, classes, **options))
        return found.made[-1]

    module = ModuleType(CLASSIFIER)
    module.open_classifier = open_classifier  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[CLASSIFIER] = module
    return found


def run(config: OcclusionConfig | ShuffleConfig, where: Session) -> list[Event]:
    """As the runner does, but for the record."""
    assert where.loaded is not None
    assert where.transform is not None
    backbone = where.loaded.backbone.eval()
    kind: Any = Occlusion if isinstance(config, OcclusionConfig) else Shuffle
    return list(kind(config).for_network(backbone, where.transform, where.asked).run(backbone, where))


def numbers(events: Sequence[Event]) -> dict[str, Any]:
    """JSON-ready: metrics by their params, and predictions."""
    metrics = {f"{e.name} {dict(e.params)}": e.value for e in events if isinstance(e, Metric)}
    (table,) = [e for e in events if isinstance(e, Predictions)]
    return {"metrics": metrics, "predictions": {name: list(map(int, column)) for name, column in table.values.items()}}


def on_ranks(folder: str, **engine: Any) -> dict[str, Any]:
    """Both protocols, with all that is drawn, on 11 images of which one is bad."""
    distributed.init("cpu")
    plant()
    where = session(Path(folder), 11, bad=[4], bad_images="skip", **engine)
    result = {}
    for config in (
        OcclusionConfig(levels=(0, 30, 60), fill="noise", offset="random", repeats=2, sheet=2),
        ShuffleConfig(grids=("1x1", "2x2", "4x4"), repeats=2, sheet=0),
    ):
        result[type(config).__name__] = numbers(run(config, replace(where)))
    distributed.shutdown()
    return result
