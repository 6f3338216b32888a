"""probes.sweep, grid and holdout: heads that advance together against heads trained one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ibot_eval.probes import sweep as sweep_module
from ibot_eval.probes.grid import grid, published_rates
from ibot_eval.probes.holdout import hold_out
from ibot_eval.probes.sweep import HeadSetting, Sweep

WIDTH, CLASSES, BATCH = 12, 5, 16


@pytest.fixture(autouse=True)
def one_thread():
    """Inputs this small gain nothing from threads, and lose much where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class PlainLars(torch.optim.Optimizer):
    """The published LARS, a parameter at a time, in the order of its formulas."""

    def __init__(self, params, lr, weight_decay, momentum=0.9, trust=0.001):
        super().__init__(params, {"lr": lr, "decay": weight_decay, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                change = parameter.grad.clone()
                if parameter.ndim > 1:
                    change += group["decay"] * parameter
                    if parameter.norm() > 0 and change.norm() > 0:
                        change *= group["trust"] * parameter.norm() / change.norm()
                memory = self.state[parameter].setdefault("memory", torch.zeros_like(parameter))
                memory.copy_(group["momentum"] * memory + change)
                parameter -= group["lr"] * memory


def _optimizer(layer, setting):
    arguments = {"lr": setting.lr, "weight_decay": setting.weight_decay}
    if setting.optimizer == "sgd":
        return torch.optim.SGD(layer.parameters(), momentum=0.9, **arguments)
    if setting.optimizer == "adamw":
        return torch.optim.AdamW(layer.parameters(), **arguments)
    return PlainLars(layer.parameters(), **arguments)


def _batches(steps, seed=0, width=WIDTH, classes=CLASSES, groups=2):
    """Batches of uneven size whose classes can be learnt, with weights of 0 and 1 and a learning-rate factor."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=generator)
    for step in range(steps):
        size = BATCH - step % 3
        targets = torch.randint(classes, (size,), generator=generator)
        features = centres[targets] + torch.randn(size, width, generator=generator)
        weights = (torch.rand(groups, size, generator=generator) < 0.7).float()
        yield features, targets, weights, 0.5 * (1 + math.cos(math.pi * step / steps))


def _alone(sweep, index, setting, group, batches):
    """The head trained by itself, with torch's layer, loss and optimizer."""
    layer = torch.nn.Linear(sweep.width, sweep.classes)
    weight, bias = sweep.head(index)
    layer.load_state_dict({"weight": weight, "bias": bias})
    optimizer = _optimizer(layer, setting)
    for features, targets, weights, scale in batches:
        counts = weights[group].bool()
        optimizer.zero_grad()
        logits = layer(features)
        loss = F.cross_entropy(logits[counts], targets[counts]) if counts.any() else logits.sum() * 0
        loss.backward()
        for parameters in optimizer.param_groups:
            parameters["lr"] = setting.lr * scale
        optimizer.step()
    return layer.weight.detach(), layer.bias.detach()


MIXED = (
    HeadSetting(0.3),
    HeadSetting(0.01),
    HeadSetting(0.1, 0.05),
    HeadSetting(0.2, 1e-3),
    HeadSetting(3.0, 0.0, "lars"),
    HeadSetting(1.0, 1e-2, "lars"),
    HeadSetting(4e-3, 0.0, "adamw"),
    HeadSetting(0.02, 0.3, "adamw"),
    HeadSetting(0.05),
)


@pytest.mark.parametrize("tile", [1, 3 * WIDTH * CLASSES, 1 << 24])
def test_every_head_is_what_it_would_be_alone(monkeypatch, tile):
    monkeypatch.setattr(sweep_module, "TILE_VALUES", tile)
    sweep = Sweep(WIDTH, CLASSES, MIXED, groups=2, seed=3)
    batches = list(_batches(25))
    batches[4][2][1] = 0  # a group that none of the samples of a batch counts for
    expected = [_alone(sweep, index, setting, index // len(MIXED), batches) for index, setting in enumerate(MIXED * 2)]
    for features, targets, weights, scale in batches:
        sweep.step(features, targets, weights, scale)
    for index, (weight, bias) in enumerate(expected):
        own_weight, own_bias = sweep.head(index)
        torch.testing.assert_close(own_weight, weight, rtol=0, atol=1e-6, msg=lambda m, i=index: f"head {i}: {m}")
        torch.testing.assert_close(own_bias, bias, rtol=0, atol=1e-6, msg=lambda m, i=index: f"head {i}: {m}")


def test_ninety_heads_of_the_published_sweep():
    rates = tuple(map(HeadSetting, published_rates(BATCH)))
    sweep = Sweep(WIDTH, CLASSES, rates, groups=2, seed=0)
    assert len(sweep) == 90
    batches = list(_batches(12))
    expected = [_alone(sweep, i, setting, i // 45, batches) for i, setting in enumerate(rates * 2)]
    for batch in batches:
        sweep.step(*batch)
    apart = [float((sweep.head(i)[0] - weight).abs().max()) for i, (weight, _) in enumerate(expected)]
    assert max(apart) < 1e-6
    assert float((sweep.head(44)[0] - sweep.head(0)[0]).abs().max()) > 0.1, "they have learnt something"


def test_without_weights_all_samples_count():
    every, ones = (Sweep(WIDTH, CLASSES, MIXED, groups=2, seed=3) for _ in range(2))
    for features, targets, weights, scale in _batches(5):
        every.step(features, targets, lr_scale=scale)
        ones.step(features, targets, torch.ones_like(weights), scale)
    torch.testing.assert_close(every.weight, ones.weight, rtol=0, atol=1e-7)


def test_a_head_does_not_depend_on_those_beside_it():
    together, alone = Sweep(WIDTH, CLASSES, MIXED, seed=1), Sweep(WIDTH, CLASSES, MIXED[2:3], seed=1)
    for features, targets, weights, scale in _batches(10, groups=1):
        together.step(features, targets, weights, scale)
        alone.step(features, targets, weights, scale)
    torch.testing.assert_close(together.head(2), alone.head(0), rtol=0, atol=1e-7)


def test_heads_start_alike_and_small():
    sweep = Sweep(300, 40, MIXED, groups=2, seed=5)
    assert (sweep.weight == sweep.weight[:1]).all()
    assert not sweep.bias.any()
    assert sweep.weight[0].std() == pytest.approx(0.01, rel=0.05)
    assert sweep.weight[0].mean() == pytest.approx(0, abs=5e-4)
    assert torch.equal(Sweep(300, 40, MIXED[:1], seed=5).weight[0], sweep.weight[0])
    assert not torch.equal(Sweep(300, 40, MIXED[:1], seed=6).weight[0], sweep.weight[0])


def test_logits_are_group_major():
    sweep = Sweep(WIDTH, CLASSES, MIXED, groups=2, seed=3)
    for batch in _batches(4):
        sweep.step(*batch)
    features = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(0))
    logits = sweep.logits(features)
    assert logits.shape == (18, 7, CLASSES)
    for index in (0, 4, 9, 17):
        torch.testing.assert_close(logits[index], F.linear(features, *sweep.head(index)))


@pytest.mark.parametrize("values", [1, 60, 1 << 22])
def test_scores(monkeypatch, values):
    monkeypatch.setattr(sweep_module, "EVALUATED_VALUES", values)
    monkeypatch.setattr(sweep_module, "TILE_VALUES", 2 * WIDTH * CLASSES)
    sweep = Sweep(WIDTH, CLASSES, MIXED, groups=2, seed=3)
    for batch in _batches(15):
        sweep.step(*batch)
    features, targets, *_ = next(_batches(1, seed=8))
    targets[[2, 5]] = -1
    known = targets >= 0
    for group in (0, 1):
        scores = sweep.evaluate(features.numpy(), targets, group)
        for s in range(len(MIXED)):
            logits = F.linear(features.double(), *(t.double() for t in sweep.head(group * len(MIXED) + s)))
            assert scores.correct[s] == (logits.argmax(1) == targets).sum()
            assert scores.log_loss[s] == pytest.approx(float(F.cross_entropy(logits[known], targets[known])), rel=1e-5)
    assert 0 < scores.correct.max() <= known.sum()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_diverged_heads_know_nothing(value):
    sweep = Sweep(WIDTH, CLASSES, MIXED[:2], seed=3)
    sweep.weight[1] = value
    features, _, *_ = next(_batches(1))
    scores = sweep.evaluate(features, torch.zeros(len(features), dtype=torch.int64))
    assert scores.correct[1] == 0
    assert scores.log_loss[1] == math.inf
    assert math.isfinite(scores.log_loss[0])


def test_rates_so_high_that_weights_overflow_stay_on_their_own():
    settings = (HeadSetting(0.1), HeadSetting(1e38))
    sweep, alone = Sweep(WIDTH, CLASSES, settings, seed=0), Sweep(WIDTH, CLASSES, settings[:1], seed=0)
    for features, targets, weights, scale in _batches(8, groups=1):
        sweep.step(features, targets, weights, scale)
        alone.step(features, targets, weights, scale)
    assert not sweep.weight[1].isfinite().all()
    torch.testing.assert_close(sweep.head(0), alone.head(0), rtol=0, atol=1e-7)


def test_a_sweep_goes_on_from_its_state_to_the_last_bit():
    batches = list(_batches(10))
    whole, first, second = (Sweep(WIDTH, CLASSES, MIXED, groups=2, seed=seed) for seed in (3, 3, 4))
    for batch in batches:
        whole.step(*batch)
    for batch in batches[:6]:
        first.step(*batch)
    second.load_state_dict({n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in first.state_dict().items()})
    for batch in batches[6:]:
        second.step(*batch)
    assert torch.equal(whole.weight, second.weight)
    assert torch.equal(whole.bias, second.bias)
    with pytest.raises(ValueError, match="other heads"):
        Sweep(WIDTH, CLASSES, MIXED[:4], seed=3).load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match="other heads"):
        Sweep(WIDTH + 1, CLASSES, MIXED, groups=2, seed=3).load_state_dict(whole.state_dict())


def test_one_class_is_always_right():
    sweep = Sweep(WIDTH, 1, MIXED, seed=0)
    features, targets, *_ = next(_batches(1))
    before = sweep.weight.clone()
    sweep.step(features, targets * 0)
    assert sweep.evaluate(features, targets * 0).correct.tolist() == [len(targets)] * len(MIXED)
    torch.testing.assert_close(sweep.weight[:2], before[:2])


def test_published_rates():
    rates = published_rates(256)
    assert len(rates) == len(set(rates)) == 45
    assert rates[:3] == (1e-4, 2e-4, 3e-4)
    assert rates[8:10] == (9e-4, 1e-3)
    assert rates[-1] == 9.0
    assert list(rates) == sorted(rates)
    assert published_rates(1024) == pytest.approx([4 * rate for rate in rates])
    assert [s.lr for s in grid("rates", 128)] == pytest.approx([rate / 2 for rate in rates])
    assert {(s.optimizer, s.weight_decay) for s in grid("rates", 128)} == {("sgd", 0.0)}


def test_full_grid():
    full = grid("full", 256)
    assert len(set(full)) == 180
    kinds = {(s.optimizer, s.weight_decay) for s in full}
    assert kinds == {("sgd", 0.0), ("sgd", 1e-6), ("lars", 0.0), ("lars", 1e-6)}
    assert {s.lr for s in full} == set(published_rates(256))


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=60), st.floats(0, 0.99), st.integers(0, 5))
def test_hold_out_takes_the_same_share_of_every_class(labels, fraction, seed):
    labels = np.array(labels, dtype=np.int64)
    held = hold_out(labels, fraction, seed)
    assert held.shape == labels.shape
    assert held.dtype == bool
    assert np.array_equal(held, hold_out(labels, fraction, seed))
    for label in np.unique(labels):
        n, out = (labels == label).sum(), held[labels == label].sum()
        if n == 1 or fraction == 0:
            assert out == 0
        else:
            assert 1 <= out <= n - 1
            assert abs(out - fraction * n) <= 1


def test_hold_out_of_a_class_does_not_depend_on_others():
    few, many = np.array([3] * 20 + [1] * 10), np.array([0] * 7 + [3] * 20 + [1] * 33)
    assert np.array_equal(hold_out(few, 0.3, 1)[:20], hold_out(many, 0.3, 1)[7:27])
    assert not np.array_equal(hold_out(few, 0.3, 1), hold_out(few, 0.3, 2))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, math.nan])
def test_impossible_shares(fraction):
    with pytest.raises(ValueError, match="fraction"):
        hold_out(np.zeros(3, dtype=np.int64), fraction)
