"""models.kept_tokens: against one image at a time, its kept patches gathered by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ibot_eval.errors import ConfigError
from ibot_eval.models import wrap
from ibot_eval.models.kept_tokens import KeptTokens
from tests import layouts

SIZE = 48
"""Pixels: a 6x6 grid, other than the 4x4 that the networks are made for."""


def images(n: int) -> Tensor:
    return torch.randn(n, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def kept(*counts: int) -> Tensor:
    """(B, 36) bool with so many True, at places of their own."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(36, generator=generator) < count for count in counts])


def plain(network, image: Tensor, keep: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Normed and raw tokens after each block, (P + K, D): positions first, then the patches that are kept."""
    net = network.net
    patches = network.embed(image[None]).flatten(1, 2)
    tokens = network._tokens(patches, (6, 6))
    prefix = tokens.shape[1] - 36
    tokens = torch.cat([tokens[:, :prefix], tokens[:, prefix:][:, keep]], dim=1)
    raw = []
    for block in net.blocks:
        tokens = block(tokens)
        raw.append(tokens[0])
    return [network.final_norm(t) for t in raw], raw


@pytest.mark.parametrize("counts", [(20, 20, 20), (5, 36, 17), (1, 1, 30)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}], ids=str)
@torch.no_grad()
def test_tokens_are_those_of_the_kept_patches_alone(changes, counts):
    whole = wrap(layouts.vit(**changes)).eval()
    network, keep, batch = KeptTokens(whole), kept(*counts), images(3)
    prefix = whole.has_cls + whole.num_registers
    for norm in ("final", "none"):
        with network.keeping(keep):
            outputs = network.outputs(batch, (0, -1), norm)
        for i in range(3):
            normed, raw = plain(whole, batch[i], keep[i])
            for block, output in enumerate(outputs.blocks):
                expected = (normed if norm == "final" else raw)[block]
                own = expected[prefix:]
                found = output.patches[i, 0]
                torch.testing.assert_close(found[: counts[i]], own, atol=2e-5, rtol=1e-4)
                torch.testing.assert_close(found.mean(0), own.mean(0), atol=2e-5, rtol=1e-4)
                torch.testing.assert_close(output.registers[i], expected[whole.has_cls : prefix], atol=2e-5, rtol=1e-4)
                cls = expected[0] if whole.has_cls else own.mean(0)
                torch.testing.assert_close(output.cls[i], cls, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_without_keeping_it_is_the_whole_network():
    whole = wrap(layouts.vit()).eval()
    network, batch = KeptTokens(whole), images(2)
    with pytest.raises(RuntimeError, match="stop"), network.keeping(kept(3, 3)):
        raise RuntimeError("stop")
    found, expected = (n.outputs(batch, (-1,), attention_block=-1) for n in (network, whole))
    assert torch.equal(found.blocks[0].cls, expected.blocks[0].cls)
    assert torch.equal(found.attention, expected.attention)
    with network.keeping(torch.ones(2, 36, dtype=torch.bool)):
        all_kept = network.outputs(batch)
    torch.testing.assert_close(all_kept.blocks[0].cls, expected.blocks[0].cls)
    torch.testing.assert_close(all_kept.blocks[0].patches, expected.blocks[0].patches.reshape(2, 1, 36, -1))


@torch.no_grad()
def test_no_patch_at_all_leaves_cls():
    network = KeptTokens(wrap(layouts.vit()).eval())
    with network.keeping(kept(0, 4)):
        output = network.outputs(images(2)).blocks[0]
    normed, _ = plain(network.whole, images(2)[0], kept(0)[0])
    torch.testing.assert_close(output.cls[0], normed[-1][0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [layouts.beit, layouts.swin, layouts.resnet, layouts.eva])
def test_other_networks_are_refused(make):
    with pytest.raises(ConfigError, match="only a plain ViT"):
        KeptTokens(wrap(make()))


def test_attention_of_dropped_tokens_is_refused():
    network = KeptTokens(wrap(layouts.vit()).eval())
    with network.keeping(kept(3)), pytest.raises(ConfigError, match="ranked by attention"):
        network.outputs(images(1), attention_block=-1)
