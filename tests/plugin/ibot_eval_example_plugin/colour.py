"""A backbone of average patch colours: colour:PATCH."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ibot_eval.backbone import Backbone, BlockOutput, Norm, Outputs
from ibot_eval.errors import ConfigError


class Colour(Backbone):
    """One block whose tokens are the mean colours of the patches."""

    depth, num_heads, num_registers, has_cls = 1, 0, 0, False
    dims, family = (3,), "colour"

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.architecture = f"colour/{patch_size}"

    def outputs(
        self,
        images: Tensor,
        blocks: Sequence[int] = (-1,),
        norm: Norm = "published",
        attention_block: int | None = None,
    ) -> Outputs:
        if attention_block is not None:
            raise ConfigError(f"{self.architecture} has no attention")
        self.check_size(*images.shape[-2:])
        patches = torch.nn.functional.avg_pool2d(images, self.patch_size).permute(0, 2, 3, 1)
        output = BlockOutput(patches.mean((1, 2)), patches.new_zeros(len(images), 0, 3), patches)
        return Outputs(tuple(output for block in blocks if self.resolve_block(block) == 0), None)

    def final_norm(self, tokens: Tensor) -> Tensor:
        return tokens


def build(rest: str) -> Colour:
    return Colour(int(rest))
