"""The last block at some tokens only, against the whole encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ibot_eval.models import wrap
from ibot_eval.models.last_block import block_at, rows_of
from ibot_eval.models.transformer import TransformerBackbone
from tests import layouts

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
POSITIONS = {
    "some": torch.tensor([0, 5, 15, 16, 40, 47, 0, 0]),  # the last two are padding
    "none": torch.empty(0, dtype=torch.int64),
    "all": torch.arange(48),
}


def backbone_of(kind: str, **settings: Any) -> TransformerBackbone:
    make = {"vit": layouts.vit, "eva": layouts.eva, "beit": layouts.beit}[kind]
    found = wrap(make(**settings))
    assert isinstance(found, TransformerBackbone)
    return found


def both(backbone: TransformerBackbone, positions: Tensor) -> list[tuple[Tensor, dict[str, Tensor], Tensor]]:
    """(B + M, D) rows, gradients by name, and the state of the generator: of the whole encoder, then of encode_at."""
    found = []
    for whole in (True, False):
        backbone.zero_grad()
        torch.manual_seed(2)
        patches = backbone.embed(IMAGES)
        if whole:
            output = backbone.encode(patches)
            rows = torch.cat([output.cls, output.patches.flatten(0, 2).index_select(0, positions)])
        else:
            rows = backbone.encode_at(patches, positions)
        state = torch.get_rng_state()
        rows = backbone.final_norm(rows)
        (rows * torch.linspace(-1, 1, rows.numel()).view_as(rows)).sum().backward()
        gradients = {name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None}
        found.append((rows.detach(), gradients, state))
    return found


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"drop_path_rate": 0.6},
        {"reg_tokens": 2, "init_values": 0.3, "qk_norm": True},
        {"scale_attn_norm": True, "scale_mlp_norm": True, "drop_path_rate": 0.3},
    ],
    ids=["plain", "drop-path", "registers-scales-norms", "inner-norms"],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_same_numbers_and_gradients(positions: str, settings: dict[str, Any], checkpointed: bool) -> None:
    backbone = backbone_of("vit", **settings).train()
    backbone.checkpoint_blocks = checkpointed
    (wanted, gradients, state), (found, found_gradients, found_state) = both(backbone, POSITIONS[positions])
    torch.testing.assert_close(found, wanted)
    assert found_gradients.keys() == gradients.keys() == {name for name, _ in backbone.named_parameters()}
    for name, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)
    assert found_state.equal(state)


@pytest.mark.parametrize("kind", ["eva", "beit"])
def test_other_transformers(kind: str) -> None:
    (wanted, gradients, _), (found, found_gradients, _) = both(backbone_of(kind).train(), POSITIONS["some"])
    torch.testing.assert_close(found, wanted)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_other_rows_cost_nothing_after_attention() -> None:
    backbone = backbone_of("vit")
    seen: list[torch.Size] = []
    block = backbone.net.blocks[-1]
    for module in (block.attn.proj, block.norm2, block.mlp.fc1):
        module.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1]))
    backbone.encode_at(backbone.embed(IMAGES), POSITIONS["some"])
    assert seen == [(3 + 8,)] * 3


def test_drop_path_takes_whole_images() -> None:
    backbone = backbone_of("vit", drop_path_rate=0.5).train()
    block = backbone.net.blocks[-1]
    tokens = torch.randn(64, 17, 48)
    torch.manual_seed(3)
    kept = block_at(block, tokens, torch.arange(64 * 17)).unflatten(0, (64, 17)) != tokens
    per_image = kept.flatten(1).float().mean(1)
    untouched = int((per_image == 0).sum())
    assert 5 < untouched < 30  # both branches dropped: a quarter of 64
    assert (per_image[per_image > 0] > 0.9).all()


def test_rows() -> None:
    # Two images of one [CLS], one register and three patches.
    assert rows_of(torch.tensor([0, 2, 3, 5]), 3, 2, 2).tolist() == [0, 5, 2, 4, 7, 9]
