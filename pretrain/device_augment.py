"""What crops still need after the workers, in batch on the device: rotation, colours, blur, solarise, normalise.

The colour operations are Pillow's, with its roundings, so that single images come out as from the published pipeline:
pixels are whole numbers from 0 to 255 in float32 until they are normalised. Which crops need which operation is known
on the host before anything is copied, so no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pretrain.augment import Augmentation
from pretrain.deform import Moves, move

# Of the ITU-R 601-2 luma transform, in the 16-bit fractions that Pillow computes with.
_LUMA = (19595 / 65536, 38470 / 65536, 7471 / 65536)
_BOX_BLURS = 3


@dataclass(frozen=True)
class Changes:
    """The operations on n crops, grouped by operation: few tensors, since each is copied to the device by itself."""

    index: Tensor
    """(K,) int64, the crops that each operation of :data:`SEQUENCE` concerns, one operation after the other."""
    values: Tensor
    """(K,) float32, the operation's factor or radius for that crop; 0 where it needs none."""
    counts: tuple[int, ...]
    """Number of crops for each operation; their sum is K."""
    moves: Moves | None
    """None where no crop is deformed."""

    @classmethod
    def plan(cls, drawn: np.ndarray) -> Changes:
        """From an array of any shape of :data:`pretrain.augment.CHANGES`, in row-major order."""
        drawn = drawn.reshape(-1)
        steps = [
            (drawn["jittered"] & (drawn["order"][:, step] == kind), drawn["factors"][:, kind])
            for step in range(4)
            for kind in range(4)
        ]
        none = np.zeros(len(drawn), np.float32)
        steps += [(drawn["grey"], none), (drawn["radius"] > 0, drawn["radius"]), (drawn["solarise"], none)]
        places = [np.flatnonzero(concerned) for concerned, _ in steps]
        values = [value[at] for at, (_, value) in zip(places, steps, strict=True)]
        return cls(
            index=torch.from_numpy(np.concatenate(places)),
            values=torch.from_numpy(np.concatenate(values)),
            counts=tuple(map(len, places)),
            moves=Moves.plan(drawn["deformation"]),
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Changes:
        """The same with every tensor replaced, e.g. by its copy on a device."""
        moves = self.moves
        if moves is not None:
            moves = Moves(function(moves.matrices), None if moves.bends is None else function(moves.bends))
        return Changes(function(self.index), function(self.values), self.counts, moves)


def apply(images: Tensor, changes: Changes, augmentation: Augmentation) -> Tensor:
    """Finishes crops as the workers leave them.

    Args:
        images: (n, 3, S, S) uint8; left as they are.
        changes: of these n crops, on the device of ``images``.
        augmentation: for mean and standard deviation.

    Returns:
        (n, 3, S, S) float32, normalised.
    """
    x = images.to(torch.float32)
    if changes.moves is not None:
        x = move(x, changes.moves)
    parts = (tensor.split(changes.counts) for tensor in (changes.index, changes.values))
    for operation, index, values in zip(SEQUENCE, *parts, strict=True):
        if len(index):
            x.index_copy_(0, index, operation(x.index_select(0, index), values))
    # Numbers, not tensors made here: those would be copied to the device at every call.
    for channel, (mean, std) in enumerate(zip(augmentation.mean, augmentation.std, strict=True)):
        x[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
    return x


def luma(x: Tensor) -> Tensor:
    """(n, 3, h, w) -> (n, 1, h, w), rounded, as ``convert("L")``."""
    red, green, blue = x.unbind(1)
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2]).add_(0.5).floor_().unsqueeze_(1)


def brightness(x: Tensor, factors: Tensor) -> Tensor:
    """``ImageEnhance.Brightness``; x (n, 3, h, w) with whole values 0 to 255, factors (n,). Overwrites x."""
    return _whole(x.mul_(_each(factors)))


def contrast(x: Tensor, factors: Tensor) -> Tensor:
    """``ImageEnhance.Contrast``, likewise: away from the mean luma of the crop."""
    return _away(x, luma(x).mean((1, 2, 3), keepdim=True).add_(0.5).floor_(), factors)


def saturation(x: Tensor, factors: Tensor) -> Tensor:
    """``ImageEnhance.Color``, likewise: away from the luma of each pixel."""
    return _away(x, luma(x), factors)


def hue(x: Tensor, factors: Tensor) -> Tensor:
    """torchvision's ``adjust_hue`` of Pillow images, likewise: hue and saturation are rounded down to 8 bits, as in
    Pillow's HSV, and the factor, a part of the circle from -0.5 to 0.5, to a 255th."""
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    spread = (value - low).clamp_min_(1e-6)
    turn = torch.where(
        red == value,
        (green - blue) / spread,
        torch.where(green == value, (blue - red) / spread + 2, (red - green) / spread + 4),
    )
    turn.div_(6)
    # remainder() would do too, but the CPU computes it one by one.
    turn.sub_(turn.floor()).mul_(255).floor_().add_(factors.mul(255).trunc_()[:, None, None])
    turn.sub_(turn.div(256).floor_().mul_(256)).mul_(6 / 255)
    depth = (value - low).div_(value.clamp_min(1)).mul_(255).floor_().div_(255).mul_(value)
    out = torch.empty_like(x)
    # How far each channel stays below the largest: not at all around its own hue, in full on the far side of it.
    red_below = turn.sub(3).abs_().neg_().add_(2)
    green_below, blue_below = (turn.sub(hue).abs_().sub_(1) for hue in (2, 4))
    for channel, below in enumerate((red_below, green_below, blue_below)):
        torch.sub(value, below.clamp_(0, 1).mul_(depth), out=out[:, channel])
    return out.add_(0.5).floor_()


def grey(x: Tensor, _: Tensor) -> Tensor:
    """torchvision's ``to_grayscale`` with three channels, likewise."""
    return luma(x).expand_as(x)


def solarise(x: Tensor, _: Tensor) -> Tensor:
    """``ImageOps.solarize``: values of 128 and more are inverted."""
    # The larger half is folded back onto the smaller one.
    return x.sub_(127.5).abs_().sub_(127.5).neg_()


def blur(x: Tensor, radii: Tensor) -> Tensor:
    """``ImageFilter.GaussianBlur``, likewise, but for Pillow's roundings between its six passes.

    A Gaussian is approximated by three box blurs with fractional ends (Gwosdek et al. 2011, eq. 7 to 11), which are one
    kernel here; the border's pixels are repeated.

    Args:
        x: (n, 3, h, w).
        radii: (n,) standard deviations, pixels, above 0 and up to 2.
    """
    kernels = blur_kernels(radii).repeat_interleave(3, 0).unsqueeze(1)
    n, channels, height, width = x.shape
    reach = kernels.shape[-1] // 2
    # Each crop has a kernel of its own, so crops are channels here.
    x = F.pad(x, (reach, reach, 0, 0), mode="replicate").view(1, n * channels, height, -1)
    x = F.conv2d(x, kernels.unsqueeze(2), groups=n * channels).view(n, channels, height, width)
    x = F.pad(x, (0, 0, reach, reach), mode="replicate").view(1, n * channels, -1, width)
    x = F.conv2d(x, kernels.unsqueeze(3), groups=n * channels).view(n, channels, height, width)
    return _whole(x.add_(0.5))


def blur_kernels(radii: Tensor) -> Tensor:
    """(n,) standard deviations up to 2 -> (n, 13), each of sum 1."""
    variance = radii.square() / _BOX_BLURS
    whole = (((12 * variance + 1).sqrt() - 1) / 2).floor()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1).square()))
    # 1 up to `whole` pixels away, then the fraction, then 0; a deviation of 2 reaches 2 pixels.
    away = torch.arange(-2, 3, device=radii.device).abs()
    box = (whole[:, None] + part[:, None] + 1 - away).clamp_(0, 1)
    box = (box / box.sum(1, keepdim=True)).unsqueeze(1)
    kernel = box.transpose(0, 1)
    for _ in range(_BOX_BLURS - 1):
        kernel = F.conv1d(F.pad(kernel, (4, 4)), box, groups=len(radii))
    return kernel[0]


SEQUENCE: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    *(brightness, contrast, saturation, hue) * 4,
    grey,
    blur,
    solarise,
)
"""What is done to crops, in this order. The four jitters come in every order by being there four times."""


def _away(x: Tensor, origin: Tensor, factors: Tensor) -> Tensor:
    # In this order as in Pillow: pixels at the origin stay there exactly, instead of being rounded down by one.
    return _whole(x.sub_(origin).mul_(_each(factors)).add_(origin))


def _each(factors: Tensor) -> Tensor:
    return factors[:, None, None, None]


def _whole(x: Tensor) -> Tensor:
    return x.clamp_(0, 255).floor_()
