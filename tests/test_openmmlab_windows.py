"""protocols.openmmlab.window_attention against the core's blocks, a loop over windows, and BEiT's interpolation."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from timm.models.beit import gen_relative_position_index
from torch import Tensor

from ibot_eval.models import wrap
from ibot_eval.models.relative_bias import resize_bias_table
from ibot_eval.models.transformer import TransformerBackbone
from protocols.openmmlab.window_attention import BlocksAtSize, bias_matrix, relative_index
from tests import layouts

NETS = {
    "vit": layouts.vit,
    "registers": lambda: layouts.vit(reg_tokens=2, class_token=False, global_pool="avg", fc_norm=False),
    "beit": layouts.beit,
    "shared": lambda: layouts.beit(use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    "dinov3": layouts.eva,
}


def made(name: str) -> TransformerBackbone:
    backbone = cast(TransformerBackbone, wrap(NETS[name]()))
    backbone.keep_positions = False
    return backbone


def tokens_of(backbone: TransformerBackbone, grid: tuple[int, int], seed: int = 0) -> Tensor:
    prefix = int(backbone.has_cls) + backbone.num_registers
    return torch.randn(2, prefix + grid[0] * grid[1], 48, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("window", [0, 6, 7])
def test_windows_that_cover_the_image_are_the_plain_block(name: str, window: int):
    backbone, grid = made(name), (5, 6)
    tokens = tokens_of(backbone, grid)
    with torch.no_grad(), backbone._at_size(grid):
        expected = backbone.net.blocks[1](tokens, **backbone._arguments(grid)[1])
    with torch.no_grad():
        result = BlocksAtSize(backbone, grid).run(1, tokens, window)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["vit", "registers"])
def test_each_window_is_a_small_image_for_the_attention(name: str):
    backbone, grid = made(name), (5, 4)
    tokens, block = tokens_of(backbone, grid), made(name).net.blocks[0]
    prefix = int(backbone.has_cls) + backbone.num_registers
    with torch.no_grad():
        result = BlocksAtSize(backbone, grid).run(0, tokens, 3)
        normed = block.norm1(tokens)
        attended = torch.zeros_like(normed)
        for rows in (range(3), range(3, 5)):
            for columns in (range(3), range(3, 4)):
                places = [prefix + 4 * row + column for row in rows for column in columns]
                part = block.attn(normed[:, [*range(prefix), *places]])
                attended[:, places] = part[:, prefix:]
                attended[:, :prefix] += part[:, :prefix] * len(places) / 20
        expected = tokens + block.ls1(attended)
        expected = expected + block.ls2(block.mlp(block.norm2(expected)))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_windows_of_dinov3_keep_the_rotations_of_the_image():
    backbone, grid = made("dinov3"), (4, 4)
    tokens, block = tokens_of(backbone, grid), made("dinov3").net.blocks[0]
    rope = backbone._arguments(grid)[0]["rope"]
    places = [2, 3, 6, 7]
    with torch.no_grad():
        result = BlocksAtSize(backbone, grid).run(0, tokens, 2)
        chosen = tokens[:, [*range(5), *(5 + place for place in places)]]
        expected = block(chosen, rope=rope[places])
    torch.testing.assert_close(result[:, [5 + place for place in places]], expected[:, 5:], atol=1e-5, rtol=1e-5)


def test_windows_of_beit_keep_the_distances_of_the_image():
    backbone, grid = made("beit"), (5, 6)
    block: Any = copy.deepcopy(backbone.net.blocks[0])
    tokens = tokens_of(backbone, grid)
    bias = backbone._bias(block.attn.relative_position_bias_table.detach(), grid, 0)
    places = [14, 15, 20, 21]  # rows 2 and 3, columns 2 and 3
    kept = torch.tensor([0, *(1 + place for place in places)])
    block.attn._get_rel_pos_bias = lambda: bias[:, :, kept][..., kept]
    with torch.no_grad():
        result = BlocksAtSize(backbone, grid).run(0, tokens, 2)
        expected = block(tokens[:, kept])
    torch.testing.assert_close(result[:, kept[1:]], expected[:, 1:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("new", [(3, 5), (7, 4), (9, 12)])
def test_interpolation_by_matrices_is_beits(new: tuple[int, int]):
    old = (4, 5)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7 * 9 + 3, 2, dtype=torch.float64, generator=generator)
    down, across = (torch.from_numpy(bias_matrix(a, b)) for a, b in zip(old, new, strict=True))
    result = torch.einsum("ai,bj,ijh->abh", down, across, table[:-3].reshape(7, 9, 2)).flatten(0, 1)
    torch.testing.assert_close(result, resize_bias_table(table, old, new)[:-3], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("grid", [(2, 2), (3, 5)])
def test_index_of_the_whole_image_is_timms(grid: tuple[int, int]):
    assert torch.equal(relative_index(grid, grid, torch.device("cpu")), gen_relative_position_index(grid))


@pytest.mark.parametrize("name", ["beit", "shared"])
def test_gradients_reach_tables_of_relative_positions_at_other_sizes(name: str):
    backbone, grid = made(name), (5, 6)
    BlocksAtSize(backbone, grid).run(0, tokens_of(backbone, grid), 0).square().sum().backward()
    holder = backbone.net.blocks[0].attn if name == "beit" else backbone.net.rel_pos_bias
    gradient = holder.relative_position_bias_table.grad
    assert gradient is not None
    assert (gradient.abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("name", NETS)
def test_a_pass_leaves_the_network_as_it_was(name: str):
    backbone, grid = made(name), (5, 6)
    BlocksAtSize(backbone, grid).run(0, tokens_of(backbone, grid), 2)
    attention = backbone.net.blocks[0].attn
    assert "forward" not in vars(attention)
    assert "_get_rel_pos_bias" not in vars(attention)
