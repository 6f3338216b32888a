"""protocols.logreg: scikit-learn as the reference, and everything that may be missing from a split."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, top_k_accuracy_score
from sklearn.preprocessing import normalize

from ibot_eval import distributed, testing
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.metrics.intervals import wilson
from ibot_eval.probes.head_file import load_head
from ibot_eval.probes.holdout import hold_out
from ibot_eval.protocol import Artifact, Metric, Predictions, Session, Warning
from protocols import logreg
from protocols.logreg import LogReg, LogRegConfig
from tests.fakes import TRANSFORM, FakeBackbone
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def one_thread():
    """Inputs this small gain nothing from threads, and lose much where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _bank(features, labels, name="image"):
    return FeatureBank(
        np.asarray(features, np.float32), np.asarray(labels), [f"{name}/{i}" for i in range(len(labels))]
    )


def _random(n, name, classes=6, width=8, seed=0):
    """Overlapping classes, labelled 3, 5, 7 …"""
    generator = np.random.default_rng([seed, len(name)])
    index = np.arange(n) % classes
    centres = np.random.default_rng(99).normal(size=(classes, width))
    features = (centres[index] + 1.5 * generator.normal(size=(n, width))) * generator.uniform(0.1, 30, (n, 1))
    return _bank(features, 2 * index + 3, name)


@dataclass(frozen=True)
class Outcome:
    """The events of a run, by kind."""

    metrics: Mapping[str, Metric]
    predictions: Predictions
    warnings: list[str]
    artifacts: list[Artifact]

    def value(self, name: str) -> float:
        """A metric's."""
        value = self.metrics[name].value
        assert value is not None
        return value

    def numbers(self) -> dict[str, Any]:
        """Everything that JSON can hold."""
        metrics = {name: [m.value, dict(m.params), m.n, m.interval] for name, m in self.metrics.items()}
        return {"metrics": metrics, "top1": self.predictions.values["top1"].tolist(), "warnings": self.warnings}


def _run(
    config: LogRegConfig,
    train: FeatureBank,
    test: FeatureBank,
    names: Sequence[str] = (),
    output: Path | str = "unused",
    seed: int = 0,
) -> Outcome:
    protocol = LogReg(config)
    banks = {r: train if r.split == "train" else test for r in protocol.features()}
    session = Session(torch.device("cpu"), Path(output), tuple(names), seed=seed, progress=False)
    events = list(protocol.score(banks, session))
    (predictions,) = [e for e in events if isinstance(e, Predictions)]
    return Outcome(
        {e.name: e for e in events if isinstance(e, Metric)},
        predictions,
        [e.message for e in events if isinstance(e, Warning)],
        [e for e in events if isinstance(e, Artifact)],
    )


@pytest.mark.parametrize("backend", ["sklearn", "torch"])
@pytest.mark.parametrize("classes", [2, 6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agrees_with_sklearn_step_by_step(backend, classes, seed):
    multiples = (0.01, 1.0, 30.0, 1000.0)
    train, test = _random(90, "train", classes, seed=seed), _random(60, "test", classes, seed=seed)
    found = _run(LogRegConfig(lambdas=multiples, backend=backend, tolerance=1e-6), train, test, seed=seed)

    x, y, queries = (normalize(a.astype(np.float64)) for a in (train.features, train.features, test.features))
    y = train.labels
    held = hold_out(y, 0.1, seed)
    # Of two classes scikit-learn's C is twice as large.
    models = {m: LogisticRegression(C=(2 if classes == 2 else 1) / m, fit_intercept=False, tol=1e-8) for m in multiples}
    scores = []
    for multiple, model in models.items():
        model.fit(x[~held], y[~held])
        loss = log_loss(y[held], model.predict_proba(x[held]), labels=model.classes_)
        scores.append((-model.score(x[held], y[held]), loss, -multiple))
    best = -min(scores)[2]
    for model in models.values():
        model.fit(x, y)
    accuracy = {multiple: 100 * model.score(queries, test.labels) for multiple, model in models.items()}

    assert not found.warnings
    assert found.predictions.values["top1"].tolist() == list(models[best].predict(queries))
    assert found.predictions.values["label"].tolist() == test.labels.tolist()
    assert found.metrics["top1"].params == {"selection": "held-out", "lambda": f"{best:g}/n"}
    assert found.value("top1") == pytest.approx(accuracy[best])
    assert found.metrics["top1"].interval == wilson(round(accuracy[best] * 0.6), 60)
    assert found.value("top1_best_on_test") == pytest.approx(max(accuracy.values()))
    on_test = max(multiples, key=lambda m: (accuracy[m], m))
    assert found.metrics["top1_best_on_test"].params == {"lambda": f"{on_test:g}/n"}
    if classes > 5:
        shares = models[best].predict_proba(queries)
        top5 = 100 * float(top_k_accuracy_score(test.labels, shares, k=5))
        assert found.value("top5") == pytest.approx(top5)
        assert top5 < 100


def test_lambda_is_not_chosen_on_test():
    # Over these seeds the choice on held-out images is worse on test at least once, or the two would be one.
    gaps = []
    for seed in range(5):
        train, test = _random(60, "train", seed=seed), _random(60, "test", seed=seed)
        found = _run(LogRegConfig(lambdas=(0.01, 1.0, 30.0)), train, test, seed=seed)
        gaps.append(found.value("top1_best_on_test") - found.value("top1"))
    assert min(gaps) >= 0
    assert max(gaps) > 0


def test_lengths_of_features_do_not_matter():
    train, test = _random(60, "train"), _random(40, "test")
    longer, longer_test = (_bank(b.features * np.linspace(1, 1000, len(b))[:, None], b.labels) for b in (train, test))
    assert _run(LogRegConfig(), longer, longer_test).numbers() == _run(LogRegConfig(), train, test).numbers()


def test_concatenated_features_are_divided_by_their_common_length():
    protocol = LogReg(LogRegConfig(features="cls+patch_mean", blocks=(-2, -1), lambdas=(0.1,)))
    requests = protocol.features()
    assert [(r.block, r.reducer) for r in requests if r.split == "train"] == [
        (-2, "cls"), (-2, "patch_mean"), (-1, "cls"), (-1, "patch_mean")
    ]  # fmt: skip
    parts = {r: _random(60 if r.split == "train" else 40, r.split, seed=i % 4) for i, r in enumerate(requests)}
    session = Session(torch.device("cpu"), Path("unused"), (), progress=False)
    (together,) = [e for e in protocol.score(parts, session) if isinstance(e, Predictions)]
    joined, joined_test = (
        _bank(np.concatenate([b.features for r, b in parts.items() if r.split == split], 1), labels)
        for split, labels in (("train", parts[requests[0]].labels), ("test", parts[requests[-1]].labels))
    )
    apart = _run(LogRegConfig(lambdas=(0.1,)), joined, joined_test).predictions
    assert together.values["top1"].tolist() == apart.values["top1"].tolist()


@pytest.mark.parametrize(
    ("setting", "reason"), [({}, "no class of train has an image"), ({"hold_out": 0.0}, "nothing")]
)
def test_nothing_to_hold_out_leaves_the_middle_lambda(setting, reason):
    train, test = _random(6 if not setting else 60, "train"), _random(40, "test")
    found = _run(LogRegConfig(lambdas=(1.0, 0.01, 0.1), **setting), train, test)
    (warning,) = found.warnings
    assert warning.startswith(reason)
    assert "0.1/n" in warning
    assert found.metrics["top1"].params == {"selection": "middle lambda", "lambda": "0.1/n"}
    alone = _run(LogRegConfig(lambdas=(0.1,)), train, test)
    assert not alone.warnings
    assert alone.metrics["top1"].params == {"selection": "given", "lambda": "0.1/n"}
    assert alone.predictions.values["top1"].tolist() == found.predictions.values["top1"].tolist()


def test_one_lambda_is_fitted_once(monkeypatch):
    sizes, fit = [], logreg.fit_logistic
    monkeypatch.setattr(
        logreg, "fit_logistic", lambda x, *rest, **named: sizes.append(len(x)) or fit(x, *rest, **named)
    )
    _run(LogRegConfig(lambdas=(0.1,)), _random(60, "train"), _random(40, "test"))
    assert sizes == [60]
    _run(LogRegConfig(lambdas=(0.1, 1.0)), _random(60, "train"), _random(40, "test"))
    assert sizes[1:] == [60, 60, 54, 54]


def test_one_class():
    train = _bank(np.random.default_rng(0).normal(size=(9, 4)), [7] * 9)
    test = _bank(np.random.default_rng(1).normal(size=(4, 4)), [7, 7, 7, 8])
    found = _run(LogRegConfig(), train, test)
    assert found.value("top1") == 75
    assert found.value("top5") == 75
    assert found.predictions.values["top1"].tolist() == [7] * 4
    assert [w for w in found.warnings if "one class" in w]


def test_classes_that_train_lacks_count_as_wrong():
    train, test = _random(60, "train"), _random(60, "test")
    some = np.flatnonzero(train.labels != 5)
    few = _bank(train.features[some], train.labels[some])
    found = _run(LogRegConfig(), few, test, names=["a", "b", "c", "d", "e", "owl"])
    assert found.warnings == ["10 of 60 test images count as wrong, since the train split has none of their class owl"]
    assert 5 not in found.predictions.values["top1"]
    known = _bank(test.features[test.labels != 5], test.labels[test.labels != 5])
    for name in ("top1", "top5"):
        of_known = _run(LogRegConfig(), few, known).value(name)
        assert found.value(name) == pytest.approx(of_known * 50 / 60)


def test_a_collapsed_backbone_gives_chance_without_complaint():
    train, test = (_bank(np.ones((n, 5)), np.arange(n) % 4) for n in (40, 20))
    found = _run(LogRegConfig(), train, test)
    assert found.value("top1") == 25
    assert not found.warnings


@pytest.mark.parametrize("backend", ["sklearn", "torch"])
def test_an_unconverged_fit_is_a_warning(backend):
    train, test = _random(60, "train"), _random(40, "test")
    config = LogRegConfig(lambdas=(0.01, 0.5), max_iterations=3, backend=backend)
    warnings = _run(config, train, test).warnings
    assert len(warnings) == 4
    for warning, (images, multiple) in zip(
        warnings,
        [(i, m) for i in ("train with lambda", "train without the held-out") for m in ("0.01/n", "0.5/n")],
        strict=True,
    ):
        assert images in warning
        assert f"lambda = {multiple}" in warning
        assert "not converged after 3 iterations" in warning
        assert "--max-iterations (now 3)" in warning
    assert not _run(replace(config, max_iterations=1000), train, test).warnings
    beyond_float64 = _run(replace(config, max_iterations=1000, tolerance=1e-18), train, test).warnings
    assert len(beyond_float64) == 4
    assert all("larger --tolerance" in w and "--max-iterations" not in w for w in beyond_float64)


def test_unlabelled_missing_and_broken_images_are_named():
    good = _random(30, "good")
    unlabelled = _bank(good.features, np.where(np.arange(30) == 4, -1, good.labels), "odd")
    broken = _bank(np.where(np.arange(30)[:, None] == 6, np.nan, good.features), good.labels, "odd")
    empty = _bank(good.features[:0], good.labels[:0])
    for bad, message in ((unlabelled, r"odd/4$|odd/4\n"), (broken, "odd/6 "), (empty, "no images")):
        for role, banks in {"train": (bad, good), "test": (good, bad)}.items():
            with pytest.raises(DataError, match=message) as caught:
                _run(LogRegConfig(), *banks)
            assert role in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"lambdas": ()}, "--lambdas"),
        ({"lambdas": (0.0, 1.0)}, "--lambdas"),
        ({"lambdas": (0.1, 0.1)}, "--lambdas"),
        ({"lambdas": (float("inf"),)}, "--lambdas"),
        ({"lambdas": (float("nan"),)}, "--lambdas"),
        ({"hold_out": 1.0}, "--hold-out"),
        ({"hold_out": -0.1}, "--hold-out"),
        ({"tolerance": 0.0}, "--tolerance"),
        ({"max_iterations": 0}, "--max-iterations"),
        ({"blocks": ()}, "--blocks"),
    ],
)
def test_impossible_settings(settings, where):
    with pytest.raises(ConfigError) as caught:
        LogReg(LogRegConfig(**settings))
    assert caught.value.where == where


def test_features_of_the_network():
    backbone = FakeBackbone()

    def resolved(**settings):
        return LogReg(LogRegConfig(**settings)).for_network(backbone, TRANSFORM, frozenset())

    usual = resolved()
    assert (usual.config.features, usual.config.blocks) == ("cls", (-1,))
    assert usual.features() == [FeatureRequest("train"), FeatureRequest("test")]
    assert usual.as_published()
    assert resolved(lambdas=(1.0, 0.1, 0.01)).as_published()
    assert not resolved(lambdas=(0.1,)).as_published()
    assert not resolved(features="patch_mean").as_published()
    assert not resolved(blocks=(-2,)).as_published()
    assert [r.block for r in resolved(features="last4").features()] == [-3, -2, -1] * 2
    with pytest.raises(ConfigError):
        resolved(blocks=(7,))


def test_the_saved_head_says_the_same(tmp_path):
    train, test = _random(60, "train"), _random(40, "test")
    names = [f"class {i}" for i in range(14)]
    found = _run(LogRegConfig(save_head=True), train, test, names=names, output=tmp_path)
    (artifact,) = found.artifacts
    assert (artifact.path, artifact.kind) == (tmp_path / "head.safetensors", "head")
    head = load_head(tmp_path)
    assert head.normalised
    assert not head.bias.any()
    assert head.protocol == "logreg"
    assert list(head.class_names) == [f"class {c}" for c in (3, 5, 7, 9, 11, 13)]
    assert [dict(f) for f in head.features] == [{"block": -1, "norm": "published", "reducer": "cls"}]
    predicted = np.asarray(head.labels)[head.logits(torch.from_numpy(test.features)).argmax(1)]
    assert predicted.tolist() == found.predictions.values["top1"].tolist()
    assert not _run(LogRegConfig(), train, test, output=tmp_path).artifacts


def _on_a_rank(folder):
    distributed.init("cpu")
    try:
        # Of three ranks with one lambda, two have nothing to fit.
        configs = [LogRegConfig(lambdas=(0.1,)), LogRegConfig(save_head=True)]
        return [_run(c, _random(60, "train"), _random(40, "test"), output=folder).numbers() for c in configs]
    finally:
        distributed.shutdown()


def test_ranks_share_the_fits_and_change_nothing():
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        alone = json.loads(json.dumps(_on_a_rank(one)))
        assert run_ranks(3, _on_a_rank, many) == [alone] * 3
        heads = [load_head(folder).weight for folder in (one, many)]
    torch.testing.assert_close(heads[0], heads[1], rtol=0, atol=1e-6)


def test_keeps_the_contract():
    events = testing.check_protocol("logreg")
    assert any(isinstance(e, Metric) and e.name == "top1" and e.value == 100 for e in events)
