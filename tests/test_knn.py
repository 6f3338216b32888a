"""protocols.knn: golden numbers, an independent implementation, and everything that used to break."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ibot_eval import distributed, neighbors, recipes
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.features import FeatureBank
from ibot_eval.metrics.intervals import wilson
from ibot_eval.metrics.votes import cumulative_votes
from ibot_eval.protocol import Metric, Predictions, Session, Warning
from ibot_eval.published import entries
from ibot_eval.record import EvalRecord
from protocols import knn
from protocols.knn import KNN, KNNConfig

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def one_thread():
    """Inputs this small gain nothing from threads, and lose much where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _bank(features, labels, name="image"):
    return FeatureBank(np.asarray(features), np.asarray(labels), [f"{name}/{i}.png" for i in range(len(labels))])


def _session(asked=(), names=()):
    return Session(torch.device("cpu"), Path("unused"), tuple(names), progress=False, asked=frozenset(asked))


def _run(config, gallery, query=None, **session):
    """Events by kind: {(name, k): metric}, predictions, warnings."""
    protocol = KNN(config)
    banks = {r: gallery if query is None or r.split == "train" else query for r in protocol.features()}
    events = list(protocol.score(banks, _session(**session)))
    metrics = {(e.name, e.params["k"]): e for e in events if isinstance(e, Metric)}
    (predictions,) = [e for e in events if isinstance(e, Predictions)]
    return metrics, predictions, [e.message for e in events if isinstance(e, Warning)]


def _reference(gallery, labels, queries, k, temperature, skip_self=False):
    """Plain loops in float64 over exact sums; (ordered voted classes, weights) of each query."""
    unit = [m / np.maximum(np.linalg.norm(m, axis=1, keepdims=True), 1e-300) for m in (queries, gallery)]
    results = []
    for i, row in enumerate(unit[0] @ unit[1].T):
        if skip_self:
            row[i] = -np.inf
        votes = {}
        for j in np.argsort(-row, kind="stable")[:k]:
            votes[int(labels[j])] = votes.get(int(labels[j]), 0.0) + np.exp((row[j] - row.max()) / temperature)
        results.append((sorted(votes, key=lambda c: (-votes[c], c)), votes))
    return results


def _random(n, width, classes, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, n)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return (centres[labels] + generator.normal(size=(n, width))).astype(np.float32), labels


@pytest.fixture(scope="module")
def golden():
    tensors = load_file(GOLDEN / "knn.safetensors")
    rows = json.loads((GOLDEN / "knn.json").read_text())
    banks = [_bank(tensors[f"{s}_features"], tensors[f"{s}_labels"], s) for s in ("train", "test")]
    return banks, rows


@pytest.mark.parametrize("temperature", [0.07, 0.2])
@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_published_numbers_on_every_row(golden, temperature, backend):
    pytest.importorskip("faiss")
    (gallery, query), rows = golden
    wanted = [row for row in rows if row["temperature"] == temperature]
    ks = tuple(row["k"] for row in wanted)
    assert len(ks) == 5
    metrics, _, warnings = _run(KNNConfig(k=ks, temperature=temperature, backend=backend), gallery, query)
    for row in wanted:
        for name in ("top1", "top5"):
            metric = metrics[name, row["k"]]
            assert metric.value == pytest.approx(row[name], abs=1e-9), (name, row)
            assert metric.n == 300
            assert metric.interval == wilson(round(row[name] * 3), 300)
    assert not warnings


def test_filling_up_the_five_best_changes_no_golden_row(golden):
    # The published code fills the five best with classes that got no vote, in an order that torch.sort leaves open.
    # Here most queries have fewer than five classes among 5 neighbours, so the fill could matter; that the golden
    # top-5 equals the share of queries with a vote for the right class shows that it did not.
    (gallery, query), rows = golden
    found = _reference(gallery.features, gallery.labels, query.features, 5, 0.07)
    assert sum(len(order) < 5 for order, _ in found) > 100
    voted = np.mean([label in order for label, (order, _) in zip(query.labels, found, strict=True)])
    assert 100 * voted == pytest.approx(next(row["top5"] for row in rows if row["k"] == 5))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_cases_agree_with_plain_loops(data):
    n, q = data.draw(st.integers(1, 120), "gallery"), data.draw(st.integers(1, 20), "queries")
    classes, seed = data.draw(st.sampled_from([1, 2, 3, 7, 1500])), data.draw(st.integers(0, 10**6))
    ks = tuple(data.draw(st.sets(st.sampled_from([1, 2, 4, 5, n, (n + 1) // 2]).filter(lambda k: k <= n), min_size=1)))
    temperature = data.draw(st.sampled_from([0.02, 0.07, 1.0]))
    features, labels = _random(n, 6, classes, seed)
    queries, query_labels = _random(q, 6, classes, seed + 1)
    labels, query_labels = labels * 13 + 5, query_labels * 13 + 5
    if n > 2 and data.draw(st.booleans(), "duplicate"):
        features[1] = features[0]
    metrics, predictions, _ = _run(
        KNNConfig(k=ks, temperature=temperature), _bank(features, labels), _bank(queries, query_labels), asked={"k"}
    )
    assert predictions.values["label"].tolist() == query_labels.tolist()
    for k in ks:
        found = _reference(features.astype(np.float64), labels, queries.astype(np.float64), k, temperature)
        pairs = list(zip(query_labels, found, strict=True))
        assert predictions.values[f"top1@k={k}"].tolist() == [order[0] for order, _ in found]
        assert metrics["top1", k].value == pytest.approx(100 * np.mean([c == order[0] for c, (order, _) in pairs]))
        assert metrics["top5", k].value == pytest.approx(100 * np.mean([c in order[:5] for c, (order, _) in pairs]))


def test_one_search_for_all_k_gives_what_each_gives_alone():
    gallery, query = _bank(*_random(300, 8, 9, 0)), _bank(*_random(40, 8, 9, 1))
    together, predictions, _ = _run(KNNConfig(k=(100, 3, 20), save_votes=True), gallery, query)
    for k in (3, 20, 100):
        alone, alone_predictions, _ = _run(KNNConfig(k=(k,), save_votes=True), gallery, query)
        assert alone["top1", k] == together["top1", k]
        assert alone["top5", k] == together["top5", k]
        for name in (f"top1@k={k}", f"votes@k={k}"):
            np.testing.assert_array_equal(alone_predictions.values[name], predictions.values[name])


def test_saved_votes_are_probabilities_by_class_name():
    features, labels = _random(80, 5, 4, 0)
    labels = np.array([0, 2, 3, 5])[labels]
    queries, query_labels = _random(12, 5, 4, 1)
    query_labels = np.array([0, 2, 3, 5])[query_labels]
    for names, columns in (("abcdefg", 7), ("abc", 4)):
        config = KNNConfig(k=(10,), save_votes=True)
        _, predictions, _ = _run(config, _bank(features, labels), _bank(queries, query_labels), names=names)
        votes = predictions.values["votes@k=10"]
        assert votes.shape == (12, columns)
        np.testing.assert_allclose(votes.sum(1), 1, rtol=1e-6)
        classes = np.arange(7) if columns == 7 else np.array([0, 2, 3, 5])
        for row, (_, weights) in zip(votes, _reference(features, labels, queries, 10, 0.07), strict=True):
            expected = [weights.get(c, 0) / sum(weights.values()) for c in classes]
            np.testing.assert_allclose(row, expected, atol=1e-5)
    _, without, _ = _run(KNNConfig(k=(10,)), _bank(features, labels), _bank(queries, query_labels))
    assert set(without.values) == {"label", "top1@k=10"}


@pytest.mark.parametrize("temperature", [0.001, 1e-6, 1e6])
def test_votes_stay_numbers_at_any_temperature(temperature):
    # exp(1 / 0.001) overflows, exp(-0.9 / 0.001) is nothing even in float64.
    similarities = torch.tensor([[0.9, 0.5, 0.4, -0.9]])
    votes = next(cumulative_votes(similarities, torch.tensor([[2, 0, 0, 1]]), [4], temperature, 4))[0]
    assert votes.isfinite().all()
    assert votes[3] == 0
    assert (votes[:3] > 0).all()
    assert votes.argmax() == (2 if temperature < 1 else 0)


def test_top5_counts_no_class_without_a_vote():
    gallery = _bank(np.eye(6, 8), np.arange(6))
    query = _bank(np.array([[1, 0.9, 0.8, 0, 0, 0, 0, 0]] * 3), [0, 2, 5])
    metrics, _, _ = _run(KNNConfig(k=(1, 3)), gallery, query)
    assert [metrics[m].value for m in (("top1", 1), ("top5", 1), ("top5", 3))] == pytest.approx(
        [100 / 3] * 2 + [200 / 3]
    )


def test_classes_that_the_gallery_lacks_count_as_wrong():
    gallery = _bank(np.eye(3), [0, 7, 7])
    query = _bank(np.eye(3), [0, 3, 11])
    metrics, predictions, warnings = _run(KNNConfig(k=(1, 3)), gallery, query, names=["ant", "bee", "cat", "dog"])
    assert metrics["top1", 1].value == pytest.approx(100 / 3)
    assert metrics["top5", 3].value == pytest.approx(100 / 3)
    assert predictions.values["top1@k=1"].tolist() == [0, 7, 7]
    assert warnings == ["2 of 3 test images count as wrong, since the gallery has none of their classes dog, 11"]


def test_a_long_list_of_missing_classes_is_cut():
    _, _, (warning,) = _run(KNNConfig(k=(1,)), _bank(np.eye(2), [0, 0]), _bank(np.ones((30, 2)), np.arange(1, 31)))
    assert warning.endswith("classes 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 20 more")


def test_default_k_beyond_the_gallery_is_left_out():
    query = _bank(*_random(9, 4, 3, 1))
    metrics, _, (warning,) = _run(KNNConfig(), _bank(*_random(50, 4, 3, 0)), query)
    assert {k for _, k in metrics} == {10, 20}
    assert "100, 200" in warning
    assert "50 gallery images" in warning
    metrics, _, (warning,) = _run(KNNConfig(), _bank(*_random(7, 4, 3, 0)), query)
    assert {k for _, k in metrics} == {7}
    assert "k = 7 is used" in warning


def test_k_asked_for_by_hand_beyond_the_gallery_is_an_error():
    gallery = _bank(*_random(50, 4, 3, 0))
    with pytest.raises(ConfigError, match=r"k = 51, 200 is more than the 50 gallery images"):
        _run(KNNConfig(k=(10, 200, 51)), gallery, gallery, asked={"k"})
    with pytest.raises(ConfigError, match=r"k = 50 is more than the 49 other images"):
        _run(KNNConfig(k=(50,), leave_one_out=True), gallery, asked={"k"})


@pytest.mark.parametrize(
    ("settings_", "where"),
    [
        ({"k": (0,)}, "--k"),
        ({"k": (5, -1)}, "--k"),
        ({"k": (5, 5)}, "--k"),
        ({"k": ()}, "--k"),
        ({"temperature": 0.0}, "--temperature"),
        ({"temperature": -0.07}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"blocks": ()}, "--blocks"),
        ({"blocks": (-1, -1)}, "--blocks"),
    ],
)
def test_impossible_settings(settings_, where):
    with pytest.raises(ConfigError) as caught:
        KNN(KNNConfig(**settings_))
    assert caught.value.where == where


def test_unlabelled_missing_and_broken_images_are_named():
    good = _bank(*_random(20, 4, 3, 0))
    labels = good.labels.copy()
    labels[[4, 9]] = -1
    unlabelled = _bank(good.features, labels, "odd")
    broken = _bank(np.where(np.arange(20)[:, None] == 6, np.nan, good.features), good.labels, "odd")
    empty = _bank(good.features[:0], good.labels[:0])
    config = KNNConfig(k=(3,))
    for role, (gallery, query) in {"gallery": (unlabelled, good), "query": (good, unlabelled)}.items():
        with pytest.raises(DataError, match=rf"2 of 20 {role} images have no label, the first being odd/4\.png"):
            _run(config, gallery, query)
    for role, (gallery, query) in {"gallery": (empty, good), "query": (good, empty)}.items():
        with pytest.raises(DataError, match=f"the {role} has no images"):
            _run(config, gallery, query)
    for gallery, query in ((broken, good), (good, broken)):
        with pytest.raises(DataError, match=r"odd/6\.png"):
            _run(config, gallery, query)
    with pytest.raises(DataError, match="one image"):
        _run(KNNConfig(leave_one_out=True), _bank(np.ones((1, 2)), [0]))


@pytest.mark.parametrize("split", ["train", "test"])
def test_leave_one_out(split):
    features, labels = _random(90, 5, 4, 0)
    config = KNNConfig(k=(1, 89), leave_one_out=True, loo_split=split)
    assert {r.split for r in KNN(config).features()} == {split}
    metrics, predictions, _ = _run(config, _bank(features, labels), asked={"k"})
    for k in (1, 89):
        found = _reference(features.astype(np.float64), labels, features.astype(np.float64), k, 0.07, skip_self=True)
        assert predictions.values[f"top1@k={k}"].tolist() == [order[0] for order, _ in found]
    assert metrics["top1", 1].n == 90


def test_blocks_and_poolings_are_concatenated():
    config = KNNConfig(k=(5,), blocks=(-2, -1), pooling="cls+patch_mean")
    protocol = KNN(config)
    requests = protocol.features()
    assert [(r.split, r.block, r.reducer) for r in requests if r.split == "test"] == [
        ("test", -2, "cls"), ("test", -2, "patch_mean"), ("test", -1, "cls"), ("test", -1, "patch_mean")
    ]  # fmt: skip
    sizes = {"train": 70, "test": 15}
    labels = {split: np.arange(n) % 4 for split, n in sizes.items()}
    banks = {
        r: _bank(np.random.default_rng(i).normal(size=(sizes[r.split], 3)), labels[r.split])
        for i, r in enumerate(requests)
    }
    (predictions,) = [e for e in protocol.score(banks, _session()) if isinstance(e, Predictions)]
    whole = {s: np.concatenate([banks[r].features for r in requests if r.split == s], 1) for s in sizes}
    expected = _reference(whole["train"], labels["train"], whole["test"], 5, 0.07)
    assert predictions.values["top1@k=5"].tolist() == [order[0] for order, _ in expected]
    banks[requests[0]] = FeatureBank(banks[requests[0]].features, labels["train"], [str(i) for i in range(70)])
    with pytest.raises(ValueError, match="different images"):
        list(protocol.score(banks, _session()))


def test_ranks_share_the_queries_and_change_no_bit(monkeypatch):
    monkeypatch.setattr(neighbors, "QUERY_TILE", 16)
    gallery, query = _bank(*_random(300, 6, 5, 0)), _bank(*_random(101, 6, 5, 1))
    config = KNNConfig(k=(5, 50), save_votes=True)
    _, alone, _ = _run(config, gallery, query)
    for world in (2, 3, 9):
        parts: list[dict[str, torch.Tensor]] = []
        classify = KNN._classify
        monkeypatch.setattr(distributed, "world_size", lambda world=world: world)
        for rank in range(world):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            parts.append(classify(KNN(config), [gallery], [query], gallery.labels, query.labels, (5, 50), _session()))
        rows = torch.cat([p["rows"] for p in parts])
        assert sorted(rows.tolist()) == list(range(101))
        for name, saved in (("predicted", "top1@k={}"), ("votes", "votes@k={}")):
            joined = torch.cat([p[name] for p in parts if len(p["rows"])])[rows.argsort()]
            for i, k in enumerate((5, 50)):
                np.testing.assert_array_equal(joined[:, i].numpy(), alone.values[saved.format(k)])


def test_many_classes_are_voted_on_in_parts(monkeypatch):
    gallery, query = _bank(*_random(60, 6, 30, 0)), _bank(*_random(25, 6, 30, 1))
    whole = _run(KNNConfig(k=(7,)), gallery, query)
    monkeypatch.setattr(knn, "VOTE_VALUES", 90)
    assert _run(KNNConfig(k=(7,)), gallery, query)[0] == whole[0]


def test_figure_and_headline():
    metrics = [
        {"name": name, "value": value, "unit": "%", "params": {"k": k}, "interval": (value - 2, value + 2)}
        for name, k, value in (("top1", 20, 70.0), ("top1", 10, 71.0), ("top5", 20, 92.0), ("top5", 10, 91.0))
    ]
    metrics[1]["published"] = {"value": 75.2, "source": "somewhere"}
    assert KNN.headline(metrics) is metrics[0], "k = 20 whichever is best"
    assert KNN.headline(metrics[1:]) is metrics[1]
    assert KNN.headline([]) is None
    figure = KNN.figures(EvalRecord(run="r", protocol="knn", protocol_version=1, metrics=metrics))["accuracy_by_k"]
    top1, top5, published = figure.axes[0].lines
    assert top1.get_xydata().tolist() == [[10, 71], [20, 70]]
    assert top5.get_xydata().tolist() == [[10, 91], [20, 92]]
    assert published.get_ydata()[0] == 75.2
    figure.canvas.draw()


@pytest.mark.parametrize("name", ["vits16", "vitb16", "vitl16", "swint7", "swint14"])
def test_imagenet_recipes_quote_the_published_number(name):
    path = recipes.find(f"knn/imagenet_{name}")
    architecture = {"vits16": "vit-s/16", "vitb16": "vit-b/16", "vitl16": "vit-l/16"}.get(name, f"swin-t/{name[5:]}")
    wanted = ("knn", "ImageNet-1K", "iBOT", architecture)
    (value,) = [e["value"] for e in entries() if (e["protocol"], e["data"], e["method"], e["arch"]) == wanted]
    assert f"top-1 {value} %" in path.read_text(encoding="utf-8")
    assert recipes.flags(path) == ["--data-name", "ImageNet-1K", "--method", "iBOT"]


def test_imagenette_recipe():
    flags = recipes.flags(recipes.find("knn/imagenette128"))
    assert " ".join(flags) == "--k 5 10 20 100 --resize 128 --crop 112 --train-per-class 150 --test-per-class 80"
