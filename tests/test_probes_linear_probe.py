"""probes.linear_probe: against a plain loop over heads, and what must not influence the choice."""

from __future__ import annotations

import math
import warnings as python_warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.probes.holdout import hold_out
from ibot_eval.probes.labelled import Labelled
from ibot_eval.probes.linear_probe import ProbeSettings, classify, train_probe
from ibot_eval.probes.sweep import HeadSetting, Sweep
from tests.ranks import run_ranks

CPU = torch.device("cpu")
RATES = (1e-3, 0.01, 0.1, 1.0, 10.0)


@pytest.fixture(autouse=True)
def one_thread():
    """Inputs this small gain nothing from threads, and lose much where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def data(n, seed, classes=(0, 3, 4, 9), width=6, spread=1.5):
    generator = np.random.default_rng(seed)
    labels = generator.choice(classes, n)
    labels[: len(classes)] = classes
    centres = np.random.default_rng(99).normal(size=(10, width))
    features = centres[labels] + spread * generator.normal(size=(n, width))
    return Labelled(features.astype(np.float32), labels, [f"image/{i}.png" for i in range(n)])


def probe(train, test, seed=0, **settings):
    return train_probe(train, test, ProbeSettings(**{"epochs": 4, **settings}), device=CPU, seed=seed)


def plain_loop(train, test, rates, epochs, batch, seed):
    """Every head by itself with torch's layer, loss, optimizer and a schedule in closed form."""
    held = hold_out(train.labels, 0.1, seed)
    width, classes = train.features.shape[1], train.classes
    features, targets = torch.from_numpy(train.features), torch.from_numpy(train.targets(classes))
    start = Sweep(width, len(classes), [HeadSetting(1.0)], seed=seed).head(0)
    steps = math.ceil(len(train) / batch)
    curves = {}
    for rate in rates:
        for sees_held_out in (False, True):
            layer = torch.nn.Linear(width, len(classes))
            layer.load_state_dict({"weight": start[0], "bias": start[1]})
            optimizer = torch.optim.SGD(layer.parameters(), rate, momentum=0.9)
            step, curve = 0, []
            for epoch in range(1, epochs + 1):
                order = np.random.default_rng([seed, epoch]).permutation(len(train))
                for rows in np.array_split(order, steps):
                    optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / (epochs * steps))) / 2
                    counted = rows if sees_held_out else rows[~held[rows]]
                    optimizer.zero_grad()
                    F.cross_entropy(layer(features[counted]), targets[counted]).backward()
                    optimizer.step()
                    step += 1
                with torch.no_grad():
                    seen = layer(torch.from_numpy(test.features)) if sees_held_out else layer(features[held])
                if sees_held_out:
                    curve.append(classes[seen.argmax(1).numpy()])
                else:
                    right = int((seen.argmax(1) == targets[held]).sum())
                    curve.append((-right, float(F.cross_entropy(seen, targets[held]))))
            curves[rate, sees_held_out] = curve
    _, _, rate, epoch = min((*curves[rate, False][e], rate, e) for rate in rates for e in range(epochs))
    best_right = max((curves[rate, True][e] == test.labels).mean() for rate in rates for e in range(epochs))
    return {
        "rate": rate,
        "epoch": epoch + 1,
        "held_out": -100 * curves[rate, False][epoch][0] / held.sum(),
        "predicted": curves[rate, True][epoch],
        "best": 100 * best_right,
        "held_out_last": [-100 * curves[rate, False][-1][0] / held.sum() for rate in rates],
        "test_last": [100 * (curves[rate, True][-1] == test.labels).mean() for rate in rates],
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_as_a_loop_over_heads(seed):
    train, test = data(150, seed), data(61, seed + 10)
    expected = plain_loop(train, test, RATES, 5, 32, seed)
    result = probe(train, test, seed, epochs=5, batch=32, lrs=RATES)
    assert (result.setting.lr, result.epoch) == (expected["rate"], expected["epoch"])
    assert result.predicted.tolist() == expected["predicted"].tolist()
    assert result.held_out_top1 == pytest.approx(expected["held_out"])
    assert result.best_on_test == pytest.approx(expected["best"])
    assert [row["lr"] for row in result.table] == list(RATES)
    assert [row["held_out_top1"] for row in result.table] == pytest.approx(expected["held_out_last"])
    assert [row["test_top1"] for row in result.table] == pytest.approx(expected["test_last"])
    assert result.classes.tolist() == [0, 3, 4, 9]
    assert result.warnings == []
    logits = test.features @ result.weight.numpy().T + result.bias.numpy()
    assert result.classes[logits.argmax(1)].tolist() == result.predicted.tolist()
    assert result.in_top5.all(), "four classes"


def test_as_good_as_logistic_regression():
    train, test = data(2000, 0), data(1000, 1)
    reference = LogisticRegression(max_iter=1000).fit(train.features, train.labels).score(test.features, test.labels)
    result = probe(train, test, epochs=10)
    assert (result.predicted == test.labels).mean() == pytest.approx(reference, abs=0.03)
    assert 0.4 < reference < 0.95


def test_test_labels_do_not_influence_the_choice():
    train, test = data(150, 0), data(61, 10)
    shuffled = Labelled(test.features, np.random.default_rng(0).permutation(test.labels), test.image_ids)
    first, second = probe(train, test), probe(train, shuffled)
    assert (first.setting, first.epoch, first.held_out_top1) == (second.setting, second.epoch, second.held_out_top1)
    assert first.predicted.tolist() == second.predicted.tolist()
    assert first.best_on_test > second.best_on_test


def test_the_seed_decides():
    train, test = data(150, 0), data(61, 10)
    first, again, other = probe(train, test), probe(train, test), probe(train, test, seed=7)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)


def test_top5_and_classes_that_train_lacks():
    train, test = data(300, 0, classes=range(8), spread=3), data(100, 1, classes=range(10), spread=3)
    result = probe(train, test)
    known = test.labels < 8
    assert not (result.predicted == test.labels)[~known].any()
    assert not result.in_top5[~known].any()
    logits = test.features @ result.weight.numpy().T + result.bias.numpy()
    five = np.argsort(-logits, axis=1)[:, :5]
    assert result.in_top5[known].tolist() == (five == test.labels[:, None]).any(1)[known].tolist()
    assert result.in_top5.mean() < 1


def test_the_last_epoch_is_always_looked_at():
    train, test = data(150, 0), data(61, 10)
    result = probe(train, test, epochs=5, eval_every=3)
    assert result.epoch in (3, 5)
    assert probe(train, test, epochs=5, eval_every=99).epoch == 5


@pytest.mark.parametrize(
    ("labels", "share", "reason"),
    [([0, 1, 2, 3], 0.1, "no class of train has an image to hold out"), ([0, 1] * 20, 0.0, "nothing is held out")],
)
def test_nothing_to_hold_out(labels, share, reason):
    labels = np.array(labels)
    train = Labelled(np.eye(4, dtype=np.float32)[labels], labels, [str(i) for i in range(len(labels))])
    result = probe(train, train, hold_out=share, lrs=(0.4, 100.0, 0.1, 0.2, 1e-9))
    assert result.held_out_top1 is None
    assert result.setting.lr == 0.2
    assert result.epoch == 4
    assert (result.predicted == labels).all()
    assert [row["held_out_top1"] for row in result.table] == [None] * 5
    assert result.warnings == [
        f"{reason}, so no learning rate can be chosen: the result is that of the middle one, 0.2, after the last epoch"
    ]


def test_one_class():
    train = data(40, 0, classes=(3,))
    test = Labelled(train.features[:5], np.array([3, 3, 3, 4, 3]), list("abcde"))
    result = probe(train, test)
    assert result.predicted.tolist() == [3] * 5
    assert result.in_top5.tolist() == [True, True, True, False, True]
    assert result.best_on_test == 80
    assert result.warnings == ["the train split has one class: every test image of that class counts as right"]
    alone = train.take(np.array([0]))
    assert len(probe(alone, test).warnings) == 2


def test_memory_mapped_features_are_read_without_a_warning(tmp_path):
    train, test = data(150, 0), data(61, 10)
    np.save(tmp_path / "train.npy", train.features)
    np.save(tmp_path / "test.npy", test.features)
    mapped_train, mapped_test = (
        Labelled(np.load(tmp_path / f"{name}.npy", mmap_mode="r"), split.labels, split.image_ids)
        for name, split in (("train", train), ("test", test))
    )
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("error")
        result = probe(mapped_train, mapped_test)
    assert torch.equal(result.weight, probe(train, test).weight)


def test_batch():
    for images, batch in ((1, 1), (10, 10), (40, 20), (800, 100), (8192, 1024), (9469, 947), (1_281_167, 1024)):
        assert ProbeSettings().effective_batch(images) == batch, images
    assert ProbeSettings(batch=1024).effective_batch(1500) == 750
    assert ProbeSettings(batch=64).effective_batch(128) == 64
    assert probe(data(150, 0), data(61, 10)).batch == 30
    assert probe(data(150, 0), data(61, 10), batch=50).batch == 50


@pytest.mark.parametrize("batch", [None, 32, 100, 149])
def test_the_recorded_batch_is_that_of_the_steps(monkeypatch, batch):
    sizes = []
    real = Sweep.step
    monkeypatch.setattr(Sweep, "step", lambda self, x, *a: sizes.append(len(x)) or real(self, x, *a))
    result = probe(data(150, 0), data(61, 10), epochs=1, batch=batch)
    assert max(sizes) == result.batch
    assert min(sizes) >= result.batch - 1
    assert sum(sizes) == 150
    assert result.table[0]["lr"] == pytest.approx(1e-4 * result.batch / 256)


@pytest.mark.parametrize(
    "settings",
    [
        {"lrs": (1e38,), "optimizer": "adamw"},
        {"lrs": (36.0,), "weight_decay": 0.5, "hold_out": 0.0, "epochs": 100},
    ],
)
def test_a_diverged_classifier_is_right_about_nothing(settings):
    test = data(61, 10)
    result = probe(data(150, 0), test, **settings)
    assert not result.weight.isfinite().all()
    assert (result.predicted == -1).all(), "and not the first class"
    assert not result.in_top5.any()
    assert sum("has diverged" in warning for warning in result.warnings) == 1


def test_heads_of_the_settings():
    assert len(ProbeSettings().heads(256)) == 45
    assert ProbeSettings().heads(512)[0] == HeadSetting(2e-4)
    assert len(ProbeSettings(sweep="full").heads(256)) == 180
    beit = ProbeSettings(lrs=(4e-3,), optimizer="adamw", weight_decay=1e-4)
    assert beit.heads(1024) == (HeadSetting(4e-3, 1e-4, "adamw"),)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"epochs": 0}, "--epochs"),
        ({"batch": 0}, "--batch"),
        ({"eval_every": 0}, "--eval-every"),
        ({"weight_decay": -1e-6}, "--weight-decay"),
        ({"weight_decay": math.nan}, "--weight-decay"),
        ({"hold_out": 1.0}, "--hold-out"),
        ({"hold_out": -0.1}, "--hold-out"),
        ({"lrs": ()}, "--lrs"),
        ({"lrs": (0.1, 0.1)}, "--lrs"),
        ({"lrs": (0.0,)}, "--lrs"),
        ({"lrs": (math.inf,)}, "--lrs"),
        ({"sweep": "full", "optimizer": "adamw"}, "--sweep"),
        ({"sweep": "full", "lrs": (0.1,)}, "--sweep"),
        ({"sweep": "full", "weight_decay": 0.1}, "--sweep"),
    ],
)
def test_impossible_settings(settings, where):
    with pytest.raises(ConfigError) as caught:
        ProbeSettings(**settings)
    assert caught.value.where == where


def _on_a_rank(lrs: list[float], share: float) -> list:
    torch.set_num_threads(1)
    distributed.init("cpu")
    settings = ProbeSettings(epochs=3, batch=32, lrs=tuple(lrs), hold_out=share)
    result = train_probe(data(150, 0), data(61, 10), settings, device=CPU, seed=0)
    distributed.shutdown()
    numbers = [result.setting.lr, result.epoch, result.held_out_top1, result.best_on_test, result.best_on_test_epoch]
    return [numbers, result.predicted.tolist(), result.table, result.weight.flatten().tolist()]


@pytest.mark.parametrize(("world", "lrs", "share"), [(2, RATES, 0.1), (3, RATES[1:3], 0.1), (2, RATES, 0.0)])
def test_ranks_share_the_heads_and_change_no_number(world, lrs, share):
    alone = _on_a_rank(list(lrs), share)
    for numbers, predicted, table, weight in run_ranks(world, _on_a_rank, list(lrs), share):
        assert numbers == alone[0]
        assert predicted == alone[1]
        assert table == alone[2]
        np.testing.assert_allclose(weight, alone[3], atol=1e-6)


def test_classify_breaks_ties_by_the_lowest_label(tmp_path: Path):
    test = Labelled(np.zeros((2, 3), dtype=np.float32), np.array([2, 5]), ["a", "b"])
    predicted, in_top5 = classify(torch.ones(6, 3), torch.zeros(6), test, np.arange(6), CPU)
    assert predicted.tolist() == [0, 0]
    assert in_top5.tolist() == [True, False]
