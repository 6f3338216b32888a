"""Which patch of another picture is most like this one (iBOT's figure 19)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from ibot_eval import reducers
from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.image_pass import evaluating
from ibot_eval.visual.attention import explain_no_attention
from ibot_eval.visual.pictures import Picture

Similarity = Literal["dot", "cosine"]

TOP = 12
"""Matches that the published figure draws."""


@dataclass(frozen=True)
class Tokens:
    """Patch tokens of one picture."""

    tokens: np.ndarray
    """(h, w, D) float32."""
    attention: np.ndarray | None
    """(h, w) float32, what [CLS] of the last block gives each patch, the mean over heads; None where there is none."""
    grid: tuple[int, int] | None = None
    """Rows and columns of patches of the picture; None where they are those of ``tokens``."""


@dataclass(frozen=True)
class Matches:
    """Pairs of patches, a row each; every left patch has at most one."""

    left: np.ndarray
    """(M, 2) int64, row and column."""
    right: np.ndarray
    """(M, 2) int64."""
    scores: np.ndarray
    """(M,) float32."""
    attention: np.ndarray | None
    """(M,) float32, of the left patch."""
    errors: np.ndarray | None = None
    """(M,) float64, distance of the right patch from the true place, in patches of the right picture; NaN where the
    place lies outside of it. None where the geometry is not known."""

    def __len__(self) -> int:
        return len(self.left)

    def take(self, rows: np.ndarray) -> Matches:
        """Those of ``rows``, indices or a mask, in that order."""
        return Matches(*(None if part is None else part[rows] for part in vars(self).values()))  # type: ignore[arg-type]


def tokens_of(backbone: Backbone, picture: Picture, block: int = -1) -> Tokens:
    """Patch tokens of a block after the family's norm, and the attention that ranks them.

    Early blocks of pyramids (CNNs, Swin) have more tokens than the picture has patches.

    Raises:
        ConfigError: a block that does not exist, or a network without patch tokens.
        DataError: tokens that are not finite.
    """
    attends = backbone.has_cls and explain_no_attention(backbone) is None
    with evaluating(backbone), torch.inference_mode():
        last = backbone.depth - 1 if attends else None
        outputs = backbone.outputs(picture.tensor(backbone), (block,), attention_block=last)
        patches = outputs.blocks[0].patches[0].float().cpu().numpy()
        if not patches.size:
            raise ConfigError(f"{backbone.architecture} gives no patch tokens", todo="choose another network")
        attention = None
        if outputs.attention is not None:
            h, w = picture.grid
            attention = reducers.cls_attention_on_patches(outputs.attention, h * w)[0].view(h, w).cpu().numpy()
    if not np.isfinite(patches).all():
        raise DataError(
            f"the patch tokens of {picture.name} are NaN or infinite",
            todo="check the checkpoint's weights: ibot-eval inspect",
        )
    return Tokens(patches, attention, picture.grid)


def match(left: Tokens, right: Tokens, similarity: Similarity = "dot", *, mutual: bool = False) -> Matches:
    """The best patch of the right picture for each patch of the left one; of equally good ones the first.

    Args:
        similarity: the published dot product, or the cosine. The dot product favours patches of large norm: with it a
            picture is not even matched with itself patch by patch.
        mutual: keep only pairs of which each is the other's best.

    Raises:
        ConfigError: tokens of different widths, as of two checkpoints; or not one token for each patch, as in the early
            blocks of a pyramid.
    """
    a, b = _comparable(left, right, similarity)
    scores = a @ b.T
    nearest = scores.argmax(axis=1)
    rows = np.arange(len(a))
    found = Matches(
        left=_places(rows, left.tokens.shape[1]),
        right=_places(nearest, right.tokens.shape[1]),
        scores=scores[rows, nearest],
        attention=None if left.attention is None else left.attention.reshape(-1),
    )
    return found.take(scores.argmax(axis=0)[nearest] == rows) if mutual else found


def similarity_map(left: Tokens, right: Tokens, patch: tuple[int, int], similarity: Similarity = "dot") -> np.ndarray:
    """(h, w) float32: how like each patch of the right picture is to one of the left.

    Raises:
        ConfigError: no such patch, or tokens that :func:`match` refuses.
    """
    a, b = _comparable(left, right, similarity)
    h, w = left.tokens.shape[:2]
    if not (0 <= patch[0] < h and 0 <= patch[1] < w):
        raise ConfigError(f"there is no patch {patch[0]} {patch[1]} in {h} rows and {w} columns")
    return (b @ a[patch[0] * w + patch[1]]).reshape(right.tokens.shape[:2])


def strongest(matches: Matches, n: int = TOP) -> Matches:
    """The ``n`` pairs whose left patches [CLS] attends to most; by score where there is no attention.

    Where the geometry is known, only patches that both pictures show take part.

    Raises:
        ConfigError: n below 1.
    """
    if n < 1:
        raise ConfigError(f"at least 1 match is to be drawn, not {n}", todo="--top 12")
    if matches.errors is not None:
        matches = matches.take(~np.isnan(matches.errors))
    ranked = matches.scores if matches.attention is None else matches.attention
    return matches.take(np.argsort(-ranked, kind="stable")[:n])


def accuracy(matches: Matches, radius: float = 1.0) -> tuple[float, int]:
    """Percent of matches that lie at most ``radius`` patches from the true place, and of how many.

    Only patches that both pictures show are counted; the percentage is NaN where there is none.

    Raises:
        ConfigError: the geometry is not known, or a radius below 0.
    """
    if matches.errors is None:
        raise ConfigError("the true places are known for two views of one picture only")
    if radius < 0:
        raise ConfigError(f"the radius {radius:g} is below 0")
    errors = matches.errors[~np.isnan(matches.errors)]
    # Places are computed in floating point: an error of exactly one patch must count at radius 1.
    return (float((errors <= radius + 1e-9).mean() * 100) if len(errors) else float("nan")), len(errors)


def with_errors(matches: Matches, errors: np.ndarray) -> Matches:
    """``matches`` with the distances (M,) from their true places."""
    return replace(matches, errors=errors)


def _comparable(left: Tokens, right: Tokens, similarity: Similarity) -> tuple[np.ndarray, np.ndarray]:
    """Both as rows whose products are the similarity, once they are known to be of patches and of one network."""
    for tokens in (left, right):
        (h, w), patches = tokens.tokens.shape[:2], tokens.grid
        if patches is not None and (h, w) != patches:
            raise ConfigError(
                f"this block has {h} x {w} tokens and the picture {patches[0]} x {patches[1]} patches, so its patches "
                "cannot be matched",
                todo="choose the last block: before it, pyramids (CNNs, Swin) may have a finer grid",
            )
    a, b = _flat(left, similarity), _flat(right, similarity)
    if a.shape[1] != b.shape[1]:
        raise ConfigError(
            f"tokens of {a.shape[1]} and {b.shape[1]} numbers cannot be compared", todo="use one checkpoint for both"
        )
    return a, b


def _flat(tokens: Tokens, similarity: Similarity) -> np.ndarray:
    flat = tokens.tokens.reshape(-1, tokens.tokens.shape[-1]).astype(np.float32)
    if similarity == "dot":
        return flat
    return flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-12)


def _places(indices: np.ndarray, columns: int) -> np.ndarray:
    return np.stack(np.divmod(indices, columns), axis=1).astype(np.int64)
