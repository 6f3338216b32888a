"""Mixup, CutMix and label smoothing: timm's, with draws that a resumed run repeats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from timm.data.mixup import Mixup, mixup_target
from timm.loss.cross_entropy import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from ibot_eval.data.epochs import MIXING
from ibot_eval.errors import ConfigError
from ibot_eval.training.random_states import drawing_from


@dataclass(frozen=True)
class Mixing:
    """What happens to a batch of images and targets before the network, and the loss that goes with it.

    Everything drawn for a batch comes from (seed, rank, number of the batch).

    Raises:
        ConfigError: a value out of range.
    """

    classes: int
    mixup: float = 0.8
    """Alpha of mixup's beta distribution; 0 for none."""
    cutmix: float = 1.0
    """Alpha of CutMix's; 0 for none."""
    smoothing: float = 0.1
    """Of labels, mixed or not."""
    probability: float = 1.0
    """Of mixing a batch at all."""
    switch: float = 0.5
    """Of CutMix where both are on."""
    mode: Literal["batch", "pair", "elem"] = "batch"
    """What shares one draw: the batch, a pair of images, or nothing."""

    def __post_init__(self) -> None:
        for name, value in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} {value:g}: its alpha is a number of at least 0 (0 for none)")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"label smoothing {self.smoothing:g}: it is at least 0 and below 1")
        for name, value in (("probability of mixing", self.probability), ("of switching", self.switch)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} {value:g}: a probability is between 0 and 1")

    @property
    def active(self) -> bool:
        """Whether images are mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    def __call__(
        self, images: Tensor, targets: Tensor, *, seed: int, step: int, rank: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Mix a batch with itself in reverse order; of an odd number of images the last one stays as it is.

        Args:
            images: (B, 3, H, W) float, normalised; may be changed in place.
            targets: (B,) int64, 0 … classes - 1.
            seed: at least 0.
            step: number of the batch, counted from the beginning of the run.
            rank: of this process.

        Returns:
            images, and targets for :attr:`loss`: (B, classes) float32, or the given ones where nothing is ever mixed.
        """
        if not self.active:
            return images, targets
        even = len(images) // 2 * 2
        last = mixup_target(targets[even:], self.classes, smoothing=self.smoothing)
        if not even:
            return images, last
        with drawing_from(MIXING, seed, rank, step):
            mixed, soft = self._mixup(images[:even], targets[:even])
        if even == len(images):
            return mixed, soft
        return torch.cat([mixed, images[even:]]), torch.cat([soft, last])

    @cached_property
    def loss(self) -> nn.Module:
        """(B, classes) logits and the targets of a call -> mean cross entropy."""
        if self.active:
            return SoftTargetCrossEntropy()
        return LabelSmoothingCrossEntropy(self.smoothing) if self.smoothing else nn.CrossEntropyLoss()

    @cached_property
    def _mixup(self) -> Mixup:
        return Mixup(
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            prob=self.probability,
            switch_prob=self.switch,
            mode=self.mode,
            label_smoothing=self.smoothing,
            num_classes=self.classes,
        )
