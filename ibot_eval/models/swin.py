"""Swin family: timm's SwinTransformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models.swin_transformer import SwinTransformer
from torch import Tensor

from ibot_eval.backbone import Backbone, BlockOutput, Norm, Outputs
from ibot_eval.errors import ConfigError


class SwinBackbone(Backbone):
    """Adapter over ``SwinTransformer``; blocks are counted through all stages.

    Norm habits: published evaluations normalise the blocks of the last stage, the only ones whose width the last norm
    fits, and leave earlier stages as they are. Windows keep their trained size: at other image sizes the maps are
    padded to whole windows. There is no [CLS]: ``cls`` is the mean of the tokens, which for the last block is the
    published pooled output.
    """

    has_cls = False
    num_registers = 0

    def __init__(self, net: SwinTransformer, *, family: str = "swin") -> None:
        super().__init__()
        self.net: Any = net
        self.family = family
        stages = self.net.layers
        self.depths: tuple[int, ...] = tuple(len(stage.blocks) for stage in stages)
        self.depth = sum(self.depths)
        self.num_heads = stages[-1].blocks[-1].attn.num_heads
        self.embed_patch_size = int(self.net.patch_embed.patch_size[0])
        self.trained_grid: tuple[int, int] = tuple(self.net.patch_embed.grid_size)
        self.patch_size = self.embed_patch_size * 2 ** (len(stages) - 1)
        widths: list[int] = [stage.blocks[0].dim for stage in stages]
        self.dims = tuple(width for width, depth in zip(widths, self.depths, strict=True) for _ in range(depth))
        names = {
            (96, (2, 2, 6, 2)): "t",
            (96, (2, 2, 18, 2)): "s",
            (128, (2, 2, 18, 2)): "b",
            (192, (2, 2, 18, 2)): "l",
        }
        key: Any = (widths[0], self.depths)
        size = names.get(key, f"{widths[0]}x{'-'.join(map(str, self.depths))}")
        window = max(block.window_size[0] for stage in stages for block in stage.blocks)
        self.architecture = f"swin-{size}/{window}"
        self.net.patch_embed.strict_img_size = False
        for stage in stages:
            for block in stage.blocks:
                block.dynamic_mask = True

    def final_norm(self, tokens: Tensor) -> Tensor:
        return self.net.norm(tokens)

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
            raise ConfigError(
                f"{self.architecture} has no attention over the whole image, only inside windows",
                todo="choose a plain ViT for attention maps",
            )
        narrow = [index for index in wanted if self.dims[index] != self.dims[-1]]
        if norm == "final" and narrow:
            raise ConfigError(
                f"block {narrow[0]} of {self.architecture} is {self.dims[narrow[0]]} wide and the last norm "
                f"{self.dims[-1]}: it cannot be normalised",
                todo='use norm "published", which normalises the last stage only, or "none"',
            )
        kept: dict[int, BlockOutput] = {}
        features, index = self.embed(images), 0
        for stage in self.net.layers:
            if index > max(wanted, default=-1):
                break
            features = stage.downsample(features)
            for block in stage.blocks:
                if index > max(wanted):
                    break
                features = block(features)
                if index in wanted:
                    normed = norm != "none" and self.dims[index] == self.dims[-1]
                    kept[index] = pooled_output(self.final_norm(features) if normed else features)
                index += 1
        return Outputs(tuple(kept[i] for i in wanted), None)

    def embed(self, images: Tensor) -> Tensor:
        return self.net.patch_embed(images)

    def encode(self, patches: Tensor) -> BlockOutput:
        for stage in self.net.layers:
            patches = stage.downsample(patches)
            for block in stage.blocks:
                patches = self.run_block(block, patches)
        return pooled_output(patches)


def pooled_output(features: Tensor) -> BlockOutput:
    """A map (B, h, w, D) as a BlockOutput of a network without [CLS]."""
    return BlockOutput(features.mean(dim=(1, 2)), features.new_empty(len(features), 0, features.shape[-1]), features)
