"""The last block of a ViT where only some of its tokens are wanted.

Its keys and values come from all tokens, but everything after the attention's sum works on one token at a time, and is
three quarters of the block's products.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F


def block_at(block: Any, tokens: Tensor, rows: Tensor, **arguments: Any) -> Tensor:
    """``block(tokens)`` at some rows: the same numbers, from the same draws of drop path.

    Args:
        block: any; only a plain timm block without dropout is spared the other rows.
        tokens: (B, T, D).
        rows: (R,) int64 into the B * T tokens, also repeated ones.
        arguments: of the block.

    Returns:
        (R, D).
    """
    attention: Any = getattr(block, "attn", None)
    plain = type(block) is Block and type(attention) is Attention and attention.gate is None
    if not plain or arguments:
        return block(tokens, **arguments).flatten(0, 1).index_select(0, rows)
    query, key, value = (
        attention.qkv(block.norm1(tokens)).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    )
    mixed = F.scaled_dot_product_attention(
        attention.q_norm(query),
        attention.k_norm(key),
        value,
        dropout_p=attention.attn_drop.p if block.training else 0.0,
    )
    mixed = mixed.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, rows)
    x = tokens.flatten(0, 1).index_select(0, rows)
    samples = rows // tokens.shape[1]
    mixed = attention.proj_drop(attention.proj(attention.norm(mixed)))
    x = x + _dropped(block.drop_path1, block.ls1(mixed), samples, len(tokens))
    return x + _dropped(block.drop_path2, block.ls2(block.mlp(block.norm2(x))), samples, len(tokens))


def _dropped(drop_path: nn.Module, x: Tensor, samples: Tensor, count: int) -> Tensor:
    """Drop path decides by image: one factor each, for all rows of it."""
    if isinstance(drop_path, nn.Identity) or not drop_path.training:
        return x
    return x * drop_path(x.new_ones(count, 1)).index_select(0, samples)


def rows_of(positions: Tensor, patches: int, prefix: int, images: int) -> Tensor:
    """(images + M,) rows of the tokens of ``images`` images: their first ones ([CLS]), then patches.

    Args:
        positions: (M,) int64 flat positions into images * patches.
        patches: of an image.
        prefix: tokens before the patches of an image.
    """
    length = prefix + patches
    first = torch.arange(images, device=positions.device) * length
    return torch.cat([first, positions // patches * length + prefix + positions % patches])
