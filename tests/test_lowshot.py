"""protocols.lowshot: the scorers' own protocols on training splits cut by hand, and what lists can do wrong."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from ibot_eval import published
from ibot_eval.data import subsets
from ibot_eval.data.splits import Data
from ibot_eval.data.subsets import KnownList, per_class
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.features import FeatureBank
from ibot_eval.metrics.intervals import wilson
from ibot_eval.protocol import Metric, Predictions, PublishedKey, Session, Warning
from ibot_eval.record import EvalRecord
from ibot_eval.testing import check_events, check_protocol, check_settings, synthetic_banks
from protocols.knn import KNN, KNNConfig
from protocols.linear import Linear, LinearConfig
from protocols.logreg import LogReg, LogRegConfig
from protocols.lowshot import LowShot, LowShotConfig
from tests.fakes import TRANSFORM, FakeBackbone, FakeSplit
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _session(tmp_path=Path("unused"), seed=0, **more: Any):
    return Session(torch.device("cpu"), tmp_path, tuple("abcde"), seed=seed, progress=False, **more)


def _banks(protocol, seed=0, noise=3.0):
    """Synthetic banks that are not so well separated that every classifier is always right."""
    banks = synthetic_banks(protocol.features(), seed)
    noisy = {}
    for i, (request, bank) in enumerate(banks.items()):
        shift = np.random.default_rng([seed, i]).normal(size=bank.features.shape) * noise
        noisy[request] = replace(bank, features=(bank.features + shift).astype(np.float32))
    return noisy


def _run(config, banks=None, session=None):
    """{(labels, scorer): metric}, predictions, warnings."""
    protocol = LowShot(config)
    events = list(protocol.score(banks or _banks(protocol), session or _session()))
    check_events("lowshot", LowShot, events)
    metrics = {(e.params["labels"], e.params["scorer"]): e for e in events if isinstance(e, Metric)}
    (predictions,) = [e for e in events if isinstance(e, Predictions)]
    return metrics, predictions, [e.message for e in events if isinstance(e, Warning)]


def _keep(banks, rows):
    """The banks with only ``rows`` of train."""
    return {
        r: FeatureBank(b.features[rows], b.labels[rows], [b.image_ids[i] for i in rows]) if r.split == "train" else b
        for r, b in banks.items()
    }


def _list(tmp_path, ids, name="list.txt"):
    path = tmp_path / name
    path.write_text("\n".join(ids) + "\n")
    return path


def _ids(rows):
    """Names of images of the synthetic train split."""
    return [f"train/{i % 5}/{i:03d}.png" for i in rows]


def test_conforms():
    events = check_protocol("lowshot", LowShotConfig(labels=("2", "50%"), draws=2))
    assert len([e for e in events if isinstance(e, Metric)]) == 6


def test_defaults_conform():
    check_settings(LowShot)
    assert LowShotConfig().labels == ("1%", "10%")


def test_every_draw_is_what_the_scorer_says_of_that_training_split(tmp_path):
    config = LowShotConfig(labels=("4", "40%"), draws=3, k=7)
    protocol = LowShot(config)
    banks = _banks(protocol)
    metrics, predictions, messages = _run(config, banks, _session(seed=11))
    labels = next(b.labels for r, b in banks.items() if r.split == "train")
    truth = next(b.labels for r, b in banks.items() if r.split == "test")
    scorers = {
        "linear": Linear(LinearConfig(eval_every=100, hold_out=0.5)),
        "logreg": LogReg(LogRegConfig(hold_out=0.5)),
        "knn": KNN(KNNConfig(k=(7,))),
    }
    assert list(metrics) == [(subset, name) for subset in ("4", "40%") for name in scorers]
    for subset, n in (("4", 4), ("40%", 5)):
        for name, scorer in scorers.items():
            found = []
            for draw in range(3):
                rows = per_class(labels, n, 11, draw)
                cut = {r: b for r, b in _keep(banks, rows).items() if r in scorer.features()}
                events = list(scorer.score(cut, _session(tmp_path, seed=11)))
                found.append(next(e.value for e in events if isinstance(e, Metric) and e.name == "top1"))
                (alone,) = [e for e in events if isinstance(e, Predictions)]
                column = "top1@k=7" if name == "knn" else "top1"
                saved = predictions.values[f"top1@labels={subset},scorer={name},draw={draw}"]
                np.testing.assert_array_equal(saved, alone.values[column])
                assert 100 * np.mean(saved == truth) == pytest.approx(found[-1])
            metric = metrics[subset, name]
            assert metric.value == pytest.approx(np.mean(found))
            assert metric.params == {"labels": subset, "scorer": name, "draws": 3, "n_train": 5 * n}
            assert metric.n == 25
            with warnings.catch_warnings():
                # scipy warns where the draws agree.
                warnings.simplefilter("ignore")
                interval = stats.ttest_1samp(found, 0).confidence_interval(0.95)
            assert metric.interval == pytest.approx((max(0, interval.low), min(100, interval.high)))
    assert len({tuple(predictions.values[f"top1@labels=4,scorer=knn,draw={d}"]) for d in range(3)}) > 1
    assert predictions.values["label"].tolist() == truth.tolist()
    assert not messages
    assert not list(tmp_path.glob("head*"))


def test_one_neighbour_is_the_nearest_image_of_the_subset():
    config = LowShotConfig(labels=("2",), draws=2, scorers=("knn",), k=1)
    protocol = LowShot(config)
    banks = _banks(protocol)
    train, test = (next(b for r, b in banks.items() if r.split == s) for s in ("train", "test"))
    _, predictions, _ = _run(config, banks)
    unit = [b.features / np.linalg.norm(b.features, axis=1, keepdims=True) for b in (train, test)]
    for draw in range(2):
        rows = per_class(train.labels, 2, 0, draw)
        nearest = rows[(unit[1] @ unit[0][rows].T).argmax(1)]
        expected = train.labels[nearest]
        assert predictions.values[f"top1@labels=2,scorer=knn,draw={draw}"].tolist() == expected.tolist()


def test_a_list_is_one_draw_and_its_order_does_not_matter(tmp_path):
    rows = [3, 17, 20, 41, 44, 50, 51]
    protocol = LowShot(LowShotConfig(labels=(str(_list(tmp_path, _ids(rows))),)))
    banks = _banks(protocol)
    metrics, predictions, _ = _run(protocol.config, banks)
    backwards = _list(tmp_path, [name.split("/")[-1] for name in _ids(rows)][::-1], "list2.txt")
    again, _, _ = _run(LowShotConfig(labels=(str(backwards),)), banks)
    for name in ("linear", "logreg", "knn"):
        metric = metrics["list.txt", name]
        assert metric.params == {"labels": "list.txt", "scorer": name, "draws": 1, "n_train": 7}
        predicted = predictions.values[f"top1@labels=list.txt,scorer={name}"]
        right = int((predicted == predictions.values["label"]).sum())
        assert metric.value == 100 * right / 25
        assert metric.interval == wilson(right, 25)
        assert again["list2.txt", name].value == metric.value


def test_a_missing_image_is_named_before_the_extraction_and_after(tmp_path):
    path = _list(tmp_path, [*_ids([1]), "train/0/999.png"])
    protocol = LowShot(LowShotConfig(labels=("1", str(path))))
    with pytest.raises(DataError, match=r"1 of the 2 images in .*list\.txt are not .*'train/0/999\.png'"):
        list(protocol.score(_banks(protocol), _session()))
    data = Data("somewhere", ("a", "b", "c"), {"train": FakeSplit(6), "test": FakeSplit(3, "test")}, {})
    sizes = {"train": 6, "test": 3}
    with pytest.raises(DataError, match=r"'train/1/001\.png', 'train/0/999\.png'"):
        protocol.check(sizes, _session(data=data))
    fine = LowShot(LowShotConfig(labels=(str(_list(tmp_path, ["train/001.png"])),)))
    fine.check(sizes, _session(data=data))
    fine.check(sizes, _session())


def test_classes_missing_from_the_list_count_as_wrong(tmp_path):
    rows = [i for i in range(60) if i % 5 in (0, 3)]
    path = _list(tmp_path, _ids(rows))
    protocol = LowShot(LowShotConfig(labels=(str(path),)))
    metrics, predictions, messages = _run(protocol.config, _banks(protocol, noise=0))
    for name in ("linear", "logreg", "knn"):
        assert metrics["list.txt", name].value == 40.0
        assert set(predictions.values[f"top1@labels=list.txt,scorer={name}"]) == {0, 3}
    known = [m for m in messages if "15 of 25 test images count as wrong" in m]
    assert len(known) == 2, "linear and logreg say the same, k-NN calls it a gallery"
    assert known[0].startswith("labels list.txt, linear, logreg: ")
    assert known[0].endswith("classes b, c, e")
    assert known[1].startswith("labels list.txt, knn: ")


@pytest.fixture
def simclr(tmp_path, monkeypatch):
    """A list of 20 images that is known as SimCLR's."""
    path = _list(tmp_path, _ids(range(20)), "mine.txt")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(subsets.KNOWN_LISTS, "SimCLR 1%", KnownList("1percent.txt", digest, 20))
    return path


def test_published_numbers_belong_to_the_published_lists(simclr, tmp_path):
    config = LowShotConfig(labels=(str(simclr), "2"), draws=2)
    metrics, _, messages = _run(config)
    assert not [m for m in messages if "SimCLR" in m]
    protocol = LowShot(config)
    keys = {
        key: protocol.published_key("lowshot", {"name": "top1", "params": metric.params}, "ImageNet-1K")
        for key, metric in metrics.items()
    }
    assert keys == {
        ("SimCLR 1%", "linear"): PublishedKey("lowshot", "top1", "ImageNet-1K 1%", exact=True),
        ("SimCLR 1%", "logreg"): PublishedKey("logreg", "top1", "ImageNet-1K 1%", exact=True),
        ("SimCLR 1%", "knn"): None,
        ("2", "linear"): None,
        ("2", "logreg"): None,
        ("2", "knn"): None,
    }
    for scorer, value in (("linear", 62.5), ("logreg", 65.9)):
        key = keys["SimCLR 1%", scorer]
        assert key is not None
        found = published.lookup(key.protocol, key.metric, data=key.data, method="iBOT", arch="vit-s/16", headline=True)
        assert found is not None
        assert found["value"] == value
    other = LowShot(replace(config, linear_features="patch_mean")).for_network(FakeBackbone(), TRANSFORM, frozenset())
    own = LowShot(config).for_network(FakeBackbone(), TRANSFORM, frozenset())
    for scorer, expected in (("linear", None), ("logreg", keys["SimCLR 1%", "logreg"])):
        metric = {"name": "top1", "params": metrics["SimCLR 1%", scorer].params}
        assert own.published_key("lowshot", metric, "ImageNet-1K") == keys["SimCLR 1%", scorer]
        assert other.published_key("lowshot", metric, "ImageNet-1K") == expected


def test_an_altered_list_is_warned_of(simclr, tmp_path):
    path = _list(tmp_path, _ids(range(1, 21)), "1percent.txt")
    metrics, _, messages = _run(LowShotConfig(labels=(str(path),), scorers=("knn",)))
    assert list(metrics) == [("1percent.txt", "knn")]
    (warning,) = [m for m in messages if "SimCLR 1% list" in m]
    assert str(path) in warning


def test_subsets_of_imagenet_that_are_drawn_here_are_not_the_published_ones():
    for name, expected in (("ImageNet-1K", 1), (None, 0)):
        data = Data("imagenet", tuple("abcde"), {}, {}, data_name=name)
        _, _, messages = _run(
            LowShotConfig(labels=("10%", "20%", "1"), draws=2, scorers=("knn",)), session=_session(data=data)
        )
        found = [m for m in messages if "SimCLR's list" in m]
        assert len(found) == expected
        assert all(m.startswith("labels 10%: ") and "10percent.txt" in m for m in found)


def test_small_classes_are_taken_whole_and_never_left_out():
    protocol = LowShot(LowShotConfig(labels=("5", "12%"), draws=2, scorers=("knn",)))
    rows = np.array([i for i in range(60) if i % 5 != 2 or i < 15])
    banks = _keep(_banks(protocol), rows)
    metrics, _, messages = _run(protocol.config, banks)
    assert metrics["5", "knn"].params["n_train"] == 4 * 5 + 3
    assert metrics["12%", "knn"].params["n_train"] == 4 * 1 + 1
    assert "labels 5: 1 of 5 classes have fewer images and are taken whole: 'c'" in messages
    assert "labels 12%: 1 of 5 classes have too few images and give one: 'c'" in messages


def test_all_labels_are_drawn_once():
    protocol = LowShot(LowShotConfig(labels=("100%", "99"), scorers=("knn",)))
    banks = _banks(protocol)
    metrics, _, _ = _run(protocol.config, banks)
    (whole,) = [e for e in KNN(KNNConfig(k=(20,))).score(banks, _session()) if isinstance(e, Metric)][:1]
    for name in ("100%", "99"):
        assert metrics[name, "knn"].params == {"labels": name, "scorer": "knn", "draws": 1, "n_train": 60}
        assert (metrics[name, "knn"].value, metrics[name, "knn"].interval) == (whole.value, whole.interval)


def test_one_image_per_class():
    metrics, _, messages = _run(LowShotConfig(labels=("1",), draws=3))
    assert {m.params["n_train"] for m in metrics.values()} == {5}
    assert any(m.startswith("labels 1, linear: ") and "no learning rate can be chosen" in m for m in messages)
    assert any(m.startswith("labels 1, logreg: ") and "no lambda can be chosen" in m for m in messages)
    assert any(m.startswith("labels 1, knn: default k = 20 left out: there are only 5") for m in messages)
    assert len(messages) == 3, "each warning once, whatever the draws"


def test_one_class():
    protocol = LowShot(LowShotConfig(labels=("3",), draws=2))
    banks = {r: FeatureBank(b.features, np.zeros_like(b.labels), b.image_ids) for r, b in _banks(protocol).items()}
    metrics, _, messages = _run(protocol.config, banks)
    assert {m.value for m in metrics.values()} == {100.0}
    assert {m.interval for m in metrics.values()} == {(100.0, 100.0)}
    assert any("one class" in m for m in messages)


def test_a_warning_of_some_draws_says_of_how_many():
    protocol = LowShot(LowShotConfig(labels=("2",), draws=4, scorers=("knn", "logreg")))
    banks = _banks(protocol)
    calls = []

    def score(banks, session, scorer):
        calls.append(scorer)
        if len(calls) % 4 == 1:
            yield Warning("odd")
        if scorer is protocol.scorers["knn"]:
            yield Warning("always")
        yield from type(scorer).score(scorer, banks, session)

    for scorer in protocol.scorers.values():
        scorer.score = lambda banks, session, scorer=scorer: score(banks, session, scorer)
    messages = [e.message for e in protocol.score(banks, _session()) if isinstance(e, Warning)]
    assert "labels 2, knn (2 of 4 draws): odd" in messages
    assert "labels 2, knn: always" in messages


def test_features_that_are_not_finite_are_named():
    for scorer in ("linear", "logreg", "knn"):
        protocol = LowShot(LowShotConfig(labels=("100%",), scorers=(scorer,)))
        for split, name in (("train", "train/2/007.png"), ("test", "test/2/007.png")):
            banks = _banks(protocol)
            for request, bank in banks.items():
                if request.split == split:
                    bank.features[7] = np.nan
            with pytest.raises(DataError, match=name):
                list(protocol.score(banks, _session()))


def test_unlabelled_images_are_named():
    protocol = LowShot(LowShotConfig(labels=("1",), draws=1, scorers=("logreg",)))
    banks = {
        r: FeatureBank(b.features, np.where(np.arange(len(b)) == 8, -1, b.labels), b.image_ids)
        for r, b in _banks(protocol).items()
    }
    with pytest.raises(DataError, match=r"no label, the first being train/3/008\.png"):
        list(protocol.score(banks, _session()))


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        ({"labels": ()}, "--labels", "none"),
        ({"labels": ("0",)}, "--labels", "'0' are neither"),
        ({"labels": ("-3",)}, "--labels", "'-3'"),
        ({"labels": ("0%",)}, "--labels", "'0%'"),
        ({"labels": ("101%",)}, "--labels", "'101%'"),
        ({"labels": ("2.5",)}, "--labels", "'2.5'"),
        ({"labels": ("nowhere.txt",)}, "--labels", "'nowhere.txt' are neither a percentage"),
        ({"labels": ("1%", "1.0%")}, "--labels", "1%, 1%"),
        ({"scorers": ()}, "--scorers", "none"),
        ({"scorers": ("knn", "knn")}, "--scorers", "knn, knn"),
        ({"draws": 0}, "--draws", "0"),
        ({"k": 0}, "--k", "0"),
        ({"linear_blocks": ()}, "--linear-blocks", "none"),
        ({"hold_out": 1.0}, "--hold-out", "1.0"),
    ],
)
def test_impossible_settings(settings, where, message):
    with pytest.raises(ConfigError) as caught:
        LowShot(LowShotConfig(**settings))
    assert caught.value.where == where
    assert message in str(caught.value)


def test_features_are_asked_for_once_and_blocks_are_counted_from_the_last():
    protocol = LowShot(LowShotConfig()).for_network(FakeBackbone(), TRANSFORM, frozenset())
    assert (protocol.config.linear_features, protocol.config.linear_blocks) == ("last4", (-3, -2, -1))
    asked = [(r.split, r.block, r.reducer) for r in protocol.features()]
    assert sorted(asked) == sorted((s, b, "cls") for s in ("train", "test") for b in (-3, -2, -1))
    by_hand = LowShotConfig(linear_features="patch_mean", linear_blocks=(0, 2))
    protocol = LowShot(by_hand).for_network(FakeBackbone(), TRANSFORM, frozenset())
    assert protocol.config.linear_blocks == (-3, -1)
    with pytest.raises(ConfigError, match="--linear-blocks names a block twice"):
        LowShot(LowShotConfig(linear_blocks=(2, -1))).for_network(FakeBackbone(), TRANSFORM, frozenset())


def _values_on_a_rank() -> list[Any]:
    torch.set_num_threads(1)
    from ibot_eval import distributed

    distributed.init("cpu")
    metrics, predictions, messages = _run(LowShotConfig(labels=("3",), draws=2))
    sums = {name: int((values * np.arange(1, 26)).sum()) for name, values in predictions.values.items()}
    return [[m.value for m in metrics.values()], sums, messages]


def test_any_number_of_ranks_gives_the_same():
    alone = _values_on_a_rank()
    for found in run_ranks(2, _values_on_a_rank):
        assert found == alone


def _record(metrics, run="r", classes=5):
    rows = [
        {"name": "top1", "value": value, "unit": "%", "params": params, "interval": (value - 3, value + 4)}
        for value, params in metrics
    ]
    return EvalRecord(run, "lowshot", 1, metrics=rows, data={"classes": classes})


def test_figure_and_headline():
    points = [("10%", "linear", 60, 70.0), ("10%", "knn", 60, 65.0), ("1", "linear", 5, 40.0), ("1", "knn", 5, 45.0)]
    params = [(v, {"labels": name, "scorer": s, "draws": 2, "n_train": n}) for name, s, n, v in points]
    record = _record(params)
    assert LowShot.headline(record.metrics) is record.metrics[0], "first labels, first scorer"
    record.metrics[0]["published"] = {"value": 62.5, "source": "somewhere"}
    figure = LowShot.figures(record)["accuracy_by_labels"]
    linear, published_mark, knn = figure.axes[0].lines
    assert np.asarray(linear.get_xydata()).tolist() == [[1, 40], [12, 70]]
    assert np.asarray(knn.get_xydata()).tolist() == [[1, 45], [12, 65]]
    assert np.asarray(published_mark.get_xydata()).tolist() == [[12, 62.5]]
    figure.canvas.draw()
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["1", "12"]
    both = LowShot.figures(record, _record(params, "s", classes=10))["accuracy_by_labels"]
    assert [line.get_label() for line in both.axes[0].lines] == [
        "linear, r", "linear, r, published 62.5", "knn, r", "linear, s", "knn, s"
    ]  # fmt: skip
    assert np.asarray(both.axes[0].lines[3].get_xdata()).tolist() == [0.5, 6]
