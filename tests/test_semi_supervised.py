"""semi-supervised: which images keep their labels, that the projection head's layer is trained, published numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval import runner
from ibot_eval.checkpoint import load_checkpoint
from ibot_eval.data.arrays import open_demo
from ibot_eval.data.splits import Data, ImageSplit
from ibot_eval.data.subsets import KNOWN_LISTS, LabelSubset, per_class
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.finetuning.saving import classifier_of
from ibot_eval.protocol import Event, Metric, Session, Warning
from ibot_eval.published import lookup
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings
from protocols import semi_supervised
from protocols.finetune import FinetuneConfig
from protocols.semi_supervised import SemiSupervised, SemiSupervisedConfig

QUICK = SemiSupervisedConfig(labels="3", epochs=2, scale_lr=False, lr=1e-3, warmup_epochs=0, train_batch=15)


def run(folder: Path, config: SemiSupervisedConfig = QUICK, **at_hand: Any) -> EvalRecord:
    """On 50 and 20 digits."""
    settings = RunSettings(
        CheckpointSettings(ckpt="demo"),
        DataSettings(data="demo", train_per_class=5, test_per_class=2),
        EngineSettings(device="cpu", workers=0, seed=3),
        OutputSettings(output=folder, name="run"),
    )
    return runner.run("semi-supervised", SemiSupervised(config), settings, **at_hand)


def session(data: Data, folder: Path) -> Session:
    return Session(torch.device("cpu"), folder, data.class_names, seed=3, data=data)


def test_labels_choose_the_train_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A number, a share, and a list: what is trained on, and how a run is told from one with other labels."""
    data = open_demo(("train", "test"))
    train = data.splits["train"]
    seen: list[tuple[ImageSplit, dict[str, Any]]] = []

    def finetune(config: Any, where: Any, train: ImageSplit, test: ImageSplit, **named: Any) -> Iterator[Event]:
        assert test is data.splits["test"]
        seen.append((train, named))
        yield Metric("top1", 1.0)

    monkeypatch.setattr(semi_supervised, "finetune", finetune)
    listed = tmp_path / "labels.txt"
    listed.write_text("".join(f"{train.image_ids[row]}\n" for row in (40, 7)))
    for labels in ("2", "10%", str(listed)):
        config = SemiSupervisedConfig(labels=labels, from_head_layer=2)
        (metric,) = SemiSupervised(config).run(torch.nn.Identity(), session(data, tmp_path))  # type: ignore[arg-type]
        assert isinstance(metric, Metric)
    number, share, given = seen
    assert number[0].image_ids == [train.image_ids[row] for row in per_class(train.labels, 2, 3)]
    assert np.bincount(number[0].labels).tolist() == [2] * 10
    wanted = np.maximum(1, np.floor(np.bincount(train.labels) / 10 + 0.5)).astype(int)
    assert np.bincount(share[0].labels).tolist() == wanted.tolist()
    assert given[0].image_ids == [train.image_ids[row] for row in (7, 40)]
    assert given[1]["head_layers"] == 2
    assert given[1]["identity"] == {"labels": "labels.txt"}
    assert given[1]["params"] == {"labels": "labels.txt", "n_train": 2}


def test_what_there_is_to_say_about_the_labels_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(semi_supervised, "finetune", lambda *_, **__: iter(()))
    data = open_demo(("train", "test"))
    data.data_name = "ImageNet-1K"
    events = list(SemiSupervised(SemiSupervisedConfig()).run(torch.nn.Identity(), session(data, tmp_path)))  # type: ignore[arg-type]
    messages = [event.message for event in events if isinstance(event, Warning)]
    assert any("SimCLR's list" in message for message in messages)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvalRecord]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(folder)


def test_the_first_layer_of_the_head_is_trained_and_kept(trained: tuple[Path, EvalRecord]) -> None:
    """The saved classifier gives, image by image, what the record says."""
    folder, record = trained
    top1 = record.metrics[0]
    assert (top1["name"], top1["n"]) == ("top1", 20)
    assert {"labels": "3", "n_train": 30}.items() <= top1["params"].items()
    before = load_checkpoint(CheckpointSettings(ckpt="demo"))
    after = load_checkpoint(CheckpointSettings(ckpt=str(folder / "run" / "classifier.safetensors")))
    classifier = classifier_of(after)
    assert before.projection_head is not None
    assert classifier.projection is not None
    old, new = before.projection_head.mlp[0], classifier.projection[0]
    assert isinstance(old, torch.nn.Linear)
    assert isinstance(new, torch.nn.Linear)
    assert len(classifier.projection) == 2, "a linear layer and its GELU"
    assert classifier.head.in_features == old.out_features
    moved = (new.weight - old.weight).norm() / old.weight.norm()
    assert 1e-4 < moved < 0.5
    test = open_demo(("test",)).splits["test"]
    table = load_predictions(folder / "run" / "predictions.npz")
    rows = [list(test.image_ids).index(str(name)) for name in table["image_ids"]]
    size = record.data["transform"]["crop"]
    transform = EvalTransform(size, size, "bicubic", after.backbone.mean, after.backbone.std)
    with torch.no_grad():
        logits = classifier(transform.normalize(torch.stack([transform(test.load(row)) for row in rows])))
    assert logits.argmax(1).tolist() == table["top1"].tolist()
    assert test.labels[rows].tolist() == table["label"].tolist()


def test_a_checkpoint_without_a_projection_head_is_refused(tmp_path: Path) -> None:
    loaded = replace(load_checkpoint(CheckpointSettings(ckpt="demo")), projection_head=None)
    with pytest.raises(ConfigError, match="no projection head"):
        run(tmp_path, loaded=loaded)
    record = run(tmp_path / "other", replace(QUICK, from_head_layer=0, epochs=1), loaded=loaded)
    assert record.status == "success"


def test_images_held_out_for_a_sweep_are_labelled_ones(tmp_path: Path) -> None:
    """Of one image per class none can be."""
    with pytest.raises(ConfigError, match="no image of train can be held out"):
        run(tmp_path, replace(QUICK, labels="1", sweep=("lr=1e-3,1e-4",)))
    with pytest.raises(ConfigError, match="'labels' is not a setting that can be swept"):
        SemiSupervised(SemiSupervisedConfig(sweep=("labels=1%,10%",)))


def test_bad_labels_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a percentage"):
        SemiSupervised(SemiSupervisedConfig(labels="few"))
    with pytest.raises(ConfigError, match="--from-head-layer -1"):
        SemiSupervised(SemiSupervisedConfig(from_head_layer=-1))
    with pytest.raises(ConfigError, match="--epochs 0"):
        SemiSupervised(SemiSupervisedConfig(epochs=0))
    absent = tmp_path / "absent.txt"
    absent.write_text("n0/absent.png\n")
    with pytest.raises(DataError, match="absent"):
        run(tmp_path, replace(QUICK, labels=str(absent)))


def published(monkeypatch: pytest.MonkeyPatch, known: str | None, **settings: Any) -> float | None:
    """The number that is shown beside top1 of iBOT's ViT-S/16 on ImageNet."""
    config = SemiSupervisedConfig(**settings)
    protocol = SemiSupervised(config)
    protocol.image_size = 224
    if known is not None:
        monkeypatch.setattr(protocol, "subset", LabelSubset(known, path=Path(KNOWN_LISTS[known].file_name)))
    key = protocol.published_key("semi-supervised", {"name": "top1", "params": {}}, "ImageNet-1K")
    if key is None or not protocol.as_published():
        return None
    found = lookup(key.protocol, key.metric, data=key.data, method="iBOT", arch="vit-s/16", headline=True)
    return found and found["value"]


def test_published_numbers_stand_beside_the_published_experiment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """61.9 and 75.1: iBOT Table 4."""
    assert published(monkeypatch, "SimCLR 1%") == 61.9
    assert published(monkeypatch, "SimCLR 10%") == 75.1
    assert published(monkeypatch, "SimCLR 10%", sweep=("lr=1e-5,2e-5",), hold_out=0.1, train_batch=64) == 75.1
    assert published(monkeypatch, None, labels="1%") is None
    for change in ({"epochs": 100}, {"lr": 5e-6}, {"from_head_layer": 0}, {"sweep": ("mixup=0,0.8",)}):
        assert published(monkeypatch, "SimCLR 1%", **change) is None, change


def test_the_defaults_are_those_of_deits_recipe() -> None:
    """As the published script has them; 5e-6 x 1024 / 512 = 1e-5."""
    usual, deit = vars(FinetuneConfig()), vars(SemiSupervisedConfig())
    own = {name: value for name, value in deit.items() if usual.get(name) != value}
    assert own == {
        "labels": "1%",
        "from_head_layer": 1,
        "epochs": 1000,
        "lr": 5e-6 * 1024 / 512,
        "min_lr": 1e-5,
        "warmup_epochs": 5,
        "warmup_lr": 1e-6,
        "layer_decay": 1.0,
        "repeats": 3,
        "head_scale": 1.0,
    }
