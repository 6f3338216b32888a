"""protocols.clustering: golden numbers, k-means by scikit-learn alone, and everything that may be missing or odd."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from torch import nn

from ibot_eval import runner
from ibot_eval.errors import ConfigError, DataError, MissingExtra
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.protocol import Metric, Predictions, Session, Warning
from ibot_eval.published import lookup
from ibot_eval.record import EvalRecord
from ibot_eval.testing import check_protocol
from protocols.clustering import Clustering, ClusteringConfig
from tests.fakes import TRANSFORM, FakeBackbone, fake_loaded

GOLDEN = json.loads((Path(__file__).parent / "golden" / "clustering.json").read_text())
HEAD = FeatureRequest("test", reducer="head_argmax")
CLS = FeatureRequest("test")


def _bank(features, labels, name="image"):
    return FeatureBank(np.asarray(features), np.asarray(labels), [f"{name}/{i}.png" for i in range(len(labels))])


def _blobs(n=200, k=4, width=6, seed=0):
    generator = np.random.default_rng(seed)
    labels = np.arange(n) % k
    return (generator.normal(size=(k, width))[labels] + 0.05 * generator.normal(size=(n, width))), labels


def _session(**options):
    return Session(torch.device("cpu"), Path("unused"), (), progress=False, **options)


def _run(config, banks, **session):
    """{(method, name): metric}, predictions, warnings."""
    events = list(Clustering(config).score(banks, _session(**session)))
    metrics = {(e.params["method"], e.name): e for e in events if isinstance(e, Metric)}
    (predictions,) = [e for e in events if isinstance(e, Predictions)]
    return metrics, predictions, [e.message for e in events if isinstance(e, Warning)]


def _head(labels, clusters, outputs=None):
    checkpoint = {} if outputs is None else {"projection_head": {"K": outputs}}
    return _run(ClusteringConfig(methods=("head",)), {HEAD: _bank(clusters, labels)}, checkpoint=checkpoint)


@pytest.mark.parametrize("case", ["equal_k", "more_clusters", "fewer_clusters", "one_cluster"])
def test_golden_numbers_of_the_head(case):
    rows = GOLDEN[case]
    metrics, predictions, warnings = _head(rows["labels"], rows["predictions"])
    assert len(metrics) == 4
    for name in ("nmi", "ari", "fmi", "acc"):
        metric = metrics["head", name]
        assert metric.value == pytest.approx(100 * rows["accuracy" if name == "acc" else name], abs=1e-9)
        assert metric.n == len(rows["labels"])
        assert metric.params == {"method": "head", "used": len(set(rows["predictions"]))}
    assert predictions.values["cluster@method=head"].tolist() == rows["predictions"]
    assert predictions.values["label"].tolist() == rows["labels"]
    assert bool(warnings) == (case == "one_cluster")


@pytest.mark.parametrize("backend", ["faiss", "sklearn"])
def test_k_means_by_scikit_learn_alone(backend):
    pytest.importorskip("faiss")
    features, labels = _blobs()
    mixed = np.where(np.arange(200) < 30, (labels + 1) % 4, labels)
    config = ClusteringConfig(methods=("kmeans",), backend=backend)
    metrics, predictions, warnings = _run(config, {CLS: _bank(features, mixed)})
    reference = KMeans(4, random_state=0).fit_predict(features)
    assert metrics["kmeans", "nmi"].value == pytest.approx(100 * normalized_mutual_info_score(mixed, reference))
    assert metrics["kmeans", "acc"].value == pytest.approx(85)
    assert metrics["kmeans", "acc"].params == {"method": "kmeans", "clusters": 4, "used": 4}
    assert predictions.values["cluster@method=kmeans"].dtype == np.int64
    assert not warnings


def test_spherical_sees_directions_only():
    labels = np.arange(80) % 2
    # By distance it is best to have the long vectors of one class alone in a cluster.
    features = np.eye(2, 5)[labels] * np.repeat([1, 50], 40)[:, None]
    config = ClusteringConfig(methods=("spherical", "kmeans"))
    metrics, predictions, _ = _run(config, {CLS: _bank(features, labels)})
    assert metrics["spherical", "acc"].value == 100
    assert metrics["kmeans", "acc"].value == 75
    assert list(predictions.values) == ["label", "cluster@method=kmeans", "cluster@method=spherical"]


@pytest.mark.parametrize("clusters", [1, 2, 4, 7])
def test_any_number_of_clusters(clusters):
    features, labels = _blobs()
    config = ClusteringConfig(methods=("kmeans", "spherical"), clusters=clusters)
    metrics, predictions, warnings = _run(config, {CLS: _bank(features, labels * 10)})
    for method in config.methods:
        found = predictions.values[f"cluster@method={method}"]
        assert sorted(set(found)) == list(range(clusters))
        assert metrics[method, "nmi"].params == {"method": method, "clusters": clusters, "used": clusters}
        assert metrics[method, "nmi"].value == pytest.approx(100 * normalized_mutual_info_score(labels, found))
    if clusters <= 4:
        assert metrics["kmeans", "acc"].value == 100 * clusters / 4
    assert not warnings


def test_the_seed_of_the_session_is_that_of_the_starts():
    generator = np.random.default_rng(0)
    banks = {CLS: _bank(generator.normal(size=(120, 6)), np.arange(120) % 9)}
    config = ClusteringConfig(methods=("kmeans",), restarts=1, iterations=2)
    first, again, other = (_run(config, banks, seed=s)[1].values["cluster@method=kmeans"].tolist() for s in (0, 0, 1))
    assert first == again != other


def test_more_clusters_than_images():
    features, labels = _blobs(20)
    protocol = Clustering(ClusteringConfig(methods=("kmeans",), clusters=21))
    with pytest.raises(ConfigError, match="21 clusters of 20 images of the test split") as caught:
        protocol.check({"train": 100, "test": 20}, _session())
    assert caught.value.where == "--clusters"
    protocol.check({"train": 100, "test": 21}, _session())
    with pytest.raises(ConfigError, match="21 clusters of 20 images"):
        list(protocol.score({CLS: _bank(features, labels)}, _session()))


def test_settings_without_an_effect():
    for name in ("clusters", "restarts", "features", "blocks"):
        with pytest.raises(ConfigError, match=f"--{name} has no effect"):
            Clustering(ClusteringConfig(methods=("head",))).check({"test": 9}, _session(asked=frozenset({name})))
        Clustering(ClusteringConfig()).check({"test": 9}, _session(asked=frozenset({name})))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"methods": ()}, "--methods"),
        ({"methods": ("head", "head")}, "--methods"),
        ({"clusters": 0}, "--clusters"),
        ({"restarts": 0}, "--restarts"),
        ({"iterations": -1}, "--iterations"),
        ({"blocks": ()}, "--blocks"),
        ({"blocks": (-1, -1)}, "--blocks"),
    ],
)
def test_impossible_settings(settings, where):
    with pytest.raises(ConfigError) as caught:
        Clustering(ClusteringConfig(**settings))
    assert caught.value.where == where


def test_a_checkpoint_without_a_head_is_clustered_by_its_features():
    loaded = fake_loaded()
    protocol = Clustering(ClusteringConfig())
    usable, missing = runner.available(protocol.features(), loaded)
    assert usable == [CLS]
    assert list(missing) == [HEAD]
    features, labels = _blobs()
    metrics, predictions, (warning,) = _run(protocol.config, {CLS: _bank(features, labels)}, unavailable=missing)
    assert {method for method, _ in metrics} == {"kmeans", "spherical"}
    assert set(predictions.values) == {"label", "cluster@method=kmeans", "cluster@method=spherical"}
    assert warning.startswith("method head is left out: head_argmax needs a projection head")
    with pytest.raises(ConfigError, match="needs a projection head"):
        runner.available(Clustering(ClusteringConfig(methods=("head",))).features(), loaded)


def test_a_checkpoint_with_a_head_gets_all_three():
    protocol = Clustering(ClusteringConfig())
    usable, missing = runner.available(protocol.features(), fake_loaded(head=nn.Linear(6, 9)))
    assert (usable, missing) == ([HEAD, CLS], {})
    features, labels = _blobs()
    banks = {CLS: _bank(features, labels), HEAD: _bank(labels * 3, labels)}
    metrics, _, warnings = _run(protocol.config, banks, checkpoint={"projection_head": {"K": 1000}})
    assert list(dict.fromkeys(method for method, _ in metrics)) == ["head", "kmeans", "spherical"]
    assert metrics["head", "nmi"].params == {"method": "head", "clusters": 1000, "used": 4}
    assert not warnings


def test_collapse_empty_clusters_and_one_class_are_warned_of():
    labels = np.arange(12) % 3
    metrics, _, (warning,) = _head(labels, np.full(12, 5), outputs=8)
    assert "collapsed" in warning
    assert metrics["head", "nmi"].value == 0
    features = np.eye(3)[labels]
    config = ClusteringConfig(methods=("kmeans", "spherical"), clusters=7)
    metrics, _, warnings = _run(config, {CLS: _bank(features, labels)})
    for method, warning in zip(config.methods, warnings, strict=True):
        used = metrics[method, "nmi"].params["used"]
        assert used <= 3
        assert warning == f"{7 - used} of 7 clusters of {method} stayed empty"
    config = ClusteringConfig(methods=("kmeans",))
    metrics, _, (warning,) = _run(config, {CLS: _bank(features, np.full(12, 2))})
    assert "one class" in warning
    assert metrics["kmeans", "acc"].value == 100
    assert metrics["kmeans", "acc"].params["clusters"] == 1


def test_unlabelled_missing_and_broken_images_are_named():
    features, labels = _blobs(20)
    broken = np.where(np.arange(20)[:, None] == 6, np.nan, features)
    some = np.where(np.arange(20) == 4, -1, labels)
    config = ClusteringConfig(methods=("spherical",))
    with pytest.raises(DataError, match=r"image/6\.png"):
        _run(config, {CLS: _bank(broken, labels)})
    with pytest.raises(DataError, match=r"have no label, the first being image/4\.png"):
        _run(config, {CLS: _bank(features, some)})
    with pytest.raises(DataError, match=r"have no label, the first being image/4\.png"):
        _head(some, labels)
    with pytest.raises(DataError, match="test split has no images"):
        _run(config, {CLS: _bank(features[:0], labels[:0])})


def test_another_split_blocks_and_features():
    config = ClusteringConfig(methods=("head", "kmeans"), split="train", features="cls+patch_mean", blocks=(-2, -1))
    protocol = Clustering(config)
    head, *requests = protocol.features()
    assert (head.reducer, head.optional) == ("head_argmax", True)
    assert {r.split for r in protocol.features()} == {"train"}
    assert [(r.block, r.reducer) for r in requests] == [
        (-2, "cls"), (-2, "patch_mean"), (-1, "cls"), (-1, "patch_mean")
    ]  # fmt: skip
    features, labels = _blobs()
    # No part tells all four classes apart; together they do.
    parts = [np.eye(4)[:, [i]][labels] * features.std() for i in range(4)]
    banks = {r: _bank(part, labels) for r, part in zip(requests, parts, strict=True)} | {head: _bank(labels, labels)}
    metrics, _, _ = _run(config, banks)
    assert metrics["kmeans", "acc"].value == 100
    assert metrics["head", "acc"].params == {"method": "head", "used": 4, "split": "train"}
    variant = {"split": "train", "features": "cls+patch_mean", "blocks": (-2, -1)}
    assert metrics["kmeans", "acc"].params == {"method": "kmeans", "clusters": 4, "used": 4} | variant


def test_the_record_says_which_features_and_backend_were_used(monkeypatch):
    def resolved(**settings):
        return Clustering(ClusteringConfig(**settings)).for_network(FakeBackbone(), TRANSFORM, frozenset()).config

    pytest.importorskip("faiss")
    assert resolved() == ClusteringConfig(blocks=(-1,), backend="faiss")
    assert resolved(features="last4", backend="sklearn") == ClusteringConfig(
        features="last4", blocks=(-3, -2, -1), backend="sklearn"
    )
    with pytest.raises(ConfigError, match="block"):
        resolved(blocks=(7,))
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert resolved().backend == "sklearn"
    with pytest.raises(MissingExtra):
        resolved(backend="faiss")


def test_published_numbers_belong_to_a_head_of_1000_outputs():
    metric = {"name": "acc", "params": {"method": "head", "clusters": 1000, "used": 950}}
    key = Clustering(ClusteringConfig()).published_key("clustering", metric, "ImageNet-1K")
    assert key is not None
    found = lookup(key.protocol, key.metric, data=key.data, method="iBOT", arch="vit-s/16", headline=True)
    assert found is not None
    assert found["value"] == 43.4
    for params in ({"method": "head", "clusters": 8192}, {"method": "head"}, {"method": "kmeans", "clusters": 1000}):
        other = {"name": "acc", "params": params}
        assert Clustering(ClusteringConfig()).published_key("clustering", other, "ImageNet-1K") is None
    assert Clustering(ClusteringConfig(split="train")).published_key("clustering", metric, "ImageNet-1K") is None


def _record(run, values):
    metrics = [
        {"name": name, "value": value, "unit": "%", "params": {"method": method}}
        for (method, name), value in values.items()
    ]
    return EvalRecord(run=run, protocol="clustering", protocol_version=1, metrics=metrics)


def test_headline_is_the_head_where_there_is_one():
    record = _record("r", {("spherical", "nmi"): 90, ("kmeans", "nmi"): 80, ("head", "acc"): 5, ("head", "nmi"): 10})
    assert Clustering.headline(record.metrics) is record.metrics[3]
    assert Clustering.headline(record.metrics[:3]) is record.metrics[1]
    assert Clustering.headline(record.metrics[:1]) is record.metrics[0]
    assert Clustering.headline([]) is None


def test_figure_has_a_bar_for_every_record_method_and_measure():
    names = ("nmi", "ari", "fmi", "acc")
    first = _record("a", {(m, n): 10.0 * i + j for i, m in enumerate(("head", "kmeans")) for j, n in enumerate(names)})
    first.metrics[0]["published"] = {"value": 78.6, "source": "somewhere"}
    second = _record("b", {("kmeans", n): value for n, value in zip(names, (50, -3, None, 52), strict=True)})
    figure = Clustering.figures(first, second)["agreement"]
    axes = figure.axes[0]
    heights = [[bar.get_height() for bar in container] for container in axes.containers]  # type: ignore[union-attr]
    assert heights == [[0, 1, 2, 3], [10, 11, 12, 13], [50, -3, 52]]
    bars = sorted((bar.get_x(), bar.get_width()) for container in axes.containers for bar in container)  # type: ignore[union-attr]
    assert all(x + width <= following + 1e-9 for (x, width), (following, _) in itertools.pairwise(bars))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["NMI", "ARI", "FMI", "ACC"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "published",
        "a, head",
        "a, kmeans",
        "b, kmeans",
    ]
    (dash,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert np.asarray(dash.get_ydata()).tolist() == [78.6, 78.6]
    figure.canvas.draw()
    alone = Clustering.figures(first)["agreement"]
    assert "head" in [text.get_text() for text in alone.legends[0].get_texts()]


def test_conforms():
    events = check_protocol("clustering")
    metrics = {(e.params["method"], e.name): e for e in events if isinstance(e, Metric)}
    assert metrics["head", "acc"].value == 100
    assert len(metrics) == 12
