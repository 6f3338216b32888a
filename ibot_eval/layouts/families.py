"""Telling families of plain ViTs apart, and the numbers of heads that their tensors do not show."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.blueprint import Tensors, factor_pairs
from ibot_eval.layouts.unwrapping import Network
from ibot_eval.models.positions import Grid

COMMON = {(192, 12): 3, (384, 12): 6, (768, 12): 12, (1024, 24): 16}
"""ViT-Ti, S, B and L."""

HEADS: dict[str, dict[tuple[int, int], int]] = {
    "vit": COMMON,
    "supervised": COMMON,
    "ibot": COMMON,
    "dino": COMMON,
    "deit": COMMON,
    "timm": COMMON,
    "hf-vit": COMMON,
    "beit": COMMON,
    "mae": {**COMMON, (1280, 32): 16},
    "mocov3": {(384, 12): 12, (768, 12): 12},
    "dinov2": {**COMMON, (1536, 40): 24},
    "dinov3": {**COMMON, (1280, 32): 20, (4096, 40): 32},
}
"""Heads by family and (width, depth): MoCo v3's ViT-S has 12 heads of 32, where all others have 6 of 64."""

MARKED = ("ibot", "dino", "mae", "mocov3", "dinov2")
"""Families of plain ViTs that a file is taken for only on a mark of their own, so that their heads are certain."""

Order = Literal["mae", "mocov3"]


def number_of_heads(family: str, width: int, depth: int, asked: int | None) -> int:
    """Attention heads: as asked, else from the table.

    Raises:
        CheckpointError: not in the table, or not a divisor of the width; says which numbers are possible.
    """
    divisors = [heads for heads in range(1, width // 8 + 1) if width % heads == 0]
    if asked is not None:
        if asked < 1 or width % asked:
            raise CheckpointError(
                f"{asked} heads do not divide the width {width}",
                where="--heads",
                todo=f"use one of {', '.join(map(str, divisors))}",
            )
        return asked
    known = HEADS.get(family, {})
    if (width, depth) not in known:
        raise CheckpointError(
            f"the number of attention heads is not in the tensors, and no published {family} network is {width} wide "
            f"and {depth} deep",
            todo=f"give it with --heads; the width divides by {', '.join(map(str, divisors))}",
        )
    return known[width, depth]


def sincos_positions(grid: Grid, width: int, order: Order) -> Tensor:
    """Fixed position embeddings of MAE or MoCo v3.

    Each axis takes half the width: sines, then cosines, of the coordinate times 10000^(-i / (D/4)), i = 0 … D/4 - 1.
    MAE puts columns first, MoCo v3 rows first (its meshgrid is indexed "ij" but read as rows of the image).

    Args:
        grid: rows and columns.
        width: D, a multiple of 4.
        order: whose.

    Returns:
        (1, rows * columns, D) float32.
    """
    quarter = width // 4
    frequencies = 10000.0 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    axes = (columns, rows) if order == "mae" else (rows, columns)
    halves = []
    for axis in axes:
        angles = axis.flatten().double()[:, None] * frequencies
        halves += [angles.sin(), angles.cos()]
    return torch.cat(halves, dim=1).float().unsqueeze(0)


def recognise_sincos(positions: Tensor) -> tuple[Order, Grid] | None:
    """Which fixed embeddings ``positions`` (1, N, D), without prefix tokens, are, and of which grid; None if learnt."""
    count, width = positions.shape[1:]
    if width % 4:
        return None
    # The tolerance is for files in half precision; learnt embeddings are nowhere near.
    values = positions.float()
    if not torch.allclose(values[:, :1], sincos_positions((1, 1), width, "mae"), atol=2e-3):
        return None  # The corner, coordinate (0, 0), is the same in every grid and order.
    grids = sorted(factor_pairs(count), key=lambda grid: abs(grid[0] - grid[1]))
    for grid in grids:
        for order in ("mocov3", "mae"):
            if torch.allclose(values, sincos_positions(grid, width, order), atol=2e-3):
                return order, grid
    return None


def vit_family(network: Network, tensors: Tensors, sincos: Order | None) -> str:
    """Whose layout a plain ViT is in.

    "vit" is a backbone without any mark of its origin (iBOT and DINO release such files; they share all habits);
    "supervised" is one with a classifier on top (DeiT, or any of these fine-tuned).

    Args:
        network: as found in the file.
        tensors: the trunk, under timm's names.
        sincos: whose fixed position embeddings it has.
    """
    names = {*network.trunk, *network.siblings}
    patch = tensors["patch_embed.proj.weight"].shape[-1]
    scaled, mask = "blocks.0.ls1.gamma" in tensors, network.trunk.get("mask_token")
    if any(name.startswith(("dino_head.", "ibot_head.")) for name in names) or "register_tokens" in names:
        return "dinov2"
    if scaled and ((mask is not None and mask.ndim == 2) or patch == 14):
        return "dinov2"
    if "masked_embed" in names or any(name.startswith("head.last_layer2.") for name in names):
        return "ibot"
    if any(name.startswith("head.last_layer.") for name in names):
        return "dino"
    if any(name.startswith("decoder_") for name in names):
        return "mae"
    if {"base_encoder", "momentum_encoder"} & set(network.parts):
        return "mocov3"
    if sincos is not None:
        return sincos
    if "dist_token" in network.trunk:
        return "deit"
    if "reg_token" in network.trunk:
        return "timm"
    return "supervised" if "head.weight" in network.trunk else "vit"
