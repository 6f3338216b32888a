"""The Backbone contract: what every protocol may ask of a network, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ibot_eval.errors import ConfigError

Norm = Literal["final", "none", "published"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class BlockOutput(NamedTuple):
    """Tokens after one block, for a batch of B images cut into h x w patches."""

    cls: Tensor
    """(B, D). The mean of the patch tokens where a model has no [CLS] token."""
    registers: Tensor
    """(B, R, D); R may be 0."""
    patches: Tensor
    """(B, h, w, D), rows first."""


class Outputs(NamedTuple):
    """What one forward pass gives."""

    blocks: tuple[BlockOutput, ...]
    """One per block asked for, in the order asked."""
    attention: Tensor | None
    """(B, heads, T, T) softmax weights of the block asked for, rows summing to 1; None when not asked.
    T = C + R + h * w, C being 1 with a [CLS] token and 0 without: the order is [CLS], registers, patches."""


class Backbone(nn.Module, ABC):
    """A network that turns images into tokens.

    Sub-classes set the attributes below in ``__init__`` and implement :meth:`outputs` and :meth:`final_norm`.
    """

    depth: int
    """Number of blocks."""
    num_heads: int
    """Attention heads of the last block; 0 for networks without attention."""
    patch_size: int
    """Pixels per token at the last block; image height and width must be multiples of it."""
    num_registers: int
    has_cls: bool
    has_patches: bool = True
    """False where ``patches`` comes out empty, (B, 0, 0, D): a module of the user's own that returns features only."""
    dims: tuple[int, ...]
    """Width of each block's output, length ``depth``."""
    architecture: str
    """Short field name such as ``vit-s/16``, ``swin-t/7``, ``resnet50``."""
    family: str
    """Whose published habits apply: ibot, dino, dinov2, dinov3, beit, mae, mocov3, deit, hf-vit, swin, resnet …"""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    @abstractmethod
    def outputs(
        self,
        images: Tensor,
        blocks: Sequence[int] = (-1,),
        norm: Norm = "published",
        attention_block: int | None = None,
    ) -> Outputs:
        """One pass over ``images``.

        Args:
            images: (B, 3, H, W) float, normalised with ``mean`` and ``std``; H and W multiples of ``patch_size``.
            blocks: indices of blocks, negative ones counting from the last.
            norm: "final" applies the network's last norm to every block asked for, "none" to none of them, and
                "published" does what the family's published evaluation does.
            attention_block: also return this block's attention.

        Raises:
            ConfigError: a block out of range, a size that the patch does not divide, or attention asked of a
                network that has none over the whole image.
        """

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) as embedded patches (B, h, w, D), before positions and blocks.

        Where a patch may be masked: ``encode(embed(images))`` is the whole network but its last norm. Only trainable
        families (ViT, Swin) have the two.
        """
        raise NotImplementedError(f"{self.architecture} cannot be trained here")

    def encode(self, patches: Tensor) -> BlockOutput:
        """Embedded patches (B, h, w, D) through all blocks; not normed, gradients flow."""
        raise NotImplementedError(f"{self.architecture} cannot be trained here")

    keep_positions: bool = True
    """Whether positions resized for another image size are kept. Off in training, where the weights change with every
    step, and comparing them with those that were kept would wait for the device."""
    checkpoint_blocks: bool = False
    """Whether training recomputes each block in the backward pass instead of keeping its activations."""

    def run_block(self, block: Callable[..., Tensor], tokens: Tensor, **arguments: Any) -> Tensor:
        """One block, for :meth:`encode`."""
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return checkpoint(block, tokens, use_reentrant=False, **arguments)  # type: ignore[return-value]
        return block(tokens, **arguments)

    @abstractmethod
    def final_norm(self, tokens: Tensor) -> Tensor:
        """The network's last norm applied to tokens (…, dims[-1]); the identity where it has none.

        Serves 'norm of the patch mean' (mean first, then norm).
        """

    def published_norm(self, block: int) -> Literal["final", "none"]:
        """What ``norm="published"`` does to ``block`` (an index from 0); :meth:`outputs` must agree.

        Here: every block as wide as the last goes through the last norm (ViT families; of a Swin, the last stage).
        Families with another habit override this.
        """
        return "final" if self.dims[block] == self.dims[-1] else "none"

    def apply_norm(self, raw: BlockOutput, block: int, norm: Norm) -> BlockOutput:
        """What :meth:`outputs` would give for ``norm``, from what it gave for ``"none"``.

        It lets one pass serve requests of several norms.

        Args:
            raw: output of ``block`` with norm "none".
            block: index from 0.

        Raises:
            ConfigError: norm "final" for a block of another width than the last.
        """
        if (self.published_norm(block) if norm == "published" else norm) == "none":
            return raw
        if self.dims[block] != self.dims[-1]:
            raise ConfigError(
                f"block {block} of {self.architecture} is {self.dims[block]} wide and the last norm {self.dims[-1]}: "
                "it cannot be normalised",
                todo='use norm "published" or "none"',
            )
        patches = self.final_norm(raw.patches)
        cls = self.final_norm(raw.cls) if self.has_cls else patches.mean(dim=(1, 2))
        return BlockOutput(cls, self.final_norm(raw.registers), patches)

    def resolve_block(self, block: int) -> int:
        """``block`` as an index from 0; raises ConfigError naming the range when it is outside."""
        index = block + self.depth if block < 0 else block
        if not 0 <= index < self.depth:
            raise ConfigError(
                f"block {block} does not exist: {self.architecture} has {self.depth} blocks",
                todo=f"use 0 to {self.depth - 1}, or -1 to -{self.depth} counting from the last",
            )
        return index

    def check_size(self, height: int, width: int) -> None:
        """Raises ConfigError unless ``patch_size`` divides ``height`` and ``width`` (pixels)."""
        p = self.patch_size
        if height % p or width % p or not height or not width:
            near = sorted({max(p, height // p * p), (height // p + 1) * p})
            raise ConfigError(
                f"an image of {height}x{width} pixels cannot be cut into patches of {p}: {self.architecture} needs "
                f"multiples of {p}",
                todo=f"choose a crop such as {' or '.join(map(str, near))} (--crop)",
            )
