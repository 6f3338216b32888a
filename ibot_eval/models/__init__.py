"""Adapters that give timm networks, and modules of one's own, the Backbone contract."""

from __future__ import annotations

from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.resnet import ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ibot_eval.backbone import Backbone
from ibot_eval.models.beit import BeitBackbone
from ibot_eval.models.cnn import ResNetBackbone
from ibot_eval.models.module import ModuleBackbone
from ibot_eval.models.positions import ResizeRule
from ibot_eval.models.swin import SwinBackbone
from ibot_eval.models.vit import EvaBackbone, ViTBackbone

__all__ = [
    "BeitBackbone",
    "EvaBackbone",
    "ModuleBackbone",
    "ResNetBackbone",
    "SwinBackbone",
    "ViTBackbone",
    "wrap",
]


def wrap(module: nn.Module, *, family: str | None = None, resize: ResizeRule | None = None) -> Backbone:
    """A Backbone for any module: itself, the adapter of its timm class, or :class:`ModuleBackbone`.

    Args:
        module: the network; its weights are used as they are, and shared.
        family: whose published habits apply (see ``Backbone.family``); by default those of timm's own networks.
        resize: how position embeddings are resized; by default as the family does.
    """
    backbone = _adapt(module, family, resize)
    config = getattr(module, "pretrained_cfg", None)
    if backbone is not module and isinstance(config, dict) and "mean" in config and "std" in config:
        backbone.mean, backbone.std = tuple(config["mean"]), tuple(config["std"])
    return backbone


def _adapt(module: nn.Module, family: str | None, resize: ResizeRule | None) -> Backbone:
    if isinstance(module, Backbone):
        return module
    if isinstance(module, VisionTransformer):
        return ViTBackbone(module, family=family or "timm", resize=resize)
    if isinstance(module, Eva):
        return EvaBackbone(module, family=family or "timm", resize=resize)
    if isinstance(module, Beit):
        return BeitBackbone(module, family=family or "beit", resize=resize)
    if isinstance(module, SwinTransformer):
        return SwinBackbone(module, family=family or "swin")
    if isinstance(module, ResNet):
        return ResNetBackbone(module, family=family or "resnet")
    return ModuleBackbone(module)
