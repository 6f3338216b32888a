"""ibot_eval.training.parameter_groups and ibot_eval.training.updates, against plain loops."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import nn

from ibot_eval.training.parameter_groups import parameter_groups
from ibot_eval.training.updates import adamw, clip_each_, ema_, set_rates

SHAPES = [(), (7,), (3, 5), (1, 1, 4), (2, 3, 4, 5)]


def tensors(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=3, num_classes=0)


def test_groups_of_a_vit():
    module = vit()
    decayed, plain = parameter_groups(module)
    assert (decayed["decayed"], plain["decayed"]) == (True, False)
    assert set(plain["names"]) == {
        "patch_embed.proj.bias",
        *(f"blocks.0.{n}" for n in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attn.qkv.bias")),
        *(f"blocks.0.{n}.bias" for n in ("attn.proj", "mlp.fc1", "mlp.fc2")),
        "norm.weight",
        "norm.bias",
    }
    assert {"cls_token", "pos_embed", "blocks.0.attn.qkv.weight"} <= set(decayed["names"])
    named = dict(module.named_parameters())
    assert len(decayed["names"]) + len(plain["names"]) == len(named)
    for group in (decayed, plain):
        assert all(named[n] is p for n, p in zip(group["names"], group["params"], strict=True))


def test_groups_leave_out_frozen_parameters_and_doubles():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2, 2))
            self.inner = nn.Linear(2, 2)
            self.again = self.inner
            self.inner.bias.requires_grad_(False)
            self.deep = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(3, 3))})

    decayed, plain = parameter_groups(Odd())
    # The published rule asks for ".bias" at the end, which a parameter of the outermost module does not have.
    assert decayed["names"] == ["bias", "inner.weight"]
    assert plain["names"] == ["deep.bias"]


@pytest.mark.parametrize("limit", [0.3, 3.0, 1e6])
def test_clipping_against_a_loop(limit):
    gradients = [t * s for t, s in zip(tensors(0), (0.01, 100, 1, 0, 3), strict=True)]
    expected, norms = [], []
    for gradient in gradients:
        norm = gradient.double().pow(2).sum().sqrt().item()
        factor = limit / (norm + 1e-6)
        norms.append(norm)
        expected.append(gradient * factor if factor < 1 else gradient.clone())
    assert any(n > limit for n in norms) or limit == 1e6
    before = [g.clone() for g in gradients]
    got = clip_each_(gradients, limit)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(norms))
    for gradient, want, old in zip(gradients, expected, before, strict=True):
        torch.testing.assert_close(gradient, want)
        if torch.equal(want, old):
            assert torch.equal(gradient, old), "a gradient within the limit is not touched"


def test_clipping_parameters_takes_their_gradients():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([3.0, 4.0])
    parameters[2].grad = torch.tensor([0.0, 0.5])
    norms = clip_each_(parameters, 1.0)
    assert norms.tolist() == [5.0, 0.0, 0.5]
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6, 0.8]))
    assert parameters[1].grad is None
    assert parameters[2].grad.tolist() == [0.0, 0.5]
    assert all(p.tolist() == [1.0, 1.0] for p in parameters)
    assert clip_each_([nn.Parameter(torch.ones(2))], 1.0).tolist() == [0.0]


def test_no_clipping_still_measures():
    gradients = tensors(1, 100)
    before = [g.clone() for g in gradients]
    norms = clip_each_(gradients, 0)
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
    assert norms.tolist() == pytest.approx([g.norm().item() for g in before])


def test_clipping_keeps_what_is_not_finite_visible():
    gradients = [torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]), torch.tensor([1.0, 2.0])]
    norms = clip_each_(gradients, 3.0)
    assert norms.isfinite().tolist() == [False, False, True]
    assert [g.isfinite().all().item() for g in gradients] == [False, False, True]


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.996, 1 - 1e-9, 1.0])
def test_moving_average_against_a_loop(momentum):
    teacher, student = tensors(2), tensors(3)
    expected = [
        (momentum * t.double() + (1 - momentum) * s.double()).float() for t, s in zip(teacher, student, strict=True)
    ]
    ends = [s.clone() for s in student], [t.clone() for t in teacher]
    ema_(teacher, student, momentum)
    torch.testing.assert_close(teacher, expected, rtol=1e-6, atol=1e-6)
    if momentum in (0.0, 1.0):
        assert all(torch.equal(a, b) for a, b in zip(teacher, ends[int(momentum)], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(student, ends[0], strict=True)), "the student is only read"


def test_moving_average_of_trained_parameters():
    teacher, student = [nn.Parameter(torch.zeros(2))], (nn.Parameter(torch.ones(2)),)
    ema_(teacher, student, 0.75)
    assert teacher[0].tolist() == [0.25, 0.25]
    assert teacher[0].grad_fn is None


def test_adamw_against_a_loop():
    module = vit()
    groups = parameter_groups(module)
    decays = [group["decayed"] for group in groups for _ in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    weights = [p.detach().double().clone() for p in parameters]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    optimiser = adamw(groups)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        lr, decay = 1e-3 * step, 0.1 * step
        set_rates(optimiser, lr, decay)
        for i, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient
            # Loshchilov and Hutter 2019, algorithm 2, with decay scaled by the learning rate as torch does.
            g = gradient.double()
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g * g
            update = (first[i] / (1 - 0.9**step)) / ((second[i] / (1 - 0.999**step)).sqrt() + 1e-8)
            weights[i] = weights[i] * (1 - lr * (decay if decays[i] else 0)) - lr * update
        optimiser.step()
    for parameter, weight in zip(parameters, weights, strict=True):
        torch.testing.assert_close(parameter.detach().double(), weight, rtol=1e-5, atol=1e-6)


def test_adamw_without_a_group_of_vectors():
    optimiser = adamw(parameter_groups(nn.Linear(2, 2, bias=False)), lr=0.5)
    assert [len(group["params"]) for group in optimiser.param_groups] == [1, 0]
    set_rates(optimiser, 0.1, 0.2)
    assert [(group["lr"], group["weight_decay"]) for group in optimiser.param_groups] == [(0.1, 0.2), (0.1, 0.0)]
