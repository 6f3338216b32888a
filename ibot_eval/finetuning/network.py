"""The network that fine-tuning trains: a backbone, projection layers where asked for, and a linear head."""

from __future__ import annotations

import copy
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ibot_eval.backbone import Backbone
from ibot_eval.checkpoint import LoadedCheckpoint
from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.adaptation import (
    add_layer_scale,
    add_relative_positions,
    at_size,
    set_drop_path,
    set_pooling,
)
from ibot_eval.finetuning.layer_decay import NET, OF_ALL_BLOCKS, layer_of
from ibot_eval.heads import ProjectionHead
from ibot_eval.models import SwinBackbone
from ibot_eval.models.transformer import TransformerBackbone

Pooling = Literal["cls", "mean"]
Positions = Literal["absolute", "relative"]

HEAD_STD = 0.02
"""Of the normal distribution that the head's weights are drawn from, before ``head_scale``."""


class Classifier(nn.Module):
    """A backbone and a linear head, trained end to end.

    Args:
        backbone: a ViT family's or a Swin.
        head: takes the width of the backbone, or of the projection layers.
        projection: the first layers of a projection head, between the two.
        pooling: "cls" puts the last norm on [CLS]; "mean" takes the mean of the patches after the last block, and then
            the last norm. A Swin has one way only: the last norm, then the mean.
    """

    def __init__(
        self, backbone: Backbone, head: nn.Linear, *, projection: nn.Sequential | None = None, pooling: Pooling = "cls"
    ) -> None:
        super().__init__()
        self.backbone, self.projection, self.head = backbone, projection, head
        self.pooling: Pooling = "mean" if isinstance(backbone, SwinBackbone) else pooling

    @property
    def classes(self) -> int:
        return self.head.out_features

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W), normalised with the backbone's ``mean`` and ``std`` -> logits (B, classes)."""
        features = self.features(images)
        return self.head(features if self.projection is None else self.projection(features))

    def features(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> pooled features (B, D), the input of the projection layers or the head."""
        backbone, patches = self.backbone, self.backbone.embed(images)
        if isinstance(backbone, SwinBackbone):
            return backbone.final_norm(backbone.encode(patches).patches).mean(dim=(1, 2))
        if self.pooling == "mean":
            return backbone.final_norm(backbone.encode(patches).patches.mean(dim=(1, 2)))
        # No patch token is wanted, which spares the last block most of its work.
        nothing = torch.empty(0, dtype=torch.int64, device=images.device)
        return backbone.final_norm(cast(TransformerBackbone, backbone).encode_at(patches, nothing))


def build_classifier(
    loaded: LoadedCheckpoint,
    classes: int,
    image_size: int,
    *,
    pooling: Pooling = "cls",
    drop_path: float = 0.0,
    head_scale: float = 0.001,
    layer_scale: float | None = None,
    positions: Positions = "absolute",
    head_layers: int = 0,
    freeze_blocks: int = 0,
    allow_finetuned: bool = False,
    keep_head: bool = False,
    seed: int = 0,
) -> Classifier:
    """A network to fine-tune, from a checkpoint, which is left as it is; float32, on the checkpoint's device.

    Args:
        loaded: the checkpoint.
        classes: of the new head.
        image_size: side in pixels of the images trained on. Positions are resized to it once, as the family does, and
            trained at that size.
        pooling: see :class:`Classifier`. The last norm keeps the checkpoint's values wherever it stands; BEiT's code
            starts a new one where the norm moves behind the mean.
        drop_path: stochastic depth of the last block; it grows linearly from 0 at the first (through all stages of a
            Swin).
        head_scale: factor of the new head's initial values: weights from a normal distribution of deviation 0.02 cut
            off at 2, biases 0 (BEiT).
        layer_scale: initial LayerScale of every block, where the network has none; None or 0 adds none.
        positions: "absolute" leaves the network's positions as they are. "relative" gives every block a relative
            position bias of its own, from 0, or from the one that all blocks shared, as BEiT's code does; networks
            that have some in every block keep them.
        head_layers: how many layers of the checkpoint's projection head to train between backbone and head.
        freeze_blocks: how many of the first blocks, and with them the embedding and what all blocks share, are not
            trained.
        allow_finetuned: whether a checkpoint that has a classifier already may be fine-tuned further.
        keep_head: start from that classifier instead of a new one.
        seed: of the new head.

    Raises:
        ConfigError: the checkpoint has a classifier and that is not allowed, the network cannot be trained or changed
            as asked, or a setting is out of its range.
    """
    if loaded.classifier is not None and not allow_finetuned:
        raise ConfigError(
            "the checkpoint has a classifier: it was fine-tuned or probed with labels already",
            where=loaded.report.reference,
            todo="--from-finetuned fine-tunes it further; for a result of self-supervision give the pre-trained file",
        )
    if not isinstance(loaded.backbone, (TransformerBackbone, SwinBackbone)):
        raise ConfigError(
            f"{loaded.backbone.architecture} cannot be fine-tuned here", todo="choose a ViT, BEiT or Swin checkpoint"
        )
    if not 0 <= freeze_blocks <= loaded.backbone.depth:
        raise ConfigError(
            f"{freeze_blocks} blocks cannot be frozen: {loaded.backbone.architecture} has {loaded.backbone.depth}",
            todo=f"--freeze-blocks 0 to {loaded.backbone.depth}",
        )
    backbone = at_size(copy.deepcopy(loaded.backbone), image_size)
    if positions == "relative":
        backbone = add_relative_positions(backbone)
    backbone = set_pooling(backbone, pooling)
    if layer_scale:
        add_layer_scale(backbone, layer_scale)
    set_drop_path(backbone, drop_path)
    backbone.keep_positions = False
    projection = _projection(loaded.projection_head, head_layers)
    width = backbone.dims[-1] if projection is None else _output_width(projection)
    head = _kept_head(loaded, classes, width) if keep_head else new_head(width, classes, head_scale, seed)
    classifier = Classifier(backbone, head, projection=projection, pooling=pooling)
    classifier.to(next(backbone.parameters()).device).requires_grad_(True).train()
    for name, parameter in classifier.named_parameters():
        # What a frozen block shares with others would change what it computes.
        shared = OF_ALL_BLOCKS.match(name.removeprefix(NET))
        if freeze_blocks and (shared or layer_of(backbone, name) <= freeze_blocks):
            parameter.requires_grad_(False)
    return classifier


def new_head(width: int, classes: int, scale: float, seed: int) -> nn.Linear:
    """A linear head as BEiT's code starts it; see :func:`build_classifier`."""
    head = cast(nn.Linear, nn.utils.skip_init(nn.Linear, width, classes))
    nn.init.trunc_normal_(head.weight, std=HEAD_STD, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        head.weight.mul_(scale)
        head.bias.zero_()
    return head


def _kept_head(loaded: LoadedCheckpoint, classes: int, width: int) -> nn.Linear:
    old = loaded.classifier
    if not isinstance(old, nn.Linear) or old.in_features != width or old.out_features != classes:
        found = "none" if old is None else f"{(loaded.report.classifier or {}).get('classes')} classes"
        shape = f", {old.in_features} wide" if isinstance(old, nn.Linear) else ""
        raise ConfigError(
            f"the checkpoint's classifier ({found}{shape}) cannot be kept for {classes} classes on features {width} "
            "wide",
            todo="leave --keep-head out to start a new head",
        )
    head = cast(nn.Linear, nn.utils.skip_init(nn.Linear, width, classes))
    with torch.no_grad():
        head.weight.copy_(old.weight)
        head.bias.zero_() if old.bias is None else head.bias.copy_(old.bias)
    return head


def _projection(head: ProjectionHead | None, layers: int) -> nn.Sequential | None:
    """The first ``layers`` layers of a projection head, each with its norm and GELU; a copy."""
    if layers == 0:
        return None
    if head is None:
        raise ConfigError(
            "the checkpoint holds no projection head to start from",
            todo="give the whole training file, or --from-head-layer 0 for the backbone alone",
        )
    starts = [index for index, layer in enumerate(head.mlp) if isinstance(layer, nn.Linear)]
    if not 0 < layers < len(starts):
        raise ConfigError(
            f"{layers} layers of the projection head are asked for; it has {len(starts) - 1} hidden ones",
            todo=f"--from-head-layer 0 to {len(starts) - 1}",
        )
    return copy.deepcopy(head.mlp[: starts[layers]])


def _output_width(layers: nn.Sequential) -> int:
    return [layer for layer in layers if isinstance(layer, nn.Linear)][-1].out_features
