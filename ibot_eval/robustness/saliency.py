"""Where the [CLS] token of a network looks: what salient and non-salient patches are told by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ibot_eval import distributed
from ibot_eval.cache import BankCache
from ibot_eval.checkpoint import load_checkpoint
from ibot_eval.data.transforms import Triple
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.image_pass import evaluating
from ibot_eval.robustness.masking import resampled
from ibot_eval.settings import CheckpointSettings

if TYPE_CHECKING:
    from ibot_eval.backbone import Backbone
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.protocol import Session

SaliencyHead = Literal["mean"] | int


@dataclass(frozen=True)
class Saliency:
    """The attention of [CLS] in the last block of one network."""

    network: Backbone
    head: SaliencyHead
    """mean of all heads, or one of them from 0."""
    name: str
    """What records call the network."""
    mean: Triple
    std: Triple
    """What the images that it is given are normalised with; the network may want another normalisation."""
    side: int
    """Of those images, in pixels."""
    grid: tuple[int, int]
    """Of the squares that are dropped."""

    @property
    def own_side(self) -> int:
        """Side in pixels of what the network looks at: the nearest to ``side`` that its patches divide."""
        patch = self.network.patch_size
        return max(1, (2 * self.side + patch) // (2 * patch)) * patch

    @property
    def note(self) -> str | None:
        """What a reader should know where the network's patches are not the squares that are dropped."""
        own, patch = self.own_side // self.network.patch_size, self.network.patch_size
        if self.own_side == self.side and (own, own) == self.grid:
            return None
        resized = f", of images resized to {self.own_side} pixels," if self.own_side != self.side else ""
        return (
            f"the saliency network {self.name} has patches of {patch} pixels: its {own}x{own} attention{resized} is "
            f"resampled to the {self.grid[0]}x{self.grid[1]} squares that are dropped"
        )

    def attention(self, images: Tensor) -> Tensor:
        """(B, rows, columns) float32, not negative: the attention of each square of ``grid``.

        In float32 whatever the precision of the run: thresholds of its sums must not depend on that.

        Args:
            images: (B, 3, side, side) float32, normalised with ``mean`` and ``std``.

        Raises:
            DataError: attention that is not finite.
        """
        images = _renormalised(images, (self.mean, self.std), (self.network.mean, self.network.std))
        if self.own_side != self.side:
            size = (self.own_side, self.own_side)
            images = torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True)
        with evaluating(self.network):
            weights = self.network.outputs(images, (), attention_block=-1).attention
        assert weights is not None
        rows = self.own_side // self.network.patch_size
        cls = weights[:, :, 0, -rows * rows :].float()
        chosen = cls.mean(1) if self.head == "mean" else cls[:, self.head]
        if not torch.isfinite(chosen).all():
            raise DataError(
                f"the attention of the saliency network {self.name} is NaN or infinite",
                todo="look at the checkpoint with `ibot-eval inspect`",
            )
        return resampled(chosen.unflatten(1, (rows, rows)), *self.grid)


def check_saliency(network: Backbone, head: SaliencyHead, where: str) -> None:
    """Raises ConfigError for a network without [CLS] attention, or a head that it does not have.

    Args:
        where: the flag that named the network.
    """
    if not (network.has_cls and network.num_heads):
        raise ConfigError(
            f"{network.architecture} has no attention of a [CLS] token, which tells salient patches from others",
            where=where,
            todo="name a ViT that looks in its place (--saliency-ckpt), or drop at random only (--kinds random)",
        )
    if head != "mean" and not 0 <= head < network.num_heads:
        raise ConfigError(
            f"head {head} does not exist: the last block of {network.architecture} has {network.num_heads}",
            where="--saliency-head",
            todo=f"use 0 to {network.num_heads - 1}, or mean",
        )


def open_saliency(
    session: Session, ckpt: str | None, key: str | None, head: SaliencyHead, grid: tuple[int, int]
) -> Saliency:
    """The network that ``ckpt`` names, or without one the network under test.

    Args:
        session: with a transform, an engine and a loaded checkpoint.
        ckpt, key: as --ckpt and --key.
        head: mean or 0 to H - 1.
        grid: rows and columns of the squares that are dropped.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it has no [CLS] attention, or not that head.
    """
    transform: EvalTransform | None = session.transform
    assert transform is not None
    assert session.engine is not None
    assert session.loaded is not None
    if ckpt is None:
        network, name, where = session.loaded.backbone, "under test", "--ckpt"
    else:
        settings: Any = CheckpointSettings(ckpt=ckpt, key=key)
        hashed, seed = BankCache(session.engine.cache).remembered_sha256, session.seed
        loaded = distributed.everywhere(lambda: load_checkpoint(settings, sha256=hashed, seed=seed))
        network, where = loaded.backbone.to(session.device), "--saliency-ckpt"
        name = f"{network.architecture} {loaded.report.sha256[:8]}"
    check_saliency(network, head, where)
    return Saliency(network, head, name, transform.mean, transform.std, transform.crop, grid)


def _renormalised(images: Tensor, old: tuple[Triple, Triple], new: tuple[Triple, Triple]) -> Tensor:
    if old == new:
        return images
    old_mean, old_std, mean, std = (images.new_tensor(list(v)).view(3, 1, 1) for pair in (old, new) for v in pair)
    return (images * old_std + (old_mean - mean)) / std
