"""What fine-tuning changes in a network before the first step: size, positions, pooling, LayerScale, stochastic depth.

The networks stay timm's own, so their tensors keep timm's names.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast

import torch
from timm.layers.drop import DropPath, calculate_drop_path_rates
from timm.layers.layer_scale import LayerScale
from timm.layers.mlp import Mlp
from timm.models.beit import Beit, gen_relative_position_index
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.layouts.blueprint import Tensors, mlp_ratio
from ibot_eval.layouts.matching import fill
from ibot_eval.models import BeitBackbone, EvaBackbone, SwinBackbone, ViTBackbone, wrap
from ibot_eval.models.positions import Grid
from ibot_eval.models.relative_bias import CLS_ENTRIES, resize_bias_table
from ibot_eval.models.transformer import TransformerBackbone

Trainable = TransformerBackbone | SwinBackbone

TABLE = "attn.relative_position_bias_table"


def at_size(backbone: Trainable, image_size: int) -> Trainable:
    """The backbone with its positions at the grid of square images; its own tensors are replaced.

    Absolute positions follow the family's rule, BEiT's tables BEiT's. A Swin's windows keep their size, so nothing of
    it changes.

    Raises:
        ConfigError: patches or windows do not fit the size.
    """
    backbone.check_size(image_size, image_size)
    if isinstance(backbone, SwinBackbone):
        return backbone
    net, old = backbone.net, backbone.trained_grid
    new: Grid = (image_size // backbone.patch_size, image_size // backbone.patch_size)
    if new == old:
        return backbone
    with torch.no_grad():
        positions = backbone._positions(new)
        net.patch_embed.set_input_size((image_size, image_size))
        if positions is not None:
            net.pos_embed = nn.Parameter(positions.clone())
        if isinstance(net, Beit):
            for holder in _table_holders(net):
                _resize_table(holder, old, new)
    return _rewrapped(backbone, net)


def add_relative_positions(backbone: Trainable) -> Trainable:
    """The backbone with a relative position bias in every block, as in BEiT.

    A plain ViT becomes a Beit with its weights and tables of zeros, which computes the same: the part of ``qkv.bias``
    that belongs to the keys shifts all scores of a query alike, and goes. A Beit whose blocks share one table gets a
    copy of it in every block (BEiT's fine-tuning code). Swin and Beit with tables in their blocks are returned as they
    are.

    Raises:
        ConfigError: the network has something that a Beit has no place for.
    """
    first = blocks_of(backbone)[0]
    if isinstance(backbone, SwinBackbone) or getattr(first.attn, "relative_position_bias_table", None) is not None:
        return backbone
    if not _fits_beit(backbone):
        raise ConfigError(
            f"{backbone.architecture} is no plain ViT with [CLS]: it cannot be given BEiT's relative positions",
            todo="--positions absolute",
        )
    net, grid = backbone.net, backbone.trained_grid
    width, heads = backbone.dims[0], backbone.num_heads
    tensors = _beit_tensors(dict(net.state_dict()))
    rows = (2 * grid[0] - 1) * (2 * grid[1] - 1) + CLS_ENTRIES
    shared = tensors.pop("rel_pos_bias.relative_position_bias_table", torch.zeros(rows, heads))
    tensors |= {f"blocks.{index}.{TABLE}": shared for index in range(backbone.depth)}
    eps = next(module.eps for module in net.modules() if isinstance(module, nn.LayerNorm))
    beit = Beit(
        img_size=(grid[0] * backbone.patch_size, grid[1] * backbone.patch_size),
        patch_size=backbone.patch_size,
        num_classes=0,
        global_pool="avg" if backbone.mean_pooled else "token",
        use_fc_norm=backbone.mean_pooled,
        embed_dim=width,
        depth=backbone.depth,
        num_heads=heads,
        qkv_bias="blocks.0.attn.q_bias" in tensors,
        mlp_ratio=mlp_ratio(first.mlp.fc1.out_features, width),
        init_values=1.0 if "blocks.0.gamma_1" in tensors else None,
        use_abs_pos_emb="pos_embed" in tensors,
        use_rel_pos_bias=True,
        norm_layer=partial(nn.LayerNorm, eps=eps),  # pyright: ignore[reportArgumentType]
        device="meta",
    )
    fill(beit, tensors)
    return _rewrapped(backbone, beit)


def set_pooling(backbone: Trainable, pooling: Literal["cls", "mean"]) -> Trainable:
    """The backbone with its last norm where the pooling has it: on the tokens, or behind the mean of the patches.

    Where the norm moves it takes its values along.

    Raises:
        ConfigError: "cls" of a ViT that has no [CLS], or "mean" of a DINOv3, whose files have no place for it.
    """
    if isinstance(backbone, SwinBackbone):
        return backbone
    if pooling == "cls" and not backbone.has_cls:
        raise ConfigError(f"{backbone.architecture} has no [CLS] token to classify by", todo="--pooling mean")
    if backbone.mean_pooled == (pooling == "mean"):
        return backbone
    if isinstance(backbone, EvaBackbone):
        raise ConfigError(
            f"{backbone.architecture} with its last norm behind the mean of the patches is not supported",
            todo="--pooling cls",
        )
    net = backbone.net
    net.norm, net.fc_norm = net.fc_norm, net.norm
    net.global_pool = "token" if pooling == "cls" else "avg"
    return _rewrapped(backbone, net)


def add_layer_scale(backbone: Trainable, value: float) -> None:
    """Gives every block that has none two LayerScales (Touvron et al. 2021) that start at ``value``.

    Raises:
        ConfigError: the value is not above 0, or the blocks have no place for one.
    """
    if value <= 0:
        raise ConfigError(f"a LayerScale of {value} is not above 0", todo="--layer-scale 0.1, or none")
    for block in blocks_of(backbone):
        width = block.norm1.normalized_shape[0]
        if hasattr(block, "ls1"):
            for name in ("ls1", "ls2"):
                if isinstance(getattr(block, name), nn.Identity):
                    setattr(block, name, LayerScale(width, value))
        elif hasattr(block, "gamma_1"):
            for name in ("gamma_1", "gamma_2"):
                if getattr(block, name) is None:
                    setattr(block, name, nn.Parameter(torch.full((width,), value)))
        else:
            raise ConfigError(f"{backbone.architecture} has no place for LayerScale", todo="leave --layer-scale out")


def set_drop_path(backbone: Trainable, rate: float) -> None:
    """Stochastic depth (Huang et al. 2016), growing linearly from 0 at the first block to ``rate`` at the last.

    Raises:
        ConfigError: the rate is not at least 0 and below 1.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"a stochastic depth of {rate} is not at least 0 and below 1", todo="--drop-path 0.1")
    rates: Any = calculate_drop_path_rates(rate, backbone.depth)
    for block, own in zip(blocks_of(backbone), rates, strict=True):
        block.drop_path1, block.drop_path2 = (DropPath(own) if own > 0 else nn.Identity() for _ in range(2))


def blocks_of(backbone: Backbone) -> list[Any]:
    """All blocks of a ViT family's backbone or a Swin, first to last."""
    if isinstance(backbone, SwinBackbone):
        return [block for stage in backbone.net.layers for block in stage.blocks]
    return list(cast(TransformerBackbone, backbone).net.blocks)


def _rewrapped(backbone: TransformerBackbone, net: nn.Module) -> Any:
    """An adapter for the changed network, which reads its shape anew."""
    if isinstance(net, Beit) and not isinstance(backbone, BeitBackbone):
        # Its file will be read as a BEiT's, with BEiT's habits.
        fresh = wrap(net, family="beit")
    else:
        fresh = wrap(net, family=backbone.family, resize=backbone.resize)
    fresh.mean, fresh.std = backbone.mean, backbone.std
    return fresh


def _resize_table(holder: Any, old: Grid, new: Grid) -> None:
    # timm's set_window_size would interpolate in its own, slower way first.
    table = resize_bias_table(holder.relative_position_bias_table, old, new)
    holder.relative_position_bias_table = nn.Parameter(table)
    holder.window_size, holder.window_area, holder.num_relative_distance = new, new[0] * new[1], len(table)
    index = gen_relative_position_index(new, device=table.device)
    holder.register_buffer("relative_position_index", index, persistent=False)


def _table_holders(net: Beit) -> list[Any]:
    parts = [net.rel_pos_bias, *(block.attn for block in net.blocks)]  # pyright: ignore[reportGeneralTypeIssues]
    return [part for part in parts if getattr(part, "relative_position_bias_table", None) is not None]


def _fits_beit(backbone: TransformerBackbone) -> bool:
    net, first = backbone.net, backbone.net.blocks[0]
    plain = type(first.mlp) is Mlp and isinstance(first.mlp.act, nn.GELU)
    if not isinstance(backbone, (ViTBackbone, BeitBackbone)) or not plain or not backbone.has_cls:
        return False
    positions = net.pos_embed
    patches = backbone.trained_grid[0] * backbone.trained_grid[1]
    if isinstance(net, VisionTransformer):
        odd = [net.norm_pre, first.attn.q_norm, first.attn.k_norm, first.attn.norm]
        if backbone.num_registers or not all(isinstance(part, nn.Identity) for part in odd):
            return False
    return positions is None or positions.shape[1] == 1 + patches


def _beit_tensors(tensors: Tensors) -> Tensors:
    """A ViT's tensors under the names that a Beit has for them."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".attn.qkv.bias"):
            stem = name.removesuffix("qkv.bias")
            renamed[f"{stem}q_bias"], _, renamed[f"{stem}v_bias"] = tensor.chunk(3)
        else:
            renamed[name.replace(".ls1.gamma", ".gamma_1").replace(".ls2.gamma", ".gamma_2")] = tensor
    return renamed
