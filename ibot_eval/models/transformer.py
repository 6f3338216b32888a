"""What the adapters of plain Transformers (ViT, EVA, BEiT) have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn

from ibot_eval.backbone import Backbone, BlockOutput, Norm, Outputs
from ibot_eval.errors import ConfigError
from ibot_eval.models.attention import attention_of
from ibot_eval.models.last_block import block_at, rows_of
from ibot_eval.models.positions import Grid, ResizeRule, SizeCache, published_rule, resize_positions


class TransformerBackbone(Backbone):
    """A timm network ``net`` whose blocks all see (B, T, D) tokens.

    Norm habits: the published evaluations of these families put every block's output through the last LayerNorm, so
    "published" equals "final". Networks fine-tuned on the mean of the patches (BEiT, MAE) hold that norm after the
    mean, as ``fc_norm``; it is then the last norm, applied to tokens when one asks for normalised blocks, and
    ``final_norm(patches.mean(...))`` on raw patches is the published feature, the input of their classifier.
    """

    def __init__(self, net: nn.Module, *, family: str, resize: ResizeRule | None = None) -> None:
        super().__init__()
        patch_embed: Any = net.patch_embed
        if not isinstance(patch_embed, PatchEmbed):
            raise ConfigError(
                f"networks with the patch embedding {type(patch_embed).__name__} are not supported",
                todo="wrap the module in ibot_eval.models.ModuleBackbone, which uses its output only",
            )
        if patch_embed.patch_size[0] != patch_embed.patch_size[1]:
            raise ConfigError(f"patches of {patch_embed.patch_size} pixels are not square, which is not supported")
        self.net: Any = net
        self.family = family
        self.depth = len(self.net.blocks)
        self.num_heads = self.net.blocks[-1].attn.num_heads
        self.patch_size = int(patch_embed.patch_size[0])
        self.dims = (self.net.embed_dim,) * self.depth
        self.has_cls = getattr(self.net, "cls_token", None) is not None
        self.num_registers = self.net.num_prefix_tokens - self.has_cls
        self.trained_grid: Grid = tuple(patch_embed.grid_size)
        self.resize: ResizeRule = resize or published_rule(family, self.num_registers)
        self.architecture = field_name(self.net.embed_dim, self.depth, self.patch_size, self.num_registers)
        self._last_norm = self.net.norm
        if isinstance(self.net.norm, nn.Identity) and isinstance(getattr(self.net, "fc_norm", None), nn.Module):
            self._last_norm = self.net.fc_norm
        self._sizes = SizeCache()

    @property
    def mean_pooled(self) -> bool:
        """Whether the network's own classifier takes the normed mean of the patches instead of [CLS]."""
        return self._last_norm is not self.net.norm

    @abstractmethod
    def _tokens(self, patches: Tensor, grid: Grid) -> Tensor:
        """(B, h*w, D) embedded patches -> (B, T, D) input of the first block."""

    @abstractmethod
    def _arguments(self, grid: Grid) -> list[dict[str, Any]]:
        """Keyword arguments of each block at this grid."""

    def _at_size(self, grid: Grid) -> AbstractContextManager[None]:
        """What has to hold while blocks run at this grid."""
        return nullcontext()

    def final_norm(self, tokens: Tensor) -> Tensor:
        return self._last_norm(tokens)

    def outputs(
        self,
        images: Tensor,
        blocks: Sequence[int] = (-1,),
        norm: Norm = "published",
        attention_block: int | None = None,
    ) -> Outputs:
        self.check_size(images.shape[-2], images.shape[-1])
        wanted = [self.resolve_block(block) for block in blocks]
        attended = None if attention_block is None else self.resolve_block(attention_block)
        last = max((-1, *wanted, *(() if attended is None else (attended,))))

        patches = self.embed(images)
        grid = (patches.shape[1], patches.shape[2])
        tokens = self._tokens(patches.flatten(1, 2), grid)
        arguments = self._arguments(grid)

        kept: dict[int, BlockOutput] = {}
        attention = None
        with self._at_size(grid):
            for index in range(last + 1):
                if index == attended:
                    attention = attention_of(self.net.blocks[index], tokens, **arguments[index])
                tokens = self.net.blocks[index](tokens, **arguments[index])
                if index in wanted:
                    kept[index] = self._split(tokens if norm == "none" else self.final_norm(tokens), grid)
        return Outputs(tuple(kept[index] for index in wanted), attention)

    def embed(self, images: Tensor) -> Tensor:
        features = self.net.patch_embed.proj(images)
        return self.net.patch_embed.norm(features.flatten(2).transpose(1, 2)).unflatten(1, features.shape[-2:])

    def encode(self, patches: Tensor) -> BlockOutput:
        grid = (patches.shape[1], patches.shape[2])
        tokens = self._tokens(patches.flatten(1, 2), grid)
        with self._at_size(grid):
            for block, arguments in zip(self.net.blocks, self._arguments(grid), strict=True):
                tokens = self.run_block(block, tokens, **arguments)
        return self._split(tokens, grid)

    def encode_at(self, patches: Tensor, positions: Tensor) -> Tensor:
        """What :meth:`encode` gives for [CLS] and some patches, without the last block's work on the others.

        Args:
            patches: (B, h, w, D) embedded.
            positions: (M,) int64 into the B * h * w patches; padding may repeat one, and M may be 0.

        Returns:
            (B + M, D): [CLS] of all images, then the patches; not normed, gradients flow. The network has a [CLS].
        """
        grid = (patches.shape[1], patches.shape[2])
        tokens = self._tokens(patches.flatten(1, 2), grid)
        rows = rows_of(positions, grid[0] * grid[1], 1 + self.num_registers, len(patches))
        arguments = self._arguments(grid)
        with self._at_size(grid):
            for block, keywords in zip(self.net.blocks[:-1], arguments[:-1], strict=True):
                tokens = self.run_block(block, tokens, **keywords)
            return self.run_block(partial(block_at, self.net.blocks[-1]), tokens, rows=rows, **arguments[-1])

    def _split(self, tokens: Tensor, grid: Grid) -> BlockOutput:
        first, prefix = int(self.has_cls), int(self.has_cls) + self.num_registers
        patches = tokens[:, prefix:]
        cls = tokens[:, 0] if self.has_cls else patches.mean(dim=1)
        return BlockOutput(cls, tokens[:, first:prefix], patches.unflatten(1, grid))

    def _positions(self, grid: Grid) -> Tensor | None:
        """Stored position embeddings at this grid, (1, P + h*w, D); P embeddings of prefix tokens stay as they are."""
        stored = self.net.pos_embed
        if stored is None or grid == self.trained_grid:
            return stored
        prefix = stored.shape[1] - self.trained_grid[0] * self.trained_grid[1]

        def compute() -> Tensor:
            table = stored[:, prefix:].unflatten(1, self.trained_grid)
            return _join(stored[:, :prefix], resize_positions(table, grid, self.resize).flatten(1, 2))

        if not self.keep_positions:
            return compute()
        return self._sizes.get(stored, grid, compute)

    def _prefixed(self, patches: Tensor, tokens: Sequence[Tensor | None], grid: Grid) -> Tensor:
        """Patches after their prefix tokens, positions added to whichever of them the network stores some for."""
        prefix = [token.expand(len(patches), -1, -1) for token in tokens if token is not None]
        positions = self._positions(grid)
        if positions is None:
            return _join(*prefix, patches)
        if positions.shape[1] == patches.shape[1]:
            return _join(*prefix, patches + positions)
        return _join(*prefix, patches) + positions


def field_name(width: int, depth: int, patch: int, registers: int = 0) -> str:
    """``vit-s/16``, ``vit-b/14+4`` with four registers; ``vit-48x4/8`` (width x depth) where the field has no name."""
    sizes = {
        (192, 12): "ti",
        (384, 12): "s",
        (768, 12): "b",
        (1024, 24): "l",
        (1280, 32): "h",
        (1536, 40): "g",
        (4096, 40): "7b",
    }
    name = f"vit-{sizes.get((width, depth), f'{width}x{depth}')}/{patch}"
    return f"{name}+{registers}" if registers else name


def _join(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
