"""protocols.part_probe: planted parts, a classifier trained step by step, and everything that can go wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ibot_eval import testing
from ibot_eval.backbone import Backbone, BlockOutput, Outputs
from ibot_eval.cache import BankCache
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.extraction import extract_banks
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.metrics.intervals import wilson
from ibot_eval.probes.sweep import HeadSetting, Sweep
from ibot_eval.protocol import Metric, Predictions, Session, Warning
from ibot_eval.record import EvalRecord
from protocols.part_probe import PartProbe, PartProbeConfig
from tests.fakes import TRANSFORM, FakeBackbone, FakeSplit, fake_loaded
from tests.ranks import run_ranks

QUICK: dict[str, Any] = {"epochs": 12, "lrs": (0.1, 1.0)}
WIDTH, CLASSES = 8, 3


@pytest.fixture(autouse=True)
def one_thread():
    """Inputs this small gain nothing from threads, and lose much where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bank(features, labels, name="image"):
    return FeatureBank(
        np.asarray(features, np.float32), np.asarray(labels), [f"{name}/{i}.png" for i in range(len(labels))]
    )


def random_banks(protocol, train_labels=None, test_labels=None, seed=0):
    """Banks whose classes are told apart well, but not without error."""
    train_labels = np.arange(60) % CLASSES if train_labels is None else np.asarray(train_labels)
    test_labels = np.arange(33) % CLASSES if test_labels is None else np.asarray(test_labels)
    centres = np.random.default_rng(99).normal(size=(20, WIDTH))
    banks = {}
    for request in protocol.features():
        labels = train_labels if request.split == "train" else test_labels
        generator = np.random.default_rng([seed, *request.reducer.encode(), request.split == "train"])
        banks[request] = bank(centres[labels] + generator.normal(size=(len(labels), WIDTH)), labels, request.split)
    return banks


def session(names=(), seed=0):
    return Session(torch.device("cpu"), Path("unused"), tuple(names), progress=False, seed=seed)


def run(protocol, banks, **settings):
    """Events by kind: {(name, k, order): metric}, predictions, warnings."""
    events = list(protocol.score(banks, session(**settings)))
    metrics = {(e.name, e.params["k"], e.params["order"]): e for e in events if isinstance(e, Metric)}
    (predictions,) = [e for e in events if isinstance(e, Predictions)]
    return metrics, predictions, [e.message for e in events if isinstance(e, Warning)]


class Planted(Backbone):
    """Of an image's 4x4 patches, the brightest and the darkest are found by attention; only some tell the class.

    Patch tokens are the mean colours of the patches; the attention of [CLS] is the first channel, in either head.
    """

    architecture, family = "planted", "fake"
    depth, num_heads, patch_size, num_registers, has_cls, dims = 1, 2, 2, 0, True, (3,)

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def final_norm(self, tokens):
        return tokens

    def outputs(self, images, blocks=(-1,), norm="published", attention_block=None):
        self.passes += 1
        grid = F.avg_pool2d(images, 2).permute(0, 2, 3, 1)
        row = torch.cat([torch.zeros(len(images), 1), grid[..., 0].flatten(1)], 1).softmax(-1)
        attention = row[:, None, None].expand(-1, 2, 17, -1)
        return Outputs((BlockOutput(grid.mean((1, 2)), grid[:, 0, :0], grid),), attention)


class PlantedSplit(FakeSplit):
    """Patches of noise; the one with the largest first channel has its class in the second, the smallest in none."""

    def pixels(self, i):
        generator = np.random.default_rng([i, len(self.name)])
        patches = generator.uniform(60, 190, (16, 3))
        patches[:, 0] = np.linspace(60, 190, 16)
        patches[-1, 1:] = {0: (0, 0), 1: (255, 0), 2: (0, 255)}[int(self.labels[i])]
        patches = generator.permutation(patches).reshape(4, 4, 3)
        return patches.repeat(2, 0).repeat(2, 1).astype(np.uint8)


def test_the_class_is_where_attention_looks(tmp_path):
    protocol = PartProbe(PartProbeConfig(k=(1, 4, 16), reverse=True, random=True, epochs=20, lrs=(0.3, 1.0)))
    backbone = Planted()
    splits = {"train": PlantedSplit(240), "test": PlantedSplit(150, "val")}
    banks, stats = extract_banks(
        protocol.features(), fake_loaded(backbone), splits, TRANSFORM, BankCache(tmp_path),
        device=torch.device("cpu"), batch_size=64, workers=0, progress=False,
    )  # fmt: skip
    assert stats.images == 240 + 150, "one extraction for every k and order"
    metrics, _, _ = run(protocol, banks)
    top1 = {key[1:]: metric.value for key, metric in metrics.items() if key[0] == "top1"}
    assert top1[1, "attention"] > 99
    assert top1[1, "reverse"] < 50
    assert top1[4, "reverse"] < 50
    assert top1[1, "attention"] > top1[4, "attention"] > top1[16, "attention"] > top1[4, "random"]
    assert top1[16, "attention"] == pytest.approx(top1[16, "random"], abs=2)
    assert top1[16, "attention"] == pytest.approx(top1[16, "reverse"], abs=2)


@pytest.mark.parametrize("order", ["attention", "reverse", "random"])
def test_accuracy_of_a_classifier_trained_step_by_step(order):
    """One head on all of train, whole epochs as batches: plain torch.optim from the same weights."""
    config = PartProbeConfig(
        k=(2, 5), reverse=True, random=True, epochs=25, batch=60, lrs=(0.5,), hold_out=0, eval_every=25
    )
    protocol = PartProbe(config)
    banks = random_banks(protocol)
    metrics, predictions, _ = run(protocol, banks, seed=3)
    reducer = {"attention": "norm_topk", "reverse": "norm_bottomk", "random": "norm_randomk"}[order]
    for k in (2, 5):
        train, test = (banks[FeatureRequest(s, -1, "none", f"{reducer}:{k}")] for s in ("train", "test"))
        weight, bias = Sweep(WIDTH, CLASSES, [HeadSetting(0.5)], seed=3).head(0)
        parameters = [weight.requires_grad_(), bias.requires_grad_()]
        optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 25)
        for _ in range(25):
            optimizer.zero_grad()
            F.cross_entropy(F.linear(torch.tensor(train.features), weight, bias), torch.tensor(train.labels)).backward()
            optimizer.step()
            schedule.step()
        expected = F.linear(torch.tensor(test.features), weight, bias).argmax(1).numpy()
        assert predictions.values[f"top1@k={k},order={order}"].tolist() == expected.tolist()
        right = int((expected == test.labels).sum())
        assert 11 < right < 33, "neither chance nor perfect"
        metric = metrics["top1", k, order]
        assert (metric.value, metric.n, metric.interval) == (100 * right / 33, 33, wilson(right, 33))
        assert metric.params["lr"] == 0.5


def test_columns_and_numbers_agree():
    protocol = PartProbe(PartProbeConfig(k=(1, 3), random=True, **QUICK))
    metrics, predictions, warnings = run(protocol, random_banks(protocol))
    assert not warnings
    assert list(predictions.image_ids)[:2] == ["test/0.png", "test/1.png"]
    label = predictions.values["label"]
    columns = {
        name: (k, order) for k in (1, 3) for order in ("attention", "random") for name in [f"top1@k={k},order={order}"]
    }
    assert set(predictions.values) == {"label", *columns}
    for name, (k, order) in columns.items():
        assert metrics["top1", k, order].value == pytest.approx(100 * np.mean(predictions.values[name] == label))
        assert metrics["top1_best_on_test", k, order].value >= metrics["top1", k, order].value
        assert metrics["top5", k, order].value == 100, "three classes"


def test_each_k_gives_what_it_gives_alone():
    config = PartProbeConfig(k=(7, 1), reverse=True, **QUICK)
    together, _, _ = run(PartProbe(config), random_banks(PartProbe(config)))
    alone = PartProbe(PartProbeConfig(k=(7,), **QUICK))
    metrics, _, _ = run(alone, random_banks(alone))
    for key, metric in metrics.items():
        assert together[key] == metric


def test_it_conforms(monkeypatch):
    monkeypatch.setattr(testing.registry, "load_protocol", lambda name: PartProbe)
    events = testing.check_protocol("part-probe", PartProbeConfig(k=(1, 14), random=True, **QUICK))
    assert sum(isinstance(event, Metric) for event in events) == 2 * 2 * 3


def network(patch_size=16, **settings):
    backbone = FakeBackbone(**settings)
    backbone.patch_size = patch_size
    return backbone


def for_network(backbone, crop, asked=(), **config):
    transform: Any = SimpleNamespace(crop=crop)
    return PartProbe(PartProbeConfig(**config)).for_network(backbone, transform, frozenset(asked))


def test_k_stops_at_the_grid():
    assert for_network(network(), 224).config == PartProbeConfig()
    small = for_network(network(14), 112, reverse=True)
    assert small.config == PartProbeConfig(k=(1, 7, 14, 28, 56, 64), reverse=True)
    assert {r.reducer for r in small.features()} == {
        f"norm_{kind}:{k}" for kind in ("topk", "bottomk") for k in (1, 7, 14, 28, 56, 64)
    }
    assert for_network(network(), 32).config.k == (1, 4)
    assert for_network(network(), 16).config.k == (1,)
    assert for_network(network(8), 224).config.k == PartProbeConfig().k, "more patches than the largest default"
    with pytest.raises(ConfigError, match=r"k = 65, 200 is more than the 8x8 = 64 patches") as caught:
        for_network(network(14), 112, {"k"}, k=(64, 65, 200))
    assert caught.value.where == "--k"
    assert for_network(network(14), 112, {"k"}, k=(64, 3)).config.k == (3, 64)


def test_networks_without_cls_attention_are_refused():
    for backbone in (network(has_cls=False), network()):
        backbone.num_heads = 0 if backbone.has_cls else 2
        with pytest.raises(ConfigError, match=r"attention of \[CLS\], which fake does not have"):
            for_network(backbone, 224, {"k"}, k=(500,))
    with pytest.raises(ConfigError, match="cannot be cut into patches"):
        for_network(network(), 100)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"k": ()}, "--k"),
        ({"k": (0, 3)}, "--k"),
        ({"k": (3, 3)}, "--k"),
        ({"epochs": 0}, "--epochs"),
        ({"batch": 0}, "--batch"),
        ({"hold_out": 1.0}, "--hold-out"),
        ({"lrs": ()}, "--lrs"),
        ({"eval_every": 0}, "--eval-every"),
    ],
)
def test_impossible_settings(settings, where):
    with pytest.raises(ConfigError) as caught:
        PartProbe(PartProbeConfig(**settings))
    assert caught.value.where == where


def test_broken_and_unlabelled_images_are_named():
    protocol = PartProbe(PartProbeConfig(k=(1, 2), **QUICK))
    for split in ("train", "test"):
        request = FeatureRequest(split, -1, "none", "norm_topk:2")
        banks = random_banks(protocol)
        features = banks[request].features.copy()
        features[6, 1] = np.nan
        banks[request] = bank(features, banks[request].labels, split)
        with pytest.raises(DataError, match=rf"features of {split}/6\.png \({split} split\) are NaN"):
            run(protocol, banks)
        banks = random_banks(protocol, **{f"{split}_labels": [0, 1, -1, 2]})
        with pytest.raises(DataError, match=rf"1 of 4 images of the {split} split have no label.*{split}/2\.png"):
            run(protocol, banks)
        banks = random_banks(protocol, **{f"{split}_labels": np.zeros(0, np.int64)})
        with pytest.raises(DataError, match=f"the {split} split has no images"):
            run(protocol, banks)


def test_few_classes_and_few_images():
    protocol = PartProbe(PartProbeConfig(k=(1, 3), reverse=True, **QUICK))
    names = ("ant", "bee", "cat", "dog")
    metrics, predictions, warnings = run(protocol, random_banks(protocol, test_labels=[0, 1, 2, 3, 3]), names=names)
    assert warnings == ["2 of 5 test images count as wrong, since the train split has none of their class dog"]
    assert metrics["top1", 1, "attention"].value <= 60
    assert (predictions.values["top1@k=1,order=attention"] < 3).all()
    metrics, _, warnings = run(protocol, random_banks(protocol, train_labels=[1] * 9, test_labels=[1, 1, 1]))
    assert {metric.value for metric in metrics.values()} == {100.0}
    assert len(warnings) == 1, "the same for every k"
    assert "one class" in warnings[0]
    metrics, _, warnings = run(protocol, random_banks(protocol, train_labels=[0, 1, 2]))
    assert len(warnings) == 1
    assert {metric.params["selection"] for key, metric in metrics.items() if key[0] == "top1"} == {"middle rate"}


def score_on_a_rank():
    from ibot_eval import distributed

    distributed.init("cpu")
    try:
        protocol = PartProbe(PartProbeConfig(k=(1, 3), random=True, epochs=6, lrs=(0.03, 0.1, 1.0)))
        metrics, predictions, _ = run(protocol, random_banks(protocol))
        values = {name: column.tolist() for name, column in predictions.values.items()}
        return json.loads(json.dumps([[[*key, m.value, dict(m.params)] for key, m in metrics.items()], values]))
    finally:
        distributed.shutdown()


def test_ranks_change_nothing():
    alone = score_on_a_rank()
    for part in run_ranks(2, score_on_a_rank):
        assert part == alone


def record(name, values):
    metrics = [
        {"name": which, "value": value, "unit": "%", "params": {"k": k, "order": order}, "interval": interval}
        for (k, order), value in values.items()
        for which, interval in (("top1", (value - 2, value + 2)), ("top5", None), ("top1_best_on_test", None))
    ]
    return EvalRecord(run=name, protocol="part-probe", protocol_version=1, metrics=metrics)


FIRST = {(196, "attention"): 74.0, (1, "attention"): 60.0, (14, "attention"): 71.0}
SECOND = {(1, "attention"): 50.0, (64, "attention"): 70.0, (1, "random"): 30.0, (64, "random"): 70.0}


def test_headline_is_a_fixed_choice():
    def chosen(values):
        metric = PartProbe.headline(record("r", values).metrics)
        assert metric is not None
        assert metric["name"] == "top1"
        return metric["params"]["k"], metric["params"]["order"]

    assert chosen(FIRST) == (14, "attention"), "whichever is best"
    assert chosen(SECOND) == (1, "attention")
    assert chosen({(21, "attention"): 70.0, (7, "attention"): 60.0, (14, "reverse"): 90.0}) == (7, "attention")
    assert PartProbe.headline([]) is None


def test_figure_of_one_run():
    figure = PartProbe.figures(record("a", FIRST | {(14, "reverse"): 40.0, (14, "random"): 50.0}))["accuracy_by_k"]
    (axes,) = figure.axes
    attention, reverse, drawn = axes.lines
    assert attention.get_xydata().tolist() == [[1, 60], [14, 71], [196, 74]]
    assert reverse.get_xydata().tolist() == [[14, 40]]
    assert [line.get_linestyle() for line in (attention, reverse, drawn)] == ["-", "--", ":"]
    assert len({line.get_color() for line in axes.lines}) == 3
    assert len(axes.collections) == 3, "intervals"
    assert axes.get_xscale() == "log"
    figure.canvas.draw()


def test_numbers_of_patches_are_not_written_over_each_other():
    values = {(k, "attention"): 50.0 + k / 9 for k in (1, 7, 28, 56, 64)}
    (axes,) = PartProbe.figures(record("a", values))["accuracy_by_k"].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "7", "28", "", "64"]


def test_two_checkpoints_on_one_plot():
    figure = PartProbe.figures(record("a", FIRST), record("b", SECOND))["accuracy_by_k"]
    (axes,) = figure.axes
    lines = [line for line in axes.lines if len(line.get_xdata())]
    assert [line.get_xydata().tolist() for line in lines] == [
        [[1, 60], [14, 71], [196, 74]], [[1, 50], [64, 70]], [[1, 30], [64, 70]]
    ]  # fmt: skip
    assert lines[1].get_color() == lines[2].get_color() != lines[0].get_color()
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown[:2] == ["a", "b"]
    assert len(shown) == 4, "two runs and two styles"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "14", "64", "196"]
    figure.canvas.draw()
