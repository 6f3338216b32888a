"""Plain ResNets: timm's ResNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models.resnet import ResNet
from torch import Tensor

from ibot_eval.backbone import Backbone, BlockOutput, Norm, Outputs
from ibot_eval.errors import ConfigError
from ibot_eval.models.swin import pooled_output


class ResNetBackbone(Backbone):
    """Adapter over ``ResNet``; blocks are the residual blocks of all stages, and no norm follows the last of them.

    ``cls`` is the spatial mean of a block's map, which for the last block is the published pooled feature.
    """

    has_cls = False
    num_registers = 0
    num_heads = 0
    patch_size = 32

    def __init__(self, net: ResNet, *, family: str = "resnet") -> None:
        super().__init__()
        self.net: Any = net
        self.family = family
        self.stages = ("layer1", "layer2", "layer3", "layer4")
        depths = tuple(len(getattr(self.net, stage)) for stage in self.stages)
        self.depth = sum(depths)
        widths = [_width(getattr(self.net, stage)[-1]) for stage in self.stages]
        self.dims = tuple(width for width, depth in zip(widths, depths, strict=True) for _ in range(depth))
        bottleneck = hasattr(self.net.layer1[0], "conv3")
        layers = sum(depths) * (3 if bottleneck else 2) + 2
        self.architecture = f"resnet{layers}"

    def final_norm(self, tokens: Tensor) -> Tensor:
        return tokens

    def outputs(
        self,
        images: Tensor,
        blocks: Sequence[int] = (-1,),
        norm: Norm = "published",
        attention_block: int | None = None,
    ) -> Outputs:
        self.check_size(images.shape[-2], images.shape[-1])
        wanted = [self.resolve_block(block) for block in blocks]
        if attention_block is not None:
            raise ConfigError(f"{self.architecture} has no attention", todo="choose a plain ViT for attention maps")
        net = self.net
        kept: dict[int, BlockOutput] = {}
        features = net.maxpool(net.act1(net.bn1(net.conv1(images))))
        for index, block in enumerate(block for stage in self.stages for block in getattr(net, stage)):
            if index > max(wanted, default=-1):
                break
            features = block(features)
            if index in wanted:
                kept[index] = pooled_output(features.permute(0, 2, 3, 1))
        return Outputs(tuple(kept[i] for i in wanted), None)


def _width(block: Any) -> int:
    return (block.bn3 if hasattr(block, "bn3") else block.bn2).num_features
