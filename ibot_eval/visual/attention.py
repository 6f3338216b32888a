"""Attention of one block, for one query, as maps over the patches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.image_pass import evaluating
from ibot_eval.visual.pictures import Picture

MASS = 0.6
"""Share of the attention on patches that published maps keep."""


@dataclass(frozen=True)
class AttentionMaps:
    """Where one query of one block looks."""

    weights: np.ndarray
    """(heads, h, w) float32, softmax weights on the patches."""
    prefix: np.ndarray
    """(heads, P) float32, those on [CLS] and registers: with ``weights`` each head sums to 1."""
    block: int
    """Index from 0."""
    query: tuple[int, int] | None
    """The patch (row, column) whose attention this is; None for [CLS]."""

    @property
    def mean(self) -> np.ndarray:
        """(h, w) float32, the mean over the heads."""
        return self.weights.mean(axis=0)

    @property
    def heads(self) -> int:
        return len(self.weights)

    def check_heads(self, heads: tuple[int, ...] | list[int] | None) -> list[int]:
        """``heads`` as a list, all of them for None; raises ConfigError for one that does not exist."""
        chosen = list(range(self.heads)) if heads is None else list(heads)
        wrong = [head for head in chosen if not 0 <= head < self.heads]
        if wrong or not chosen:
            raise ConfigError(
                f"head {wrong[0]} does not exist: block {self.block} has {self.heads}"
                if wrong
                else "no attention head is chosen",
                todo=f"use 0 to {self.heads - 1}",
            )
        return chosen


def explain_no_attention(backbone: Backbone) -> str | None:
    """Why there are no attention maps of ``backbone``, in a sentence or two; None where there are."""
    from ibot_eval.models.module import ModuleBackbone
    from ibot_eval.models.swin import SwinBackbone

    name = backbone.architecture
    if isinstance(backbone, SwinBackbone):
        return (
            f"{name} attends within windows of a few patches, never over the whole picture, so a map of one query "
            "would show its window only; activation maps and principal components can be drawn instead"
        )
    if isinstance(backbone, ModuleBackbone):
        return f"{name} was given as a plain module, whose attention is not known"
    if not backbone.num_heads:
        return (
            f"{name} has no attention: a convolution weighs its neighbours by fixed numbers, so no query looks "
            "anywhere; activation maps (how strongly each position responds) can be drawn instead"
        )
    return None


def attention_maps(
    backbone: Backbone, picture: Picture, block: int = -1, query: tuple[int, int] | None = None
) -> AttentionMaps:
    """Softmax weights from ``query`` to all patches, per head.

    Only this block's attention is formed, and only the query's row of it is kept.

    Args:
        block: index, negative ones counting from the last.
        query: (row, column) of a patch, or None for [CLS].

    Raises:
        ConfigError: a block or patch that does not exist, [CLS] of a network that has none, or a network without
            attention over the whole picture.
    """
    index = backbone.resolve_block(block)
    if (reason := explain_no_attention(backbone)) is not None:
        raise ConfigError(reason, todo="choose a plain ViT, or draw activation maps: --style activation")
    if query is None and not backbone.has_cls:
        raise ConfigError(
            f"{backbone.architecture} has no [CLS] token to ask", todo="choose a patch as the query: --query ROW COLUMN"
        )
    h, w = picture.grid
    prefix = int(backbone.has_cls) + backbone.num_registers
    row = 0
    if query is not None:
        picture.check_patch(query)
        row = prefix + query[0] * w + query[1]
    with evaluating(backbone), torch.inference_mode():
        attention = backbone.outputs(picture.tensor(backbone), (), attention_block=index).attention
        assert attention is not None
        weights = attention[0, :, row].float().cpu().numpy()
    if not np.isfinite(weights).all():
        raise ConfigError(
            f"the attention of block {index} is not finite", todo="check the checkpoint's weights: ibot-eval inspect"
        )
    return AttentionMaps(weights[:, prefix:].reshape(-1, h, w), weights[:, :prefix], index, query)


def mass_mask(weights: np.ndarray, mass: float = MASS) -> np.ndarray:
    """The patches that hold ``mass`` of each map's attention, as DINO's published maps choose them.

    Of the patches from the least to the most attended, those stay whose running sum (their own share included) is
    above ``1 - mass``: the fewest patches that hold at least ``mass``, up to ties.

    Args:
        weights: (…, h, w) non-negative; what goes to other tokens does not count.
        mass: above 0, up to 1.

    Returns:
        (…, h, w) bool.

    Raises:
        ConfigError: a mass out of its range.
    """
    if not 0 < mass <= 1:
        raise ConfigError(f"the mass {mass:g} is not a share", todo="give a number above 0, up to 1: --mass 0.6")
    flat = torch.from_numpy(np.ascontiguousarray(weights, np.float32)).flatten(-2)
    values, order = flat.sort(dim=-1, stable=True)
    total = values.sum(-1, keepdim=True)
    kept = (values / total.where(total > 0, torch.ones_like(total))).cumsum(-1) > 1 - mass
    return torch.zeros_like(kept).scatter(-1, order, kept).view(weights.shape).numpy()


def at_image_resolution(maps: np.ndarray, size: tuple[int, int], smooth: bool = False) -> np.ndarray:
    """Maps over patches (…, h, w) as maps over pixels (…, H, W) float32.

    Args:
        size: H and W in pixels.
        smooth: bicubic between the patches' centres, cut at 0; else each patch is one flat square, as published.
    """
    flat = torch.from_numpy(np.ascontiguousarray(maps, np.float32)).view(-1, 1, *maps.shape[-2:])
    if smooth:
        large = F.interpolate(flat, size, mode="bicubic", align_corners=False).clamp_min(0)
    else:
        large = F.interpolate(flat, size, mode="nearest")
    return large.view(*maps.shape[:-2], *size).numpy()


def activation_map(backbone: Backbone, picture: Picture, block: int = -1) -> np.ndarray:
    """How strongly each position of a block responds: (h, w) float32, the l2 norm of its features before the last norm.

    For every network with patches; of a pyramid, h and w are the block's own.

    Raises:
        ConfigError: a block that does not exist, or a network that gives no patches.
    """
    with evaluating(backbone), torch.inference_mode():
        patches = backbone.outputs(picture.tensor(backbone), (block,), norm="none").blocks[0].patches[0]
        if not patches.numel():
            raise ConfigError(f"{backbone.architecture} gives no patch tokens", todo="choose another network")
        return patches.float().norm(dim=-1).cpu().numpy()
