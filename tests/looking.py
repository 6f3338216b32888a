"""Networks and pictures for the tests of ``ibot_eval.visual``."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from ibot_eval.backbone import Backbone, BlockOutput, Norm, Outputs
from ibot_eval.errors import ConfigError
from ibot_eval.visual.pictures import Source, source_of


class PixelBackbone(Backbone):
    """Patch tokens are the patches' pixels, less their mean and of length 1; no attention, no positions."""

    architecture, family = "pixels", "fake"
    depth, num_heads, num_registers, has_cls = 1, 0, 0, False
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def __init__(self, patch: int = 8) -> None:
        super().__init__()
        self.patch_size, self.dims = patch, (3 * patch * patch,)

    def final_norm(self, tokens: Tensor) -> Tensor:
        return tokens

    def outputs(
        self,
        images: Tensor,
        blocks: Sequence[int] = (-1,),
        norm: Norm = "published",
        attention_block: int | None = None,
    ) -> Outputs:
        if attention_block is not None:
            raise ConfigError("no attention")
        patch = self.patch_size
        grid = images.shape[-2] // patch, images.shape[-1] // patch
        tokens = nn.functional.unfold(images, patch, stride=patch).transpose(1, 2)
        tokens = nn.functional.normalize(tokens - tokens.mean(-1, keepdim=True) + 1e-6, dim=-1).unflatten(1, grid)
        output = BlockOutput(tokens.mean((1, 2)), tokens.new_empty(len(images), 0, tokens.shape[-1]), tokens)
        return Outputs((output,) * len(blocks), None)


def checkerboard(rows: int, columns: int, cell: int, seed: int = 0) -> np.ndarray:
    """(rows * cell, columns * cell, 3) uint8: dark and light cells that alternate, each with a shade of its own."""
    shades = np.random.default_rng(seed).integers(0, 90, (rows, columns, 3))
    light = (np.indices((rows, columns)).sum(axis=0) % 2)[..., None] * 160
    return (shades + light).astype(np.uint8).repeat(cell, 0).repeat(cell, 1)


def source(pixels: np.ndarray, name: str = "picture.png") -> Source:
    return source_of(Image.fromarray(pixels), name)


def noise(height: int, width: int, seed: int = 0) -> Source:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return source(pixels, f"noise{seed}.png")


def loaded_of(backbone: Backbone, head: nn.Module | None = None, sha256: str = "a" * 64) -> Any:
    """What ``load_checkpoint`` would give."""
    report = SimpleNamespace(
        sha256=sha256, key="teacher", overrides={}, identity={"heads": 3}, reference="folder/fake.pth", notes=[]
    )
    return SimpleNamespace(backbone=backbone.eval(), projection_head=head, classifier=None, report=report)
