"""protocols.linear: features of each family, what is reported and saved, and inputs that used to break."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import ibot_eval
from ibot_eval import registry, testing
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.metrics.intervals import wilson
from ibot_eval.probes.head_file import HEAD_FILE, load_head
from ibot_eval.probes.outcome import SWEEP_FILE
from ibot_eval.protocol import Artifact, Metric, Predictions, Session, Warning
from ibot_eval.record import EvalRecord
from protocols.linear import Linear, LinearConfig
from tests.fakes import TRANSFORM, FakeBackbone

FAST = LinearConfig(features="cls", epochs=3)


@pytest.fixture(autouse=True)
def one_thread():
    """Inputs this small gain nothing from threads, and lose much where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _bank(labels, seed, name, width=8):
    labels = np.asarray(labels)
    centres = np.random.default_rng(99).normal(size=(12, width)) * 2
    features = centres[labels] + np.random.default_rng(seed).normal(size=(len(labels), width))
    return FeatureBank(features.astype(np.float32), labels, [f"{name}/{i}.png" for i in range(len(labels))])


TRAIN, TEST = _bank(np.arange(90) % 6, 0, "train"), _bank(np.arange(40) % 6, 1, "test")


def _run(folder, train=TRAIN, test=TEST, config=FAST, names=()):
    """Metrics by name, predictions, warnings, artifacts by kind."""
    protocol = Linear(config)
    session = Session(torch.device("cpu"), Path(folder), tuple(names), progress=False, transform=TRANSFORM)
    session.checkpoint = {"reference": "a.pth", "sha256": "b" * 64, "key": "teacher", "architecture": "fake", "more": 1}
    banks = {r: train if r.split == "train" else test for r in protocol.features()}
    events = list(protocol.score(banks, session))
    (predictions,) = [e for e in events if isinstance(e, Predictions)]
    return (
        {e.name: e for e in events if isinstance(e, Metric)},
        predictions,
        [e.message for e in events if isinstance(e, Warning)],
        {e.kind: e.path for e in events if isinstance(e, Artifact)},
    )


@pytest.mark.parametrize(
    "config",
    [
        LinearConfig(epochs=3),
        LinearConfig(epochs=2, sweep="full"),
        LinearConfig(epochs=3, features="patch_mean", blocks=(8,), optimizer="adamw", lrs=(4e-3,)),
        LinearConfig(epochs=2, features="norm_patch_mean", save_head=True),
    ],
)
def test_conforms(monkeypatch, config):
    monkeypatch.setattr(testing.registry, "load_protocol", lambda name: Linear)
    events = testing.check_protocol("linear", config)
    assert {e.name for e in events if isinstance(e, Metric)} == {"top1", "top5", "top1_best_on_test"}


def test_default_settings_are_the_published_sweep():
    settings = LinearConfig()
    assert (settings.epochs, len(settings.heads(1024)), settings.effective_batch(1_281_167)) == (100, 45, 1024)


def test_metrics(tmp_path):
    metrics, predictions, warnings, artifacts = _run(tmp_path)
    right = predictions.values["top1"] == TEST.labels
    assert predictions.values["label"].tolist() == TEST.labels.tolist()
    assert list(predictions.image_ids) == list(TEST.image_ids)
    top1, top5, best = (metrics[name] for name in ("top1", "top5", "top1_best_on_test"))
    assert top1.value == pytest.approx(100 * right.mean())
    assert right.mean() > 0.6
    assert (top1.n, top1.interval) == (40, wilson(int(right.sum()), 40))
    assert top1.params.keys() == {"selection", "lr", "epoch", "batch"}
    assert (top1.params["selection"], top1.params["batch"]) == ("held-out", 30)
    assert (top5.value or 0) >= (top1.value or 0)
    assert (best.value or 0) >= (top1.value or 0)
    assert best.params.keys() == {"lr", "epoch"}
    assert warnings == []
    assert artifacts == {"log": tmp_path / SWEEP_FILE}


def test_kinds_of_heads_are_told_apart(tmp_path):
    config = replace(FAST, optimizer="adamw", lrs=(4e-3,), weight_decay=1e-4)
    params = _run(tmp_path, config=config)[0]["top1_best_on_test"].params
    assert {**params, "epoch": 0} == {"lr": 4e-3, "epoch": 0, "optimizer": "adamw", "weight_decay": 1e-4}


def test_saved_head_gives_the_reported_predictions(tmp_path):
    labels = np.array([2, 7, 9])[np.arange(60) % 3]
    train, test = _bank(labels, 0, "train"), _bank(labels[:20], 1, "test")
    config = replace(FAST, features="cls+patch_mean", blocks=(-2, -1), save_head=True)
    _, predictions, _, artifacts = _run(tmp_path, train, test, config, names="abcdefgh")
    assert artifacts["head"] == tmp_path / HEAD_FILE
    head = load_head(tmp_path)
    logits = head.logits(torch.from_numpy(np.concatenate([test.features] * 4, 1)))
    assert np.array(head.labels)[logits.argmax(1).numpy()].tolist() == predictions.values["top1"].tolist()
    assert head.labels == [2, 7, 9]
    assert head.class_names == ["c", "h", "9"]
    assert [(f["block"], f["reducer"]) for f in head.features] == [
        (-2, "cls"),
        (-2, "patch_mean"),
        (-1, "cls"),
        (-1, "patch_mean"),
    ]
    assert not head.normalised
    assert head.backbone == {"reference": "a.pth", "sha256": "b" * 64, "key": "teacher", "architecture": "fake"}
    assert head.transform == TRANSFORM.describe()
    assert head.protocol == "linear"


def test_classes_missing_from_train(tmp_path):
    test = _bank([0, 1, 11], 1, "test")
    metrics, predictions, (warning,), _ = _run(tmp_path, test=test)
    assert (metrics["top1"].value or 0) <= 200 / 3 + 1e-9
    assert predictions.values["top1"][2] != 11
    assert warning == "1 of 3 test images count as wrong, since the train split has none of their class 11"


def test_one_class_and_one_sample_per_class(tmp_path):
    metrics, _, warnings, _ = _run(tmp_path, _bank([3] * 9, 0, "train"), _bank([3] * 4, 1, "test"))
    assert metrics["top1"].value == 100
    assert any("one class" in w for w in warnings)
    metrics, _, (warning,), _ = _run(tmp_path, _bank([0, 1, 2], 0, "train"), _bank([0, 1, 2] * 4, 1, "test"))
    assert metrics["top1"].params["selection"] == "middle rate"
    assert "no class of train has an image to hold out" in warning


def test_broken_banks_are_named(tmp_path):
    for value in (np.nan, np.inf):
        broken = TEST.features.copy()
        broken[6, 2] = value
        with pytest.raises(DataError, match=r"features of test/6\.png \(test split\) are NaN or infinite"):
            _run(tmp_path, test=FeatureBank(broken, TEST.labels, TEST.image_ids))
    unlabelled = np.where(np.arange(90) == 4, -1, TRAIN.labels)
    with pytest.raises(DataError, match=r"1 of 90 images of the train split have no label.* train/4\.png"):
        _run(tmp_path, FeatureBank(TRAIN.features, unlabelled, TRAIN.image_ids))
    with pytest.raises(DataError, match="the test split has no images"):
        _run(tmp_path, test=_bank(np.zeros(0, dtype=np.int64), 0, "test"))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"epochs": 0}, "--epochs"),
        ({"blocks": ()}, "--blocks"),
        ({"blocks": (-1, -1)}, "--blocks"),
        ({"sweep": "full", "lrs": (0.1,)}, "--sweep"),
    ],
)
def test_impossible_settings(settings, where):
    with pytest.raises(ConfigError) as caught:
        Linear(LinearConfig(**settings))
    assert caught.value.where == where


def _network(family, width=6, depth=12, architecture="fake", **attributes):
    backbone = FakeBackbone(has_cls=attributes.pop("has_cls", True), dims=(width,) * depth)
    backbone.depth, backbone.family, backbone.architecture = depth, family, architecture
    for name, value in attributes.items():
        setattr(backbone, name, value)
    return backbone


@pytest.mark.parametrize(
    ("network", "features", "blocks"),
    [
        (lambda: _network("ibot", 384), "last4", (-4, -3, -2, -1)),
        (lambda: _network("dino", 192), "last4", (-4, -3, -2, -1)),
        (lambda: _network("ibot", 384, depth=3), "last4", (-3, -2, -1)),
        (lambda: _network("ibot", 768), "cls+patch_mean", (-1,)),
        (lambda: _network("vit", 1024, depth=2), "cls+patch_mean", (-1,)),
        (lambda: _network("ibot", 768, architecture="swin-t/7", has_cls=False), "last4", (-4, -3, -2, -1)),
        (lambda: _network("mae", 768), "cls", (-1,)),
        (lambda: _network("resnet", 2048, depth=4, has_cls=False), "cls", (-1,)),
        (lambda: _network("vit", 384, has_cls=False), "cls", (-1,)),
        (lambda: _network("module", 384, depth=1, has_patches=False), "cls", (-1,)),
    ],
)
def test_published_features_of_the_family(network, features, blocks):
    config = Linear(LinearConfig()).for_network(network(), TRANSFORM, frozenset()).config
    assert (config.features, config.blocks) == (features, blocks)


def test_features_by_hand():
    backbone = _network("ibot", 384)
    for config, features, blocks in (
        (LinearConfig(blocks=(3, -1)), "last4", (3, -1)),
        (LinearConfig(features="patch_mean"), "patch_mean", (-1,)),
        (LinearConfig(features="last4"), "last4", (-4, -3, -2, -1)),
        (LinearConfig(features="cls+patch_mean", blocks=(5,)), "cls+patch_mean", (5,)),
    ):
        resolved = Linear(config).for_network(backbone, TRANSFORM, frozenset())
        assert (resolved.config.features, resolved.config.blocks) == (features, blocks)
    requests = resolved.features()
    assert requests[:2] == [FeatureRequest("train", 5), FeatureRequest("train", 5, reducer="patch_mean")]
    assert [r.split for r in requests] == ["train", "train", "test", "test"]
    with pytest.raises(ConfigError, match="block 12 does not exist"):
        Linear(LinearConfig(blocks=(12,))).for_network(backbone, TRANSFORM, frozenset())
    with pytest.raises(ConfigError, match=r"names a block twice: 11, -1 of 12"):
        Linear(LinearConfig(blocks=(11, -1))).for_network(backbone, TRANSFORM, frozenset())


def test_no_published_number_is_shown():
    assert Linear(LinearConfig()).published_key("linear", {"name": "top1"}, "ImageNet-1K") is None


def _record(folder, run, config=FAST):
    folder.mkdir()
    metrics, *_ = _run(folder, config=config)
    record = EvalRecord(run=run, protocol="linear", protocol_version=1, primary="top1")
    record.metrics = [{**vars(m), "params": dict(m.params)} for m in metrics.values()]
    record.save(folder)
    return EvalRecord.load(folder)


def test_figure(tmp_path):
    first = _record(tmp_path / "a", "first")
    figure = Linear.figures(first)["accuracy_by_rate"]
    test, held_out, chosen = figure.axes[0].lines
    assert np.shape(test.get_xdata()) == np.shape(held_out.get_xdata()) == (45,)
    assert np.asarray(chosen.get_xdata())[0] == pytest.approx(first.metrics[0]["params"]["lr"])
    figure.canvas.draw()
    full = _record(tmp_path / "b", "second", replace(FAST, sweep="full"))
    figure = Linear.figures(first, full)["accuracy_by_rate"]
    assert len(figure.axes[0].lines) == 3 + 2 * 4 + 1
    figure.canvas.draw()
    nothing_held_out = _record(tmp_path / "c", "third", replace(FAST, hold_out=0.0))
    assert len(Linear.figures(nothing_held_out)["accuracy_by_rate"].axes[0].lines) == 2


def test_no_figure_without_the_table(tmp_path):
    record = _record(tmp_path / "a", "first")
    (tmp_path / "a" / SWEEP_FILE).unlink()
    assert Linear.figures(record) == {}
    assert Linear.figures(SimpleNamespace(folder=None)) == {}  # type: ignore[arg-type]


def test_images_to_record(tmp_path, monkeypatch):
    """Three colours that any network tells apart, from files to a record with a head."""
    generator = np.random.default_rng(0)
    for split, n in (("train", 12), ("val", 5)):
        for name, colour in {"red": (220, 20, 20), "green": (20, 220, 20), "blue": (20, 20, 220)}.items():
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for index in range(n):
                noise = generator.integers(-20, 21, (8, 8, 3))
                Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(
                    folder / f"{index}.png"
                )
    monkeypatch.setattr(registry, "load_protocol", lambda name: Linear)
    record = ibot_eval.evaluate(
        FakeBackbone(),
        "linear",
        tmp_path / "data",
        epochs=5,
        save_head=True,
        resize=8,
        crop=8,
        output=tmp_path / "runs",
        device="cpu",
        workers=0,
    )
    assert record.status == "success"
    assert record.config["features"] == "last4"
    assert list(record.config["blocks"]) == [-3, -2, -1]
    assert {a["kind"] for a in record.artifacts} == {"predictions", "log", "head"}
    assert record.metrics[0]["value"] == 100
    assert record.folder is not None
    assert load_head(record.folder).class_names == ["blue", "green", "red"]
    assert set(Linear.figures(record)) == {"accuracy_by_rate"}
