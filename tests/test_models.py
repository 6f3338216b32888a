"""The Backbone contract: blocks, norms, attention, early stop, and modules of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models.resnet import BasicBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.models import BeitBackbone, EvaBackbone, ModuleBackbone, ResNetBackbone, SwinBackbone, ViTBackbone, wrap
from tests import layouts

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def make(kind: str) -> tuple[Any, Backbone]:
    net = {
        "vit": lambda: layouts.vit(depth=3, reg_tokens=2),
        "eva": lambda: layouts.eva(depth=3),
        "beit": lambda: layouts.beit(depth=3),
        "swin": lambda: layouts.swin(img_size=32, depths=(1, 2), num_heads=(1, 2), patch_size=4, window_size=4),
        "resnet": lambda: layouts.resnet(block=BasicBlock),
    }[kind]()
    return net, wrap(net)


KINDS = ["vit", "eva", "beit", "swin", "resnet"]
PLAIN = ["vit", "eva", "beit"]


def test_wrap_chooses_the_adapter() -> None:
    kinds = [ViTBackbone, EvaBackbone, BeitBackbone, SwinBackbone, ResNetBackbone]
    for kind, adapter in zip(KINDS, kinds, strict=True):
        backbone = make(kind)[1]
        assert isinstance(backbone, adapter)
        assert wrap(backbone) is backbone
    assert isinstance(wrap(nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 4))), ModuleBackbone)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_shapes_follow_the_attributes(kind: str) -> None:
    backbone = make(kind)[1]
    found = backbone.outputs(X, range(backbone.depth))
    assert len(backbone.dims) == backbone.depth == len(found.blocks)
    assert found.attention is None
    for width, block in zip(backbone.dims, found.blocks, strict=True):
        assert block.cls.shape == (2, width)
        assert block.registers.shape == (2, backbone.num_registers, width)
        assert block.patches.shape[0] == 2
        assert block.patches.shape[-1] == width
    last = found.blocks[-1].patches
    assert last.shape[1:3] == (32 // backbone.patch_size, 32 // backbone.patch_size)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_order_and_repetition_of_blocks(kind: str) -> None:
    backbone = make(kind)[1]
    several = backbone.outputs(X, (-1, 0, -1, -2)).blocks
    for block, index in zip(several, (-1, 0, -1, -2), strict=True):
        torch.testing.assert_close(block, backbone.outputs(X, (index,)).blocks[0])
    for wrong in (backbone.depth, -backbone.depth - 1):
        with pytest.raises(ConfigError, match=f"has {backbone.depth} blocks"):
            backbone.outputs(X, (wrong,))


@pytest.mark.parametrize("kind", PLAIN)
@torch.no_grad()
def test_norms_of_plain_transformers(kind: str) -> None:
    backbone = make(kind)[1]
    raw = backbone.outputs(X, (0, -1), norm="none").blocks
    for norm in ("final", "published"):
        for plain, normed in zip(raw, backbone.outputs(X, (0, -1), norm=norm).blocks, strict=True):
            torch.testing.assert_close(backbone.final_norm(plain.cls), normed.cls)
            torch.testing.assert_close(backbone.final_norm(plain.patches), normed.patches)
    assert not torch.allclose(raw[0].cls, backbone.outputs(X, (0,)).blocks[0].cls)


@torch.no_grad()
def test_norms_of_swin() -> None:
    net, backbone = make("swin")
    assert backbone.dims == (8, 16, 16)
    raw, published = backbone.outputs(X, (0, 1, 2), "none").blocks, backbone.outputs(X, (0, 1, 2)).blocks
    torch.testing.assert_close(published[0].patches, raw[0].patches)
    for i in (1, 2):
        torch.testing.assert_close(published[i].patches, net.norm(raw[i].patches))
        torch.testing.assert_close(published[i].cls, published[i].patches.mean(dim=(1, 2)))
    with pytest.raises(ConfigError, match=r"block 0 .* is 8 wide"):
        backbone.outputs(X, (0, 2), "final")
    torch.testing.assert_close(backbone.outputs(X, (1, 2), "final").blocks, published[1:])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nothing_is_computed_after_the_last_block_needed(kind: str) -> None:
    net, backbone = make(kind)
    if kind == "swin":
        blocks = [block for stage in net.layers for block in stage.blocks]
    elif kind == "resnet":
        blocks = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
    else:
        blocks = list(net.blocks)
    ran: list[int] = []
    for i, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    backbone.outputs(X, (1,))
    assert ran == [0, 1]
    if kind in PLAIN:
        ran.clear()
        backbone.outputs(X, (0,), attention_block=1)
        assert ran == [0, 1]


def attention_by_hand(net: VisionTransformer, tokens: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) of the block after which ``tokens`` come, in plain operations."""
    batch, count, width = tokens.shape
    q, k, _ = (tokens @ net.blocks[-1].attn.qkv.weight.T + net.blocks[-1].attn.qkv.bias).chunk(3, dim=-1)
    q, k = (part.reshape(batch, count, 3, width // 3).transpose(1, 2) for part in (q, k))
    scores = q @ k.transpose(-1, -2) / (width // 3) ** 0.5
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


@torch.no_grad()
def test_attention_by_hand() -> None:
    net, backbone = make("vit")
    raw = backbone.outputs(X, (1,), norm="none").blocks[0]
    tokens = torch.cat([raw.cls[:, None], raw.registers, raw.patches.flatten(1, 2)], dim=1)
    found = backbone.outputs(X, attention_block=2).attention
    assert found is not None
    torch.testing.assert_close(found, attention_by_hand(net, net.blocks[2].norm1(tokens)))


@pytest.mark.parametrize("kind", PLAIN)
@torch.no_grad()
def test_attention_leaves_the_network_as_it_was(kind: str) -> None:
    net, backbone = make(kind)
    plain = backbone.outputs(X, (0, -1))
    fused = [block.attn.fused_attn for block in net.blocks]
    found = backbone.outputs(X, (0, -1), attention_block=1)
    torch.testing.assert_close(found.blocks, plain.blocks)
    assert found.attention is not None
    tokens = 16 + backbone.has_cls + backbone.num_registers
    assert found.attention.shape == (2, 3, tokens, tokens)
    torch.testing.assert_close(found.attention.sum(-1), torch.ones(2, 3, tokens))
    assert [block.attn.fused_attn for block in net.blocks] == fused
    assert not any(block.attn.attn_drop._forward_hooks for block in net.blocks)


def test_attention_is_put_back_after_a_failure() -> None:
    net, backbone = make("vit")

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = net.blocks[2].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        backbone.outputs(X, attention_block=2)
    handle.remove()
    assert net.blocks[2].attn.fused_attn
    assert not net.blocks[2].attn.attn_drop._forward_hooks


@pytest.mark.parametrize("kind", ["swin", "resnet"])
def test_no_attention_over_the_whole_image(kind: str) -> None:
    with pytest.raises(ConfigError, match="no attention"):
        make(kind)[1].outputs(X, attention_block=-1)


@torch.no_grad()
def test_model_without_cls_takes_the_mean() -> None:
    net = layouts.vit(class_token=False, global_pool="avg", fc_norm=False)
    backbone = wrap(net)
    block = backbone.outputs(X).blocks[0]
    torch.testing.assert_close(block.cls, net.forward_features(X).mean(dim=1))
    attention = backbone.outputs(X, attention_block=0).attention
    assert attention is not None
    assert attention.shape == (2, 3, 16, 16)


@torch.no_grad()
def test_mean_pooled_network_keeps_its_norm_behind_the_mean() -> None:
    net = layouts.vit(global_pool="avg", num_classes=4)
    backbone = wrap(net)
    raw = backbone.outputs(X, norm="none").blocks[0]
    torch.testing.assert_close(net.head(backbone.final_norm(raw.patches.mean(dim=(1, 2)))), net(X))
    torch.testing.assert_close(backbone.outputs(X).blocks[0].patches, net.fc_norm(raw.patches))


def test_timm_mean_and_deviation_are_taken_over() -> None:
    net = layouts.vit()
    net.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.1, 0.2, 0.3)}  # pyright: ignore[reportAttributeAccessIssue]
    backbone = wrap(net)
    assert (backbone.mean, backbone.std) == ((0.5, 0.4, 0.3), (0.1, 0.2, 0.3))


# Modules of one's own


class Mine(nn.Module):
    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.layer, self.answer = nn.Conv2d(3, 5, 4, stride=4), answer

    def forward(self, images: Tensor) -> Any:
        return self.layer(images) if self.answer is None else self.answer(self.layer(images))


@torch.no_grad()
def test_module_that_returns_features() -> None:
    module = Mine(lambda x: x.mean(dim=(2, 3)))
    backbone = ModuleBackbone(module, image_size=16)
    block = backbone.outputs(X).blocks[0]
    torch.testing.assert_close(block.cls, module(X))
    assert block.patches.shape == (2, 0, 0, 5)
    assert block.registers.shape == (2, 0, 5)
    assert (backbone.depth, backbone.dims, backbone.has_patches) == (1, (5,), False)
    assert backbone.architecture == "Mine"
    torch.testing.assert_close(backbone.final_norm(block.cls), block.cls)


@torch.no_grad()
def test_module_that_returns_a_map() -> None:
    module = Mine()
    backbone = ModuleBackbone(module, image_size=16)
    block = backbone.outputs(X).blocks[0]
    torch.testing.assert_close(block.patches.permute(0, 3, 1, 2), module(X))
    torch.testing.assert_close(block.cls, module(X).mean(dim=(2, 3)))
    assert backbone.has_patches


@pytest.mark.parametrize(
    ("answer", "found"), [(lambda x: {"a": x}, "dict"), (lambda x: x.flatten(2), r"shape \(1, 5, 16\)")]
)
def test_module_that_returns_something_else(answer: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=f"returned {found}"):
        ModuleBackbone(Mine(answer), image_size=16)


def test_module_that_fails_and_one_that_is_training() -> None:
    with pytest.raises(ConfigError, match="image_size"):
        ModuleBackbone(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)), image_size=8)
    module = Mine().train()
    ModuleBackbone(module, image_size=16)
    assert module.training, "the trial pass leaves the mode alone"
    with pytest.raises(ConfigError, match="attention"):
        ModuleBackbone(module, dim=5).outputs(X, attention_block=0)
