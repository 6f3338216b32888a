"""Image sizes other than the trained one: the grid is always the target's, and values are the family's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.models import wrap
from ibot_eval.models.positions import PUBLISHED_RULES, ResizeRule, published_rule, resize_positions
from ibot_eval.models.relative_bias import resize_bias_table
from tests import layouts

RULES: tuple[ResizeRule, ...] = ("scale", "size", "size-antialias")


def one_block(grid: tuple[int, int], **changes: Any) -> VisionTransformer:
    return layouts.vit(
        img_size=(grid[0] * 14, grid[1] * 14), patch_size=14, embed_dim=8, depth=1, num_heads=1, mlp_ratio=1, **changes
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("trained", "sides"),
    [(16, [976 // 14 * 14, 1840 // 14 * 14, 1952 // 14 * 14, 980, 1848]), (37, [546, 602, 1092, 1204, 1610, 1722])],
)
def test_reported_sizes_give_their_grid(rule: ResizeRule, trained: int, sides: list[int]) -> None:
    table = torch.randn(1, trained, trained, 2)
    for side in sides:
        assert resize_positions(table, (side // 14, side // 14), rule).shape == (1, side // 14, side // 14, 2)


@pytest.mark.parametrize("rule", RULES)
def test_every_grid_up_to_150_is_met(rule: ResizeRule) -> None:
    for trained in (7, 14, 16, 37):
        table = torch.randn(1, trained, trained, 1)
        for side in range(1, 151):
            assert resize_positions(table, (side, 151 - side), rule).shape == (1, side, 151 - side, 1)


@pytest.mark.parametrize("side", [976, 1840, 1952])
def test_sizes_of_bug_reports_through_a_network(side: int) -> None:
    backbone = wrap(one_block((16, 16)), family="ibot")
    if side % 14:
        with pytest.raises(ConfigError, match=f"{side}x28") as caught:
            backbone.outputs(torch.zeros(1, 3, side, 28))
        assert str(side // 14 * 14) in str(caught.value)
    whole = side // 14 * 14
    assert backbone.outputs(torch.zeros(1, 3, whole, 28)).blocks[0].patches.shape == (1, whole // 14, 2, 8)


def test_height_and_width_are_not_swapped() -> None:
    backbone = wrap(one_block((16, 16)), family="dinov2")
    assert backbone.outputs(torch.zeros(1, 3, 448, 224)).blocks[0].patches.shape[1:3] == (32, 16)
    with pytest.raises(ConfigError, match="240x320"):
        backbone.outputs(torch.zeros(1, 3, 240, 320))


def test_rows_are_rows() -> None:
    """A mark in one patch of an image that is not square comes out at its row and column."""
    net = layouts.vit(depth=1)
    with torch.no_grad():
        net.blocks[0].attn.proj.weight.zero_()  # Without attention, patches do not see one another.
    backbone = wrap(net, family="ibot")
    plain, marked = torch.zeros(1, 3, 40, 24), torch.zeros(1, 3, 40, 24)
    marked[:, :, 3 * 8 : 4 * 8, 1 * 8 : 2 * 8] = 1
    with torch.no_grad():
        difference = backbone.outputs(plain).blocks[0].patches - backbone.outputs(marked).blocks[0].patches
    changed = (difference.abs().sum(-1) > 1e-4).nonzero().tolist()
    assert changed == [[0, 3, 1]]


def cubic(x: float) -> float:
    """Keys' kernel with a = -0.75, torch's."""
    x, a = abs(x), -0.75
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def scale_rule_by_hand(line: Tensor, target: int) -> Tensor:
    """Bicubic sampling of one axis at (i + 0.5) / s - 0.5 with s = (target + 0.1) / N, borders repeated."""
    size, scale = len(line), (target + 0.1) / len(line)
    values = []
    for i in range(target):
        centre = (i + 0.5) / scale - 0.5
        first = int(np.floor(centre))
        taps = [(min(max(j, 0), size - 1), cubic(centre - j)) for j in range(first - 1, first + 3)]
        values.append(sum(weight * float(line[j]) for j, weight in taps))
    return torch.tensor(values)


@pytest.mark.parametrize("target", [5, 9, 23])
def test_scale_rule_samples_where_the_factor_says(target: int) -> None:
    line = torch.randn(14, generator=torch.Generator().manual_seed(0))
    table = line.reshape(1, 14, 1, 1).expand(1, 14, 14, 1)
    found = resize_positions(table, (target, 14), "scale")[0, :, 0, 0]
    torch.testing.assert_close(found, scale_rule_by_hand(line, target), rtol=1e-4, atol=1e-5)
    if target != 14:
        assert not torch.allclose(found, resize_positions(table, (target, 14), "size")[0, :, 0, 0], atol=1e-3)


def test_scale_rule_is_the_published_call() -> None:
    table = torch.randn(1, 14, 14, 3)
    wanted = F.interpolate(table.permute(0, 3, 1, 2), scale_factor=(20.1 / 14, 9.1 / 14), mode="bicubic")
    torch.testing.assert_close(resize_positions(table, (20, 9), "scale"), wanted.permute(0, 2, 3, 1))


def test_antialiasing_only_where_asked() -> None:
    table = torch.randn(1, 28, 28, 1, generator=torch.Generator().manual_seed(0))
    spread = {rule: float(resize_positions(table, (7, 7), rule).std()) for rule in RULES}
    assert spread["size-antialias"] < 0.5 * spread["size"]


@pytest.mark.parametrize("rule", RULES)
def test_native_grid_is_left_untouched(rule: ResizeRule) -> None:
    table = torch.randn(1, 4, 6, 3)
    assert resize_positions(table, (4, 6), rule) is table


def test_rules_of_the_families() -> None:
    assert {published_rule(name, 0) for name in ("ibot", "dino", "dinov2", "vit")} == {"scale"}
    assert published_rule("dinov2", 4) == "size-antialias"
    assert published_rule("a family nobody knows", 0) == "size-antialias"
    assert set(PUBLISHED_RULES.values()) <= set(RULES)


def test_rule_can_be_chosen() -> None:
    net = layouts.vit()
    x = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        outputs = [wrap(net, family="ibot", resize=rule).outputs(x).blocks[0].cls for rule in RULES]
        default = wrap(net, family="ibot").outputs(x).blocks[0].cls
    torch.testing.assert_close(default, outputs[0])
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[1], outputs[2])


@pytest.mark.parametrize("through", ["operation", "data", "new parameter"])
def test_cached_positions_follow_the_weights(through: str) -> None:
    net = layouts.vit().requires_grad_(False)
    backbone = wrap(net, family="ibot")
    x = torch.randn(1, 3, 48, 40)
    with torch.inference_mode():
        before = backbone.outputs(x).blocks[0].cls
        torch.testing.assert_close(backbone.outputs(x).blocks[0].cls, before)
    assert net.pos_embed is not None
    if through == "operation":
        net.pos_embed.mul_(2.0)
    elif through == "data":
        net.pos_embed.data.mul_(2.0)
    else:
        net.pos_embed = torch.nn.Parameter(2 * net.pos_embed, requires_grad=False)
    assert not torch.allclose(backbone.outputs(x).blocks[0].cls, before)


def test_cached_positions_can_be_used_in_a_backward_pass() -> None:
    backbone = wrap(layouts.vit().requires_grad_(False), family="ibot")
    x = torch.randn(1, 3, 48, 40)
    with torch.inference_mode():
        backbone.outputs(x)
    x.requires_grad_()
    backbone.outputs(x).blocks[0].cls.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_gradients_reach_trainable_positions_at_any_size() -> None:
    net = layouts.vit()
    wrap(net, family="ibot").outputs(torch.randn(1, 3, 48, 40)).blocks[0].cls.sum().backward()
    assert net.pos_embed.grad is not None
    assert net.pos_embed.grad[:, 1:].abs().sum() > 0


# BEiT


def relative_by_hand(net: Any, x: Tensor, tables: list[Tensor], grid: tuple[int, int]) -> Tensor:
    """BEiT's forward pass in plain operations, its bias looked up distance by distance."""
    rows, columns = grid
    tokens = F.conv2d(x, net.patch_embed.proj.weight, net.patch_embed.proj.bias, stride=8).flatten(2).transpose(1, 2)
    tokens = torch.cat([net.cls_token.expand(len(x), -1, -1), tokens], dim=1)
    places = [(r, c) for r in range(rows) for c in range(columns)]
    count = len(places) + 1
    for block, table in zip(net.blocks, tables, strict=True):
        bias = torch.zeros(3, count, count)
        for i, (r, c) in enumerate(places, 1):
            for j, (s, d) in enumerate(places, 1):
                bias[:, i, j] = table[(r - s + rows - 1) * (2 * columns - 1) + (c - d + columns - 1)]
        bias[:, 0, 1:], bias[:, 1:, 0] = table[-3][:, None], table[-2][:, None]
        bias[:, 0, 0] = table[-1]
        attn = block.attn
        normed = block.norm1(tokens)
        qkv_bias = torch.cat([attn.q_bias, torch.zeros(48), attn.v_bias])
        q, k, v = F.linear(normed, attn.qkv.weight, qkv_bias).reshape(len(x), count, 3, 3, 16).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / 4 + bias).softmax(-1)
        mixed = attn.proj((weights @ v).transpose(1, 2).reshape(len(x), count, 48))
        tokens = tokens + block.gamma_1 * mixed
        tokens = tokens + block.gamma_2 * block.mlp(block.norm2(tokens))
    return tokens


@pytest.mark.parametrize("shared", [False, True])
def test_beit_at_another_size(shared: bool) -> None:
    net = layouts.beit(use_rel_pos_bias=not shared, use_shared_rel_pos_bias=shared)
    backbone = wrap(net)
    x, grid = torch.randn(2, 3, 48, 40), (6, 5)
    tables = [(net.rel_pos_bias if shared else block.attn).relative_position_bias_table for block in net.blocks]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        native = backbone.outputs(x[:, :, :32, :32]).blocks[0].cls
        resized = [resize_bias_table(table, (4, 4), grid) for table in tables]
        wanted = relative_by_hand(net, x, resized, grid)
        found = backbone.outputs(x, norm="none", attention_block=0)
        torch.testing.assert_close(found.blocks[0].cls, wanted[:, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.blocks[0].patches.flatten(1, 2), wanted[:, 1:], rtol=1e-5, atol=1e-5)
        assert found.attention is not None
        torch.testing.assert_close(found.attention.sum(-1), torch.ones(2, 3, 31))
        torch.testing.assert_close(backbone.outputs(x[:, :, :32, :32]).blocks[0].cls, native)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} was changed by visiting another size"


def test_what_beit_keeps_per_size_is_the_small_table() -> None:
    backbone: Any = wrap(layouts.beit().requires_grad_(False))
    with torch.no_grad():
        for side in (64, 128, 64):
            backbone.outputs(torch.zeros(1, 3, side, side))
    kept = [tensor for cache in backbone._tables for pair in cache._kept.values() for tensor in pair]
    assert len(kept) == 2 * 2 * 2, "two blocks, two sizes, each with its source"
    assert max(tensor.numel() for tensor in kept) == (31 * 31 + 3) * 3


def test_bias_table_keeps_cls_entries_and_near_distances() -> None:
    """Distances 0 and 1 lie on knots of the geometric layout, so the spline returns them exactly."""
    table = torch.randn(13 * 13 + 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    resized = resize_bias_table(table, (7, 7), (12, 10))
    assert torch.equal(resized[-3:], table[-3:])
    old, new = table[:-3].reshape(13, 13, 2), resized[:-3].reshape(23, 19, 2)
    torch.testing.assert_close(new[10:13, 8:11], old[5:8, 5:8])


def test_bias_table_spans_the_new_range() -> None:
    """The outermost stored distance stands for the outermost new one; within, a smooth table is followed closely."""
    coordinate = torch.cat([-torch.tensor([1.0, 2, 3, 4, 5, 6]).flip(0), torch.arange(7.0)])
    surface = (coordinate[:, None] + 0.5 * coordinate[None, :]).reshape(-1, 1)
    table = torch.cat([surface, torch.zeros(3, 1)])
    resized = resize_bias_table(table, (7, 7), (14, 14))
    plane = resized[:-3].reshape(27, 27)
    assert float(plane[-1, -1]) == pytest.approx(9.0, abs=1e-3)
    assert float(plane[0, 0]) == pytest.approx(-9.0, abs=1e-3)
    assert (plane.diff(dim=0) > 0).all()
    linear = resize_rel_pos_bias_table(table, (14, 14), resized.shape, old_window_size=(7, 7))
    torch.testing.assert_close(resized, torch.as_tensor(linear), rtol=0, atol=0.1)


def test_bias_table_of_the_same_grid_is_returned() -> None:
    table = torch.randn(52, 3)
    assert resize_bias_table(table, (4, 4), (4, 4)) is table


# Networks without position embeddings of the image


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (160, 256)])
def test_swin_pads_other_sizes_to_whole_windows(size: tuple[int, int]) -> None:
    net = layouts.swin(strict_img_size=False)
    backbone: Backbone = wrap(net)
    x = torch.randn(1, 3, *size)
    with torch.no_grad():
        found = backbone.outputs(x, (-1,)).blocks[0].patches
        torch.testing.assert_close(found, net.forward_features(x))
    assert found.shape[1:3] == (size[0] // 32, size[1] // 32)
    with pytest.raises(ConfigError, match="multiples of 32"):
        backbone.outputs(torch.zeros(1, 3, 48, 64))
