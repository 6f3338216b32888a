"""Which features of a network its family's publications classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.features import FeatureRequest, Split

Features = Literal["published", "last4", "cls+patch_mean", "cls", "patch_mean", "norm_patch_mean"]

REDUCERS: dict[Features, tuple[str, ...]] = {
    "last4": ("cls",),
    "cls+patch_mean": ("cls", "patch_mean"),
    "cls": ("cls",),
    "patch_mean": ("patch_mean",),
    "norm_patch_mean": ("norm_patch_mean",),
}
WIDE = 768
"""Width from which iBOT and DINO classify the last block alone, with the mean of its patch tokens."""
LAST_BLOCK_ONLY = frozenset({"mae", "mocov3", "deit", "supervised", "beit", "resnet", "module"})
"""Families that classify the last block's [CLS] token (or pooled output)."""


def published_features(backbone: Backbone) -> Features:
    """The habit of the network's family.

    iBOT and DINO (and other plain ViTs with a [CLS] token): narrower than 768 the [CLS] tokens of the last four
    blocks, else [CLS] and patch mean of the last. Swin: the pooled output of the last four blocks. All others: the
    [CLS] token, or pooled output, of the last block.
    """
    if backbone.architecture.startswith("swin"):
        return "last4"
    if backbone.family in LAST_BLOCK_ONLY or not (backbone.has_cls and backbone.has_patches):
        return "cls"
    return "last4" if backbone.dims[-1] < WIDE else "cls+patch_mean"


def resolve_features(
    features: Features, blocks: Sequence[int] | None, backbone: Backbone
) -> tuple[Features, tuple[int, ...]]:
    """``features`` and ``blocks`` spelled out for this network: never "published", never None.

    Raises:
        ConfigError: a block that does not exist or is named twice.
    """
    if features == "published":
        features = published_features(backbone)
    if blocks is None:
        return features, default_blocks(features, backbone.depth)
    check_blocks(blocks)
    if len({backbone.resolve_block(block) for block in blocks}) < len(blocks):
        raise ConfigError(
            f"--blocks names a block twice: {', '.join(map(str, blocks))} of {backbone.depth}",
            where="--blocks",
            todo="name each block once; -1 is the last",
        )
    return features, tuple(blocks)


def default_blocks(features: Features, depth: int | None = None) -> tuple[int, ...]:
    """The last four blocks (or all, where there are fewer) for "last4", else the last."""
    if features not in ("last4", "published"):
        return (-1,)
    return tuple(range(-min(4, depth or 4), 0))


def check_blocks(blocks: Sequence[int] | None) -> None:
    """Raises ConfigError for no block at all, or one named twice."""
    if blocks is not None and (not blocks or len(set(blocks)) < len(blocks)):
        given = ", ".join(map(str, blocks)) or "none"
        raise ConfigError(f"blocks must be different, and at least one; given: {given}", where="--blocks")


def feature_requests(split: Split, features: Features, blocks: Sequence[int] | None = None) -> list[FeatureRequest]:
    """The atoms to concatenate, in order: block by block, [CLS] before the patch mean.

    Args:
        features, blocks: as :func:`resolve_features` gives them. Unresolved ones stand for a ViT narrower than 768.
    """
    reducers = REDUCERS["last4" if features == "published" else features]
    blocks = default_blocks(features) if blocks is None else blocks
    return [FeatureRequest(split, block, reducer=reducer) for block in blocks for reducer in reducers]


def head_features(requests: Sequence[FeatureRequest]) -> list[dict[str, Any]]:
    """``requests`` as a saved head describes what it takes: block, norm and reducer of each part."""
    return [{"block": r.block, "norm": r.norm, "reducer": r.reducer} for r in requests]
