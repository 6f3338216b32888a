"""ViT family: timm's VisionTransformer (iBOT, DINO, DINOv2, MAE, MoCo v3, DeiT …) and Eva (DINOv3)."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from ibot_eval.models.positions import Grid, ResizeRule
from ibot_eval.models.transformer import TransformerBackbone


class ViTBackbone(TransformerBackbone):
    """Adapter over ``VisionTransformer``. A distillation token (DeiT) counts as a register."""

    def __init__(self, net: VisionTransformer, *, family: str = "timm", resize: ResizeRule | None = None) -> None:
        super().__init__(net, family=family, resize=resize)

    def _tokens(self, patches: Tensor, grid: Grid) -> Tensor:
        net = self.net
        tokens = self._prefixed(patches, (net.cls_token, getattr(net, "dist_token", None), net.reg_token), grid)
        return net.norm_pre(net.pos_drop(tokens))

    def _arguments(self, grid: Grid) -> list[dict[str, Any]]:
        return [{}] * self.depth


class EvaBackbone(TransformerBackbone):
    """Adapter over ``Eva``, whose positions are rotations computed for the size at hand (DINOv3)."""

    def __init__(self, net: Eva, *, family: str = "dinov3", resize: ResizeRule | None = None) -> None:
        super().__init__(net, family=family, resize=resize)

    def _tokens(self, patches: Tensor, grid: Grid) -> Tensor:
        net = self.net
        return net.norm_pre(net.pos_drop(self._prefixed(patches, (net.cls_token, net.reg_token), grid)))

    def _arguments(self, grid: Grid) -> list[dict[str, Any]]:
        if self.net.rope is None:
            return [{}] * self.depth
        rope: Tensor = self.net.rope.get_embed(shape=list(grid))
        return [{"rope": rope[index] if self.net.rope_mixed else rope} for index in range(self.depth)]


def small_random_vit(image_size: int = 64, patch_size: int = 8, width: int = 96, depth: int = 4) -> VisionTransformer:
    """A ViT small enough for a demonstration, with random weights from torch's generator."""
    net = VisionTransformer(
        img_size=image_size,
        patch_size=patch_size,
        embed_dim=width,
        depth=depth,
        num_heads=width // 32,
        num_classes=0,
    )
    if net.cls_token is not None:
        # timm starts [CLS] at 1e-6, where the first LayerNorm would amplify rounding differences between machines.
        torch.nn.init.normal_(net.cls_token, std=0.02)
    return net
