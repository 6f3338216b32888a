"""Sessions with small networks for what classifies in robustness protocols. Imports little, for ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ibot_eval import distributed
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.data.splits import ImageSplit
from ibot_eval.probes.head_file import ClassifierHead
from ibot_eval.protocol import Session
from ibot_eval.robustness.classifier import open_classifier
from ibot_eval.settings import CheckpointSettings
from tests import finetuning_runs
from tests.finetuning_runs import Colours, labels


def checkpoint(path: Path, net: nn.Module, **settings: Any) -> LoadedCheckpoint:
    """``net`` saved as a plain file of timm's names, and read again."""
    save_file(net.state_dict(), path)
    return load_checkpoint(CheckpointSettings(ckpt=str(path), **settings))


def session(
    output: Path,
    loaded: LoadedCheckpoint | None = None,
    names: Sequence[str] | None = None,
    train: ImageSplit | None = None,
    **engine: Any,
) -> Session:
    """15 test images of three classes, and a train split where one is given."""
    test = Colours(labels(15), "val")
    found = finetuning_runs.session(output, train or test, test, loaded, **engine)
    assert found.data is not None
    if train is None:
        del found.data.splits["train"]
    found.class_names = found.data.class_names = tuple(names or found.class_names)
    return found


def images(where: Session, count: int = 15) -> Tensor:
    """(count, 3, 32, 32) normalised, the first of the test split."""
    assert where.data is not None
    assert where.transform is not None
    split = where.data.splits["test"]
    return where.transform.normalize(torch.stack([where.transform(split.load(i)) for i in range(count)]))


def head(where: Session, features: Sequence[dict[str, Any]], width: int, **changes: Any) -> ClassifierHead:
    """A head of random weights for the session's checkpoint and classes."""
    assert where.loaded is not None
    assert where.transform is not None
    generator = torch.Generator().manual_seed(5)
    names = list(changes.pop("class_names", where.class_names))
    made = ClassifierHead(
        weight=torch.randn(len(names), width, generator=generator),
        bias=torch.randn(len(names), generator=generator),
        class_names=names,
        labels=list(range(len(names))),
        features=features,
        protocol="linear",
        backbone={"reference": "tiny.pth", "sha256": where.loaded.report.sha256, "key": where.loaded.report.key},
        transform=where.transform.describe(),
    )
    return replace(made, **changes)


def votes_on_ranks(folder: str, bad: Sequence[int]) -> list[list[float]]:
    """Logits by the neighbours in 20 train images, of 15 test images."""
    distributed.init("cpu")
    train = Colours(labels(20), "train", bad)
    where = session(Path(folder), train=train, bad_images="skip", batch_size=3)
    found = open_classifier(where, "knn", k=7).logits(images(where))
    distributed.shutdown()
    return np.round(found.numpy().astype(np.float64), 5).tolist()
