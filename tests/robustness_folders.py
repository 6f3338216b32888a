"""A classifier that reads the class off the first pixel, for the protocols that read folders of variants."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ibot_eval.data.splits import Data
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.protocol import EvalProtocol, Event, Metric, Predictions, Session
from ibot_eval.settings import DataSettings, EngineSettings
from tests.images import save

SIDE = 32
TRANSFORM = EvalTransform(SIDE, SIDE, "bicubic", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def says(answer: int, side: int = SIDE) -> np.ndarray:
    """A picture that the classifier takes for its class ``answer``."""
    return np.full((side, side, 3), 10 * answer, np.uint8)


def folder(root: Path, answers: dict[str, Sequence[int]], side: int = SIDE) -> Path:
    """``{'only_fg/val/cat': [0, 2]}`` -> two images there that the classifier takes for its classes 0 and 2."""
    for name, these in answers.items():
        for number, answer in enumerate(these):
            save(root / name / f"{number}.png", says(answer, side))
    return root


class ByPixel:
    """A logit of 3 for the class that the first pixel says, 0 for the others."""

    about, warnings = {"head": "own"}, ()

    def __init__(self, classes: Sequence[int], class_names: Sequence[str] | None = None) -> None:
        self.classes, self.class_names = np.array(classes), class_names

    def logits(self, images: Tensor) -> Tensor:
        answer = (images[:, 0, 0, 0] * 255 / 10).round().long()
        return 3.0 * torch.nn.functional.one_hot(answer, len(self.classes)).float()


def classify_by_pixel(monkeypatch: pytest.MonkeyPatch, classes: Sequence[int]) -> None:
    """Puts such a classifier with a logit for each of ``classes`` in the place of ``open_classifier``."""
    module = ModuleType("ibot_eval.robustness.classifier")
    module.open_classifier = lambda session, head, **_: ByPixel(classes)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def session(data: Data, output: Path, settings: DataSettings | None = None, **engine: Any) -> Session:
    return Session(
        torch.device("cpu"),
        output,
        data.class_names,
        data=data,
        progress=False,
        transform=TRANSFORM,
        engine=EngineSettings(**({"workers": 0, "batch_size": 2} | engine)),
        data_settings=settings or DataSettings(),
    )


def run(protocol: EvalProtocol[Any], output: Path, settings: DataSettings, **engine: Any) -> list[Event]:
    """What the protocol yields for the data that ``settings`` name."""
    network: Any = None
    fitted = protocol.for_network(network, TRANSFORM, frozenset())
    return list(fitted.run(network, session(fitted.open(settings), output, settings, **engine)))


def values(events: Sequence[Event], *params: str) -> dict[Any, float | None]:
    """(name, these params …) -> value; the name alone without params."""
    metrics = [e for e in events if isinstance(e, Metric)]
    if not params:
        return {m.name: m.value for m in metrics if not m.params}
    return {(m.name, *map(m.params.get, params)): m.value for m in metrics}


def predictions(events: Sequence[Event]) -> dict[str, int]:
    """Image id -> predicted label."""
    (table,) = [e for e in events if isinstance(e, Predictions)]
    assert len(set(table.image_ids)) == len(table.image_ids)
    return dict(zip(table.image_ids, table.values["top1"].tolist(), strict=True))
