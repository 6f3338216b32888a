"""Where the targets of patch tokens come from: the teacher itself, or a frozen checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ibot_eval.checkpoint import LoadedCheckpoint
from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.blueprint import Triple
from pretrain.networks import Network, Tokens, prototypes


class PatchOutputs(NamedTuple):
    """A tokenizer's view of patches, before the last layer, which is linear: logits are formed only where wanted."""

    bottleneck: Tensor
    """(n, N, bottleneck), of length 1."""
    layer: nn.Module
    """Bottleneck -> K logits."""

    def logits_at(self, positions: Tensor) -> Tensor:
        """(M, K) float32 at flat positions (M,) into the n * N patches."""
        return prototypes(self.layer, self.bottleneck.flatten(0, 1).index_select(0, positions))

    def mean(self) -> Tensor:
        """(K,) mean of the logits of all patches: the last layer of the mean bottleneck."""
        return prototypes(self.layer, self.bottleneck.float().mean((0, 1)))


class Tokenizer(ABC):
    """Gives every patch of a view a distribution over K visual words."""

    num_words: int
    """K."""

    @abstractmethod
    def patches(self, images: Tensor, teacher: Tokens) -> PatchOutputs:
        """
        Args:
            images: (n, 3, H, W) unmasked views.
            teacher: the teacher's tokens of them.
        """


class OnlineTokenizer(Tokenizer):
    """The teacher (iBOT section 3.2)."""

    def __init__(self, teacher: Network) -> None:
        self.head = teacher.head
        self.num_words = self.head.patch_prototypes

    def patches(self, images: Tensor, teacher: Tokens) -> PatchOutputs:
        return PatchOutputs(self.head.bottleneck_patches(teacher.patches), self.head.patch_layer)


class FrozenTokenizer(Tokenizer):
    """A checkpoint with a projection head, such as DINO's (iBOT Table 9, standalone DINO).

    Args:
        loaded: backbone and head; moved to ``device``.
        device: where it computes.
        mean, std: what the images that come here are normalised with.

    Raises:
        CheckpointError: no projection head, or a network without patch tokens.
    """

    def __init__(self, loaded: LoadedCheckpoint, device: torch.device, mean: Triple, std: Triple) -> None:
        if loaded.projection_head is None or not loaded.backbone.has_patches:
            raise CheckpointError(
                "the tokenizer has no projection head, so it gives patches no distribution",
                where=loaded.report.reference,
                todo="give a checkpoint that kept its head (DINO's and iBOT's full checkpoints do)",
            )
        self.backbone, self.head = loaded.backbone.to(device), loaded.projection_head.to(device)
        self.num_words = self.head.patch_prototypes
        self.backbone.keep_positions = False
        # x std + mean are the pixels, and (pixels - own mean) / own std what this network was trained on.
        own = self.backbone
        self.scale = [s / o for s, o in zip(std, own.std, strict=True)]
        self.offset = [(m - p) / o for m, p, o in zip(mean, own.mean, own.std, strict=True)]
        self.cell = self.backbone.patch_size
        """Side in pixels of a patch."""

    def patches(self, images: Tensor, teacher: Tokens) -> PatchOutputs:
        if any(s != 1 for s in self.scale) or any(self.offset):
            channels = zip(images.unbind(1), self.scale, self.offset, strict=True)
            images = torch.stack([channel * scale + offset for channel, scale, offset in channels], 1)
        tokens = self.backbone.outputs(images, norm="final").blocks[0].patches.flatten(1, 2)
        return PatchOutputs(self.head.bottleneck_patches(tokens), self.head.patch_layer)
