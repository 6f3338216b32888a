"""Swin Transformers in the published and timm's layout."""

from __future__ import annotations

from functools import partial

from timm.models.swin_transformer import SwinTransformer, checkpoint_filter_fn
from torch import nn

from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.blueprint import Blueprint, Hints, mlp_ratio, need, number_of
from ibot_eval.layouts.unwrapping import Network
from ibot_eval.models.positions import Grid

TABLE = "attn.relative_position_bias_table"
PUBLISHED_EPS, SUPERVISED_EPS = 1e-6, 1e-5


def is_swin(network: Network) -> bool:
    """Whether a network has Swin's stages of window attention."""
    return f"layers.0.blocks.0.{TABLE}" in network.trunk


def read_swin(network: Network, hints: Hints) -> Blueprint:
    """A Swin, its widths, depths, heads and windows inferred from the tensors.

    The trained image size comes from the hints' grid. Without one, a last stage whose window is smaller than the
    others' (iBOT's Swin-T/14: 7 at the 7x7 grid of 224 px) was cut down to its grid, which tells the size; otherwise
    224 px is assumed where the windows allow it. Nothing but the shift of whole-grid windows depends on it.

    LayerNorms have eps 1e-6 in self-supervised files (iBOT, EsViT) and 1e-5 in supervised ones, which carry a
    classifier.
    """
    trunk = network.trunk
    stages = number_of(trunk, "layers.")
    depths = [number_of(trunk, f"layers.{stage}.blocks.") for stage in range(stages)]
    tables = [need(trunk, f"layers.{stage}.blocks.0.{TABLE}") for stage in range(stages)]
    windows = [(round(table.shape[0] ** 0.5) + 1) // 2 for table in tables]
    heads = [table.shape[1] for table in tables]
    if hints.heads not in (None, heads[-1]):
        raise CheckpointError(f"the last stage has {heads[-1]} heads, not {hints.heads}", todo="leave --heads out")
    width, _, patch, _ = trunk["patch_embed.proj.weight"].shape
    hidden = need(trunk, "layers.0.blocks.0.mlp.fc1.weight").shape[0]
    grid = hints.grid or _grid(windows, patch)
    net = SwinTransformer(
        img_size=(grid[0] * patch, grid[1] * patch),
        patch_size=patch,
        num_classes=0,
        embed_dim=width,
        depths=tuple(depths),
        num_heads=tuple(heads),
        window_size=tuple((window, window) for window in windows),  # pyright: ignore[reportArgumentType]
        mlp_ratio=mlp_ratio(hidden, width),
        qkv_bias="layers.0.blocks.0.attn.qkv.bias" in trunk,
        drop_path_rate=0.0,
        strict_img_size=False,
        norm_layer=partial(nn.LayerNorm, eps=hints.eps or norm_eps(network)),  # pyright: ignore[reportArgumentType]
        weight_init="skip",
        device="meta",
    )
    tensors = checkpoint_filter_fn(dict(trunk), net)
    return Blueprint(net, tensors, hints.family or "swin", grid, hints.mean, hints.std)


def norm_eps(network: Network) -> float:
    """Of a Swin's LayerNorms; see :func:`read_swin`."""
    supervised = any(name in network.trunk for name in ("head.weight", "head.fc.weight"))
    return SUPERVISED_EPS if supervised else PUBLISHED_EPS


def _grid(windows: list[int], patch: int) -> Grid:
    """Rows and columns of patches it was trained with: the square whose grids, stage by stage, have these windows."""
    largest = max(windows)
    for image in (224, windows[-1] * patch * 2 ** (len(windows) - 1)):
        grids = [image // patch // 2**stage for stage in range(len(windows))]
        if all(min(grid, largest) == window for grid, window in zip(grids, windows, strict=True)):
            return grids[0], grids[0]
    raise CheckpointError(
        f"the windows of the stages, {', '.join(map(str, windows))}, fit no image size",
        todo="give the timm name of the network with --arch",
    )
