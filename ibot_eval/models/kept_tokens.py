"""A ViT that sees some of an image's patches only: the others are taken out of its sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ibot_eval.backbone import Backbone, BlockOutput, Norm, Outputs
from ibot_eval.errors import ConfigError
from ibot_eval.models.vit import ViTBackbone


class KeptTokens(Backbone):
    """``whole``, whose weights are shared; within :meth:`keeping` it drops patch tokens after positions were added.

    Outside of it the outputs are those of ``whole``. Within, the patches of an output are (B, 1, K, D), K being the
    largest number of kept ones: images with fewer have the mean of their own in the places that are left, so that a
    mean over all is that of the kept.

    Raises:
        ConfigError: a network other than a plain ViT.
    """

    def __init__(self, whole: Backbone) -> None:
        super().__init__()
        if not isinstance(whole, ViTBackbone):
            raise ConfigError(
                f"tokens cannot be taken out of {whole.architecture}: only a plain ViT does without some patches",
                where="--drop tokens",
                todo="use --drop pixels",
            )
        self.whole = whole
        self.depth, self.num_heads, self.dims = whole.depth, whole.num_heads, whole.dims
        self.patch_size, self.has_cls, self.num_registers = whole.patch_size, whole.has_cls, whole.num_registers
        self.architecture, self.family, self.mean, self.std = whole.architecture, whole.family, whole.mean, whole.std
        # What else is asked of a ViT.
        self.trained_grid, self.resize, self.mean_pooled = whole.trained_grid, whole.resize, whole.mean_pooled
        self._kept: Tensor | None = None

    @contextmanager
    def keeping(self, kept: Tensor) -> Iterator[None]:
        """While it lasts, patches are dropped where ``kept`` is False.

        Args:
            kept: (B, h * w) bool, of the B images that :meth:`outputs` is then given.
        """
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None

    def final_norm(self, tokens: Tensor) -> Tensor:
        return self.whole.final_norm(tokens)

    def outputs(
        self,
        images: Tensor,
        blocks: Sequence[int] = (-1,),
        norm: Norm = "published",
        attention_block: int | None = None,
    ) -> Outputs:
        """As :meth:`Backbone.outputs`.

        Raises:
            ConfigError: attention is asked for while tokens are dropped.
        """
        if self._kept is None:
            return self.whole.outputs(images, blocks, norm, attention_block)
        if attention_block is not None:
            raise ConfigError(
                "features that are ranked by attention do not exist where tokens are dropped",
                where="--drop tokens",
                todo="use --drop pixels, or a head that takes [CLS] or the mean of the patches",
            )
        self.check_size(images.shape[-2], images.shape[-1])
        wanted = [self.resolve_block(block) for block in blocks]
        tokens, real = self._sequence(images, self._kept)
        mask = None if real is None else real[:, None, None]
        found: dict[int, BlockOutput] = {}
        for index in range(max(wanted) + 1):
            block = self.whole.net.blocks[index]
            tokens = block(tokens) if mask is None else block(tokens, attn_mask=mask)
            if index in wanted:
                found[index] = self._split(tokens if norm == "none" else self.final_norm(tokens), real)
        return Outputs(tuple(found[index] for index in wanted), None)

    @property
    def _prefix(self) -> int:
        return int(self.has_cls) + self.num_registers

    def _sequence(self, images: Tensor, kept: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, P + K, D) prefix tokens and kept patches, in their order; and which are real, None for all."""
        patches = self.whole.embed(images)
        tokens = self.whole._tokens(patches.flatten(1, 2), (patches.shape[1], patches.shape[2]))
        counts = kept.sum(1)
        fewest, most = (int(n) for n in torch.stack([counts.min(), counts.max()]))
        order = kept.long().argsort(dim=1, descending=True, stable=True)[:, :most] + self._prefix
        first = torch.arange(self._prefix, device=order.device).expand(len(order), -1)
        order = torch.cat([first, order], dim=1)
        tokens = tokens.gather(1, order[:, :, None].expand(-1, -1, tokens.shape[-1]))
        if fewest == most:
            return tokens, None
        return tokens, torch.arange(tokens.shape[1], device=order.device) < self._prefix + counts[:, None]

    def _split(self, tokens: Tensor, real: Tensor | None) -> BlockOutput:
        patches = tokens[:, self._prefix :]
        if real is not None:
            own = real[:, self._prefix :, None]
            mean = (patches * own).sum(1, keepdim=True) / own.sum(1, keepdim=True)
            patches = torch.where(own, patches, mean.to(patches.dtype))
        cls = tokens[:, 0] if self.has_cls else patches.mean(dim=1)
        return BlockOutput(cls, tokens[:, int(self.has_cls) : self._prefix], patches[:, None])
