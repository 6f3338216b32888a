"""The projection head against the same arithmetic in plain torch operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ibot_eval.errors import CheckpointError
from ibot_eval.heads import ProjectionHead
from tests import layouts


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def by_hand(state: dict[str, Tensor], x: Tensor, mlp: str = "mlp", last: str = "last_layer") -> Tensor:
    for layer in (0, 2, 4):
        x = x @ state[f"{mlp}.{layer}.weight"].T + state[f"{mlp}.{layer}.bias"]
        x = gelu(x) if layer < 4 else x / x.pow(2).sum(-1, keepdim=True).sqrt()
    direction = state[f"{last}.weight_v"]
    unit = direction / direction.pow(2).sum(1, keepdim=True).sqrt()
    return x @ (unit * state[f"{last}.weight_g"]).T


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, 48, generator=torch.Generator().manual_seed(0))


def test_shared_head() -> None:
    state = layouts.projection_head()
    head = ProjectionHead.from_state_dict(state)
    assert (head.num_prototypes, head.hidden, head.bottleneck, head.sharing) == (10, 16, 6, "shared")
    torch.testing.assert_close(head.forward_cls(tokens(3)), by_hand(state, tokens(3)))
    torch.testing.assert_close(head.forward_patches(tokens(2, 4, 5)), by_hand(state, tokens(2, 4, 5)))
    assert head.patch_layer is head.last_layer


def test_last_layer_of_its_own_for_patches() -> None:
    state = layouts.projection_head(shared=False)
    head = ProjectionHead.from_state_dict(state)
    assert (head.sharing, head.num_prototypes, head.patch_prototypes) == ("last-separate", 10, 12)
    cls, patches = head(tokens(3), tokens(3, 7))
    torch.testing.assert_close(cls, by_hand(state, tokens(3)))
    torch.testing.assert_close(patches, by_hand(state, tokens(3, 7), last="last_layer2"))


def test_whole_head_of_its_own_for_patches() -> None:
    one, two = layouts.projection_head(seed=1), layouts.projection_head(seed=2)
    state = {name: tensor for name, tensor in one.items() if "last_layer2" not in name}
    state |= {name.replace("mlp.", "mlp2."): tensor for name, tensor in two.items() if "mlp." in name}
    state |= {f"last_layer2.{part}": two[f"last_layer.{part}"] for part in ("weight_g", "weight_v")}
    head = ProjectionHead.from_state_dict(state)
    assert head.sharing == "separate"
    torch.testing.assert_close(head.forward_cls(tokens(3)), by_hand(one, tokens(3)))
    torch.testing.assert_close(head.forward_patches(tokens(2, 5)), by_hand(two, tokens(2, 5)))


def test_batch_norm_uses_running_statistics_of_every_token() -> None:
    old, state = layouts.projection_head(), {}
    for before, after in ((0, 0), (2, 3), (4, 6)):
        state |= {f"mlp.{after}.{part}": old[f"mlp.{before}.{part}"] for part in ("weight", "bias")}
    state |= {f"last_layer.{part}": old[f"last_layer.{part}"] for part in ("weight_g", "weight_v")}
    g = torch.Generator().manual_seed(3)
    for layer in (1, 4):
        for part in ("weight", "bias", "running_mean"):
            state[f"mlp.{layer}.{part}"] = torch.randn(16, generator=g)
        state[f"mlp.{layer}.running_var"] = 1 + torch.rand(16, generator=g)
        state[f"mlp.{layer}.num_batches_tracked"] = torch.tensor(5)
    head = ProjectionHead.from_state_dict(state).eval()
    x = tokens(2, 3)
    for linear, norm in ((0, 1), (3, 4), (6, None)):
        x = x @ state[f"mlp.{linear}.weight"].T + state[f"mlp.{linear}.bias"]
        if norm is not None:
            scaled = (x - state[f"mlp.{norm}.running_mean"]) / (state[f"mlp.{norm}.running_var"] + 1e-5).sqrt()
            x = gelu(scaled * state[f"mlp.{norm}.weight"] + state[f"mlp.{norm}.bias"])
    wanted = (x / x.norm(dim=-1, keepdim=True)) @ F.normalize(state["last_layer.weight_v"], dim=1).T
    torch.testing.assert_close(head.forward_patches(tokens(2, 3)), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["parametrizations", "weight"])
def test_other_ways_to_store_the_last_layer(form: str) -> None:
    state = layouts.projection_head()
    wanted = by_hand(state, tokens(3))
    gain, direction = state.pop("last_layer.weight_g"), state.pop("last_layer.weight_v")
    state = {name: tensor for name, tensor in state.items() if "last_layer2" not in name}
    if form == "weight":
        state["last_layer.weight"] = gain * F.normalize(direction, dim=1)
    else:
        state["last_layer.parametrizations.weight.original0"] = gain
        state["last_layer.parametrizations.weight.original1"] = direction
    torch.testing.assert_close(ProjectionHead.from_state_dict(state).forward_cls(tokens(3)), wanted)


def test_half_precision_tensors() -> None:
    state = {name: tensor.half() for name, tensor in layouts.projection_head().items()}
    head = ProjectionHead.from_state_dict(state)
    wanted = by_hand({name: tensor.float() for name, tensor in state.items()}, tokens(3))
    torch.testing.assert_close(head.forward_cls(tokens(3)), wanted)


def test_published_names_survive_a_round_trip() -> None:
    head = ProjectionHead(48, 10, hidden=16, bottleneck=6, sharing="last-separate", patch_prototypes=12)
    again = ProjectionHead.from_state_dict(head.state_dict())
    assert set(again.state_dict()) == set(layouts.projection_head(shared=False))
    torch.testing.assert_close(again.forward_patches(tokens(2, 3)), head.forward_patches(tokens(2, 3)))


def test_gain_is_trained_only_when_asked() -> None:
    for train in (False, True):
        head = ProjectionHead(48, 10, hidden=16, bottleneck=6, train_gain=train)
        assert head.last_layer.weight_g.requires_grad is train
        torch.testing.assert_close(head.last_layer.weight().norm(dim=1), torch.ones(10))


def test_tensors_that_form_no_head() -> None:
    with pytest.raises(CheckpointError, match="no MLP"):
        ProjectionHead.from_state_dict({"mlp.0.weight": torch.ones(3, 3)})
    state = layouts.projection_head()
    state["mlp.2.bias"] = torch.ones(5)
    with pytest.raises(CheckpointError, match="do not fit"):
        ProjectionHead.from_state_dict(state)
    with pytest.raises(ValueError, match="one K"):
        ProjectionHead(48, 10, patch_prototypes=12)
