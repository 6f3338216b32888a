"""From the tokens of one block to what a bank holds: pure functions, one per reducer of ``features.REDUCERS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ibot_eval.errors import ConfigError

GEM_FLOOR = 1e-6
"""Patch values below this count as this, as in DINO's published copy detection, the source of the 'GeM' features."""


def patch_mean(patches: Tensor) -> Tensor:
    """(B, h, w, D) -> (B, D) float32: the mean over all positions."""
    return patches.float().mean(dim=(1, 2))


def norm_patch_mean(raw_patches: Tensor, final_norm: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, h, w, D) tokens before the last norm -> (B, D) float32: mean first, then the norm ('avgpool 1' of iBOT)."""
    return final_norm(patch_mean(raw_patches)).float()


def gem(patches: Tensor, power: float) -> Tensor:
    """(B, h, w, D) -> (B, D) float32: generalised mean, (mean of max(x, 1e-6)^p)^(1/p), over all positions.

    Radenovic et al., 'Fine-tuning CNN image retrieval with no human annotation', eq. 3; the floor is the published
    retrieval code's.
    """
    x = patches.float().clamp(min=GEM_FLOOR)
    # Relative to the largest value, so that high powers neither overflow nor vanish.
    largest = x.amax(dim=(1, 2), keepdim=True)
    return largest[:, 0, 0] * (x / largest).pow(power).mean(dim=(1, 2)).pow(1 / power)


def cls_attention_on_patches(attention: Tensor, num_patches: int) -> Tensor:
    """(B, heads, T, T) with [CLS] first and the patches last -> (B, num_patches) float32.

    The [CLS] row, averaged over heads, cut to the patches.
    """
    return attention[:, :, 0, -num_patches:].float().mean(dim=1)


def by_weight(weights: Tensor) -> Tensor:
    """(B, N) -> (B, N) int64: each image's patches from the largest weight to the smallest, equal ones as they lie."""
    return weights.sort(dim=1, descending=True, stable=True).indices


def drawn(indices: Sequence[int], num_patches: int, device: torch.device) -> Tensor:
    """(B, num_patches) int64: each image's patches in an order drawn from the image's index alone.

    So a draw is the same at any batch size and on any rank, and the first K of it are among the first K + 1.

    Args:
        indices: (B,) of the images in their split.
    """
    orders = torch.from_numpy(np.stack([np.random.default_rng(index).permutation(num_patches) for index in indices]))
    if device.type == "cuda":
        # From ordinary memory the copy would wait for the network's pass.
        orders = orders.pin_memory()
    return orders.to(device, non_blocking=True)


def leading_mean(patches: Tensor, order: Tensor, k: int) -> Tensor:
    """Mean of the first k patches of an order.

    Args:
        patches: (B, h, w, D).
        order: (B, h * w) int64, a permutation for each image: :func:`by_weight`, :func:`drawn`.
        k: 1 … h * w.

    Returns:
        (B, D) float32.

    Raises:
        ConfigError: k above the number of patches.
    """
    b, h, w, _ = patches.shape
    if k > h * w:
        raise ConfigError(
            f"the mean of {k} patches is asked for, and the grid is {h}x{w} = {h * w}",
            todo=f"use a k of at most {h * w}, or a larger --crop",
        )
    images = torch.arange(b, device=patches.device)[:, None]
    return patches.flatten(1, 2)[images, order[:, :k]].float().mean(dim=1)


def head_argmax(logits: Tensor) -> Tensor:
    """(B, K) outputs of the projection head -> (B,) int64 index of the largest; -1 where any output is not finite."""
    index = logits.argmax(dim=1)
    return torch.where(torch.isfinite(logits).all(dim=1), index, index.new_full((), -1))
