"""Images whose squares are dropped: every kind, repeat and level of one batch after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ibot_eval.data.transforms import EvalTransform
from ibot_eval.robustness import draws
from ibot_eval.robustness.config import Fill, Kind, Offset
from ibot_eval.robustness.filling import fill_values, filled
from ibot_eval.robustness.masking import (
    attention_masks,
    information_loss,
    random_masks,
    shifted_attention,
    to_pixels,
)
from ibot_eval.robustness.saliency import Saliency
from ibot_eval.robustness.sweep import Damaged

# What is drawn, so that one draw tells nothing about another.
_ORDER, _ROWS, _COLUMNS, _NOISE = range(4)


class Way(NamedTuple):
    """One damage of every image."""

    kind: Kind
    repeat: int
    level: int


@dataclass(frozen=True)
class Occlusions:
    """As :class:`ibot_eval.robustness.sweep.Damage`: levels within kinds within repeats."""

    kinds: Sequence[Kind]
    levels: Sequence[int]
    """Percent, above 0."""
    side: int
    """Of the squares, in pixels; it divides the image."""
    transform: EvalTransform
    """Of the images."""
    saliency: Saliency | None = None
    """Needed for all kinds but random."""
    fill: Fill = "mean"
    offset: Offset = "none"
    tokens: bool = False
    """Whether to say which patches are kept instead of painting over the others."""
    seed: int = 0
    repeats: int = 1

    def repeats_of(self, kind: Kind) -> int:
        """How often a kind is done: once where nothing about it is drawn, so that all repeats would be the same."""
        drawn = kind == "random" or self.offset == "random" or (self.fill == "noise" and not self.tokens)
        return self.repeats if drawn else 1

    def ways(self) -> list[Way]:
        """What is done, in this order."""
        return [
            Way(kind, repeat, level)
            for repeat in range(self.repeats)
            for kind in self.kinds
            if repeat < self.repeats_of(kind)
            for level in self.levels
        ]

    def __len__(self) -> int:
        return len(self.ways())

    def __call__(self, images: Tensor, indices: Tensor) -> Iterator[Damaged]:
        """The ways of :meth:`ways`.

        Args:
            images: (B, 3, H, W) float, normalised.
            indices: (B,) int64 of the images in their split.

        Raises:
            DataError: attention that is not finite.
        """
        attention = None
        if self.saliency is not None and set(self.kinds) - {"random"}:
            attention = self.saliency.attention(images)
        for repeat in range(self.repeats):
            kinds: list[Kind] = [kind for kind in self.kinds if repeat < self.repeats_of(kind)]
            if not kinds:
                return
            offsets = self._offsets(indices, repeat)
            values = None
            if not self.tokens:
                seeds = (_NOISE, self.seed, repeat)
                values = fill_values(self.fill, images, indices, self.transform.mean, self.transform.std, *seeds)
            for kind in kinds:
                masks = self.masks(kind, images, indices, attention, repeat, offsets)
                for mask in masks:
                    loss = information_loss(mask.flatten(1))
                    if values is None:
                        yield Damaged(images, loss, ~mask.flatten(1))
                    else:
                        yield Damaged(filled(images, to_pixels(mask, self.side, offsets), values), loss)

    def masks(
        self,
        kind: Kind,
        images: Tensor,
        indices: Tensor,
        attention: Tensor | None,
        repeat: int = 0,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """(L, B, rows, columns) bool, True where a square is dropped.

        Args:
            attention: (B, rows, columns) of the squares of the unshifted grid, for all kinds but random.
            offsets: (B, 2) how far each image's grid is shifted, in pixels.
        """
        rows, columns = (length // self.side for length in images.shape[-2:])
        if kind == "random":
            ranks = draws.permutations(indices, rows * columns, _ORDER, self.seed, repeat).to(images.device)
            masks = random_masks(ranks, self.levels)
        else:
            assert attention is not None
            if offsets is not None:
                attention = shifted_attention(attention, offsets, self.side)
            masks = attention_masks(attention.flatten(1), self.levels, most=kind == "salient")
        return masks.unflatten(2, (rows, columns))

    def _offsets(self, indices: Tensor, repeat: int) -> Tensor | None:
        if self.offset == "none":
            return None
        if self.offset == "half":
            return torch.full((len(indices), 2), self.side // 2, device=indices.device)
        drawn = [draws.uniform(indices, 1, stream, self.seed, repeat) for stream in (_ROWS, _COLUMNS)]
        return (torch.cat(drawn, 1) * self.side).long()
