"""The four maps that detection and segmentation heads take: which blocks they come from, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ibot_eval.errors import ConfigError

STRIDES = (4, 8, 16, 32)
"""Pixels between the cells of each level."""
PUBLISHED = {12: (4, 6, 8, 12), 24: (8, 12, 16, 24)}
"""Depth -> blocks, counted from 1, of iBOT's released detection and segmentation configurations."""

BatchNorm = Literal["BN", "SyncBN"]
_NORMS = {"BN": nn.BatchNorm2d, "SyncBN": nn.SyncBatchNorm}


def level_blocks(depth: int, blocks: Sequence[int] | None = None) -> tuple[int, ...]:
    """The four blocks, counted from 0, whose outputs become the levels.

    Args:
        depth: of the network.
        blocks: counted from 1, as publications do. By default the published ones of 12 and 24, else every quarter.

    Raises:
        ConfigError: there are not four, they do not rise, or one does not exist.
    """
    if blocks is None:
        blocks = PUBLISHED.get(depth) or tuple(math.ceil(depth * quarter / 4) for quarter in range(1, 5))
    elif len(blocks) != len(STRIDES) or list(blocks) != sorted(set(blocks)) or not 1 <= min(blocks) <= max(blocks):
        raise ConfigError(f"levels cannot come from blocks {list(blocks)}", todo="give four that rise, the first is 1")
    if max(blocks) > depth:
        raise ConfigError(f"there is no block {max(blocks)}: the network has {depth}", todo=f"give blocks 1 to {depth}")
    return tuple(block - 1 for block in blocks)


class Pyramid(nn.Module):
    """Four maps at patch stride become maps at strides 4, 8, 16 and 32.

    With patches of 16 pixels as in BEiT's and iBOT's code: two deconvolutions (2x2, stride 2) with batch norm and GELU
    between, one, none, and 2x2 max-pooling; with patches of 8: one deconvolution, none, and max-pooling over 2x2 and
    4x4. Other powers of two follow the same pattern. Patches of any other size are treated like those of the nearest
    power of two, and the maps are then sampled, bilinearly, at exactly the strides above.

    Args:
        widths: channels of the four maps, which they keep.
        patch: pixels per cell of the maps.
        norm: between deconvolutions.
    """

    def __init__(self, widths: Sequence[int], patch: int, norm: BatchNorm = "SyncBN") -> None:
        super().__init__()
        self.patch, self.nearest = patch, 2 ** round(math.log2(patch))
        self.steps = nn.ModuleList(
            _step(width, self.nearest, stride, norm) for width, stride in zip(widths, STRIDES, strict=True)
        )

    def forward(self, maps: Sequence[Tensor], size: tuple[int, int]) -> tuple[Tensor, ...]:
        """Levels of stride s, each (B, D, ceil(H / s), ceil(W / s)).

        Args:
            maps: four, (B, D, h, w) each, of an image of at least ``size``.
            size: height H and width W of the image in pixels; what lies beyond is cut off.
        """
        levels = []
        for step, features, stride in zip(self.steps, maps, STRIDES, strict=True):
            level = step(features)
            wanted = (math.ceil(size[0] / stride), math.ceil(size[1] / stride))
            if self.patch == self.nearest:
                level = level[..., : wanted[0], : wanted[1]]
            else:
                factor = self.patch / self.nearest
                level = resample(level, wanted, (factor, factor))
            levels.append(level)
        return tuple(levels)


def at_patch_stride(maps: Sequence[Tensor], patch: int, size: tuple[int, int]) -> tuple[Tensor, ...]:
    """The maps so that they span exactly an image of ``size``, as heads that resize scores to it take for granted.

    Args:
        maps: (B, D, h, w) each, of the image padded at its right and bottom to ``patch * h`` by ``patch * w`` pixels.
        patch: pixels per cell.
        size: height and width of the image before that padding.

    Returns:
        The maps themselves where nothing was padded, else sampled bilinearly at the same number of cells.
    """
    height, width = (int(side) for side in maps[0].shape[-2:])
    if (patch * height, patch * width) == size:
        return tuple(maps)
    factors = (patch * height / size[0], patch * width / size[1])
    return tuple(resample(features, (height, width), factors) for features in maps)


def resample(features: Tensor, size: tuple[int, int], factors: tuple[float, float]) -> Tensor:
    """A map (B, D, h, w) sampled bilinearly at other strides, from the same top left corner of the image.

    Args:
        features: floating point.
        size: rows and columns of the result; those beyond the map repeat its edge.
        factors: old stride over new stride, down and across.
    """
    # F.interpolate takes a size or factors, never both; the operator behind it takes both. A side that already has the
    # wanted length it copies, whatever the factor, so then one cell more is asked for.
    asked = [wanted + (wanted == had) for wanted, had in zip(size, features.shape[-2:], strict=True)]
    sampled = torch.ops.aten.upsample_bilinear2d.default(features, asked, False, *factors)
    return sampled[..., : size[0], : size[1]]


def pad_to(images: Tensor, multiple: int) -> Tensor:
    """Images (B, 3, H, W) with zeros at the right and bottom, so that ``multiple`` divides both sides."""
    height, width = images.shape[-2:]
    down, across = -height % multiple, -width % multiple
    return F.pad(images, (0, across, 0, down)) if down or across else images


def _step(width: int, patch: int, stride: int, norm: BatchNorm) -> nn.Module:
    """From a map of stride ``patch`` to one of ``stride``; both are powers of two."""
    if stride > patch:
        factor = stride // patch
        return nn.MaxPool2d(factor, factor, ceil_mode=True)
    layers: list[nn.Module] = []
    for doubling in range((patch // stride).bit_length() - 1):
        if doubling:
            layers += [_NORMS[norm](width), nn.GELU()]
        layers.append(nn.ConvTranspose2d(width, width, kernel_size=2, stride=2))
    return nn.Sequential(*layers)
