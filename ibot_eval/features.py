"""Atomic outputs, requests for them, and the banks that hold them.

A bank holds one atomic output of one split: (transform, block, norm, reducer). Pooling such as 'last four blocks
concatenated' is composed from atoms when scoring (:func:`compose`), so that protocols share extractions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ibot_eval.backbone import Norm
from ibot_eval.errors import ConfigError

Split = Literal["train", "test"]

REDUCERS: dict[str, str] = {
    "cls": "[CLS] token, (n, D) float32",
    "patch_mean": "mean of the patch tokens, (n, D) float32",
    "norm_patch_mean": "last norm of the mean of the raw patch tokens, (n, D) float32; the request's norm is ignored",
    "gem:P": "generalised mean of the patch tokens with power P, (n, D) float32",
    "topk:K": "mean of the K patch tokens with the largest [CLS] attention (mean over heads), (n, D) float32",
    "norm_topk:K": "last norm of the mean of the K raw patch tokens with the largest [CLS] attention, (n, D) float32; "
    "the request's norm is ignored, as in the next two",
    "norm_bottomk:K": "the same of the K with the smallest attention: those that norm_topk leaves out at N - K",
    "norm_randomk:K": "the same of K patches drawn for each image; a larger K adds to those of a smaller one",
    "head_argmax": "index of the largest output of the projection head on [CLS], (n,) int64",
    "patches": "all patch tokens, (n, h, w, D) float16",
}


def parse_reducer(reducer: str) -> tuple[str, float | None]:
    """``"gem:4"`` -> ``("gem", 4.0)``; ``"cls"`` -> ``("cls", None)``. Raises ConfigError for any other text."""
    match = re.fullmatch(r"(gem|topk|norm_topk|norm_bottomk|norm_randomk):(\d+(?:\.\d+)?)", reducer)
    if match and float(match[2]) > 0 and (match[1] == "gem" or float(match[2]).is_integer()):
        return match[1], float(match[2])
    if reducer in REDUCERS and ":" not in reducer:
        return reducer, None
    raise ConfigError(f"unknown reducer {reducer!r}", todo="use one of " + ", ".join(REDUCERS))


@dataclass(frozen=True)
class FeatureRequest:
    """One atomic output of one split."""

    split: Split
    block: int = -1
    """Index of the block; negative counts from the last."""
    norm: Norm = "published"
    reducer: str = "cls"
    """A key of ``REDUCERS``, its parameter filled in (``gem:4``)."""
    optional: bool = field(default=False, compare=False)
    """Whether the protocol can do without it where the network does not have it (a checkpoint without a projection
    head): then there is no bank for it, and ``Session.unavailable`` says why."""

    def __post_init__(self) -> None:
        parse_reducer(self.reducer)


@dataclass(frozen=True)
class FeatureBank:
    """One atomic output of one split, in the split's order."""

    features: np.ndarray
    """(n, …), memory-mapped when it comes from the cache; shape and dtype as ``REDUCERS`` says."""
    labels: np.ndarray
    """(n,) int64; -1 where unlabelled."""
    image_ids: Sequence[str]
    """n unique names (relative paths)."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """What the bank was made from; empty for synthetic banks."""

    def __post_init__(self) -> None:
        if not len(self.features) == len(self.labels) == len(self.image_ids):
            raise ValueError(
                f"a bank needs equally many features, labels and ids: {len(self.features)}, {len(self.labels)}, "
                f"{len(self.image_ids)}"
            )

    def __len__(self) -> int:
        return len(self.labels)


def compose(banks: Mapping[FeatureRequest, FeatureBank], requests: Sequence[FeatureRequest]) -> np.ndarray:
    """Features of several atoms of one split, concatenated along the last axis: (n, sum of widths) float32.

    A single atom is returned as it is, memory-mapped; nothing is copied.
    """
    parts = [banks[request] for request in requests]
    if len({tuple(p.image_ids) for p in parts}) > 1:
        raise ValueError("atoms of different images cannot be concatenated")
    if len(parts) == 1:
        return parts[0].features
    return np.concatenate([p.features for p in parts], axis=-1)
