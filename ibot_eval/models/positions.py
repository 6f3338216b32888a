"""Position embeddings at sizes other than the one a network was trained at.

Every rule resizes to a target *size*: a scale factor alone has missed the wanted grid by a row often enough
(224/14 px at 1840, 518/14 at 602 …). The rules differ in where they sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Grid = tuple[int, int]
ResizeRule = Literal["scale", "size", "size-antialias"]

CACHED_SIZES = 16
"""Resized tables kept per network; a data set of uncropped photographs has more sizes than memory should hold."""

PUBLISHED_RULES: dict[str, ResizeRule] = {
    "vit": "scale",
    "ibot": "scale",
    "dino": "scale",
    "dinov2": "scale",
    "mocov3": "scale",
    "mae": "size",
    "deit": "size",
    "supervised": "size",
    "beit": "size",
    "hf-vit": "size",
    "timm": "size-antialias",
    "dinov3": "size-antialias",
}
"""What each family's published code does. MoCo v3 has no code for other sizes; DINO's evaluation is used for it."""


def published_rule(family: str, num_registers: int) -> ResizeRule:
    """The rule of a family; DINOv2 with registers was trained and published with an antialiased one."""
    if family == "dinov2" and num_registers:
        return "size-antialias"
    return PUBLISHED_RULES.get(family, "size-antialias")


def resize_positions(table: Tensor, size: Grid, rule: ResizeRule) -> Tensor:
    """A grid of position embeddings at another size.

    Args:
        table: (1, H, W, D) floating point, rows first.
        size: rows and columns wanted.
        rule: "scale" samples bicubically at the spacing of the scale factors (h + 0.1) / H and (w + 0.1) / W
            (DINO, iBOT, DINOv2); "size" bicubically at the spacing of the sizes; "size-antialias" also filters.

    Returns:
        (1, h, w, D) in the dtype of ``table``; ``table`` itself where the size is the stored one.
    """
    height, width = table.shape[1:3]
    if (height, width) == tuple(size):
        return table
    planes = table.permute(0, 3, 1, 2).float()
    if rule == "scale":
        # F.interpolate takes a size or factors, never both; the operator behind it takes both, which gives the
        # published sampling positions and a grid that cannot be a row short.
        factors = ((size[0] + 0.1) / height, (size[1] + 0.1) / width)
        planes = torch.ops.aten.upsample_bicubic2d.default(planes, list(size), False, *factors)
    else:
        planes = F.interpolate(
            planes, size=size, mode="bicubic", align_corners=False, antialias=rule == "size-antialias"
        )
    if tuple(planes.shape[2:]) != tuple(size):
        raise RuntimeError(f"position embeddings came out as {tuple(planes.shape[2:])} instead of {size}")
    return planes.permute(0, 2, 3, 1).to(table.dtype)


class SizeCache:
    """Tensors derived from a frozen parameter, kept per size of the patch grid."""

    def __init__(self) -> None:
        self._kept: dict[Grid, tuple[Tensor, Tensor]] = {}

    def get(self, source: Tensor, size: Grid, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()``, remembered as long as the values of ``source`` stay; trainable sources are never cached."""
        if source.requires_grad:
            return compute()
        # Values are compared, since moving averages are often written through .data, which leaves no other trace.
        kept = self._kept.get(size)
        if kept is not None and _identical(kept[0], source):
            return kept[1]
        # A tensor made in inference mode could not take part in a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            self._kept.pop(size, None)
            while len(self._kept) >= CACHED_SIZES:
                self._kept.pop(next(iter(self._kept)))
            self._kept[size] = (source.detach().clone(), compute())
        return self._kept[size][1]


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
