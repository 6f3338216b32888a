"""What is shown where a part of an image was dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ibot_eval.robustness import draws
from ibot_eval.robustness.config import Fill


def fill_values(
    fill: Fill, images: Tensor, indices: Tensor, mean: Sequence[float], std: Sequence[float], *seeds: int
) -> Tensor:
    """What to show instead of ``images``, of their shape or one that broadcasts to it.

    Args:
        fill: mean (0 after normalisation, the mean colour of the data that the network was trained on), black, or
            noise (normal, mean 0 and deviation 1 after normalisation; of an image always the same).
        images: (B, 3, H, W) float, normalised with ``mean`` and ``std``.
        indices: (B,) int64 of the images in their split.
        seeds: of the noise.
    """
    if fill == "mean":
        return images.new_zeros(())
    if fill == "black":
        return -images.new_tensor(list(mean)).view(3, 1, 1) / images.new_tensor(list(std)).view(3, 1, 1)
    return draws.normal(indices, images[0].numel(), *seeds).to(images).view_as(images)


def filled(images: Tensor, pixels: Tensor, values: Tensor) -> Tensor:
    """``values`` where ``pixels`` (B, 1, H, W) is True, else ``images`` (B, 3, H, W)."""
    return torch.where(pixels, values, images)
