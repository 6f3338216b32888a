"""Many linear classifiers trained side by side on the same features: all heads of a sweep advance in one step.

Published sweeps have a layer, a loss and an optimizer per learning rate. Here the heads are slices of one tensor, so
that a step is two matrix products whatever their number, one of which adds to the momentum as it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Optimizer = Literal["sgd", "lars", "adamw"]

INITIAL_DEVIATION = 0.01
TRUST = 0.001
BETAS = (0.9, 0.999)
EPSILON = 1e-8
TILE_VALUES = 1 << 24
"""Weights that advance together, which bounds what a step needs beside them; smaller tiles gain nothing in the cache
and cost calls."""
EVALUATED_VALUES = 1 << 22
"""Logits held at a time when heads are evaluated."""


@dataclass(frozen=True)
class HeadSetting:
    """What distinguishes the training of one head from that of another."""

    lr: float
    weight_decay: float = 0.0
    optimizer: Optimizer = "sgd"


@dataclass(frozen=True)
class Scores:
    """How well each head of a group does."""

    correct: np.ndarray
    """(heads,) int64: number of samples whose largest logit is that of their class."""
    log_loss: np.ndarray
    """(heads,) float64: mean cross-entropy over the samples whose class is known; infinite for diverged heads."""


@dataclass(frozen=True)
class _Tile:
    heads: slice
    optimizer: Optimizer
    decays: bool


class Sweep:
    """H linear classifiers, every one with its own optimizer setting.

    Heads are ordered by group, then by setting: head ``g * len(settings) + s``. Groups differ in the samples that
    count for them. All heads start from the same weights, N(0, 0.01), and biases 0, so none depends on which others
    are trained beside it.

    Per head, the updates are those of

    - ``sgd``: torch.optim.SGD with momentum and weight decay;
    - ``lars``: You et al. 2017 as in the published evaluation code: with g the gradient plus decay,
      m = momentum * m + 0.001 |w| / |g| * g and w -= lr * m; biases are neither adapted nor decayed;
    - ``adamw``: torch.optim.AdamW with betas (0.9, 0.999) and eps 1e-8.

    Args:
        width: D of the features.
        classes: C.
        settings: one per head of a group.
        groups: number of groups.
        momentum: of sgd and lars.
        seed: of the initial weights.
        device: where the heads are; features and targets are expected there.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        settings: Sequence[HeadSetting],
        *,
        groups: int = 1,
        momentum: float = 0.9,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.width, self.classes, self.groups, self.momentum = width, classes, groups, momentum
        self.settings = tuple(settings)
        self.device = torch.device(device)
        self.steps = 0
        every = self.settings * groups
        generator = torch.Generator().manual_seed(seed)
        start = torch.empty(classes, width).normal_(0, INITIAL_DEVIATION, generator=generator)
        self.weight = start.to(self.device).repeat(len(every), 1, 1)
        self.bias = torch.zeros(len(every), classes, device=self.device)
        # First moments; those of sgd and lars are multiplied by the head's learning rate, which spares the update a
        # pass: the rate goes into the small factor of the gradient's product.
        self._first = [torch.zeros_like(self.weight), torch.zeros_like(self.bias)]
        adaptive = any(s.optimizer == "adamw" for s in every)
        self._second = [torch.zeros_like(t) for t in self._first] if adaptive else []
        self._lr = torch.tensor([s.lr for s in every], device=self.device)
        self._decay = torch.tensor([s.weight_decay for s in every], device=self.device)
        # The rate with which a head's gradient enters its first moment.
        self._rate = torch.tensor([1.0 if s.optimizer == "adamw" else s.lr for s in every], device=self.device)
        self._tiles = list(_tiles(every, self._heads_at_once))

    def __len__(self) -> int:
        """Number of heads."""
        return len(self.weight)

    @torch.no_grad()
    def step(self, features: Tensor, targets: Tensor, weights: Tensor | None = None, lr_scale: float = 1.0) -> None:
        """One optimizer step of every head on the mean cross-entropy of the batch.

        Args:
            features: (B, D) float32.
            targets: (B,) int64, 0 … C - 1.
            weights: (groups, B), 1 where a sample counts for a group and 0 where not; the mean is over those that
                count, and a group none of whose samples is in the batch has the gradient 0. None: all count for all.
            lr_scale: factor of all learning rates, of the schedule.
        """
        self.steps += 1
        features = features.contiguous()
        if weights is None:
            shares = features.new_full((len(features), self.groups), 1 / len(features))
        else:
            shares = (weights / weights.sum(1, keepdim=True).clamp(min=1)).T.to(features.dtype)
        shares = shares.repeat_interleave(len(self.settings), dim=1)
        rows = torch.arange(len(features), device=self.device)
        for tile in self._tiles:
            slopes = self._logits(features, tile.heads).softmax(-1)
            slopes[rows, :, targets] -= 1
            # LARS scales by what only the whole gradient tells.
            rate = 1.0 if tile.optimizer == "lars" else self._rate[tile.heads]
            slopes *= (shares[:, tile.heads] * rate)[:, :, None]
            update = {"sgd": self._sgd, "lars": self._lars, "adamw": self._adamw}[tile.optimizer]
            update(tile, slopes, features, lr_scale)

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        """(B, D) -> (H, B, C), of all heads."""
        return self._logits(features, slice(0, len(self))).transpose(0, 1)

    @torch.no_grad()
    def evaluate(self, features: np.ndarray | Tensor, targets: Tensor, group: int = 0) -> Scores:
        """How well the heads of one group classify, without ever holding all their logits.

        Args:
            features: (n, D), on any device; perhaps memory-mapped.
            targets: (n,) int64 on any device; -1 for a class that the heads do not know, which counts as wrong.
            group: which heads.

        Returns:
            one entry per setting.
        """
        first, last = group * len(self.settings), (group + 1) * len(self.settings)
        correct = torch.zeros(last - first, dtype=torch.int64, device=self.device)
        # MPS has no float64.
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        loss = torch.zeros(last - first, dtype=wide, device=self.device)
        targets = targets.to(self.device)
        heads = self._heads_at_once
        rows = max(1, EVALUATED_VALUES // (self.classes * min(heads, last - first)))
        for a in range(0, len(targets), rows):
            part = on_device(features[a : a + rows], self.device)
            right = targets[a : a + rows, None]
            known = right >= 0
            for h in range(first, last, heads):
                of = slice(h, min(h + heads, last))
                logits = self._logits(part, of)
                own = logits.gather(2, right.clamp(min=0)[:, :, None].expand(-1, logits.shape[1], 1)).squeeze(2)
                losses = logits.logsumexp(2) - own
                # arg-max takes a NaN for the largest number; a diverged head knows nothing.
                hits = (logits.argmax(2) == right) & losses.isfinite()
                slot = slice(of.start - first, of.stop - first)
                correct[slot] += hits.sum(0)
                loss[slot] += torch.where(known, losses, 0).sum(0, dtype=wide)
        mean = (loss / max(1, int((targets >= 0).sum()))).cpu().numpy()
        return Scores(correct.cpu().numpy(), np.where(np.isfinite(mean), mean, np.inf))

    def head(self, index: int) -> tuple[Tensor, Tensor]:
        """Copies of one head's weight (C, D) and bias (C,), on the CPU."""
        return self.weight[index].cpu().clone(), self.bias[index].cpu().clone()

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during training, as tensors (not copies) and numbers."""
        tensors = {"weight": self.weight, "bias": self.bias}
        for moment, pair in (("first", self._first), ("second", self._second)):
            tensors |= {f"{moment}_{name}": tensor for name, tensor in zip(("weight", "bias"), pair, strict=False)}
        return {**tensors, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the sweep stood that ``state`` is of; its settings and shapes must be the same.

        Raises:
            ValueError: other tensors than this sweep has.
        """
        own = self.state_dict()
        if {n: getattr(t, "shape", None) for n, t in state.items()} != {
            n: getattr(t, "shape", None) for n, t in own.items()
        }:
            raise ValueError("the state belongs to a sweep of other heads")
        for name, value in state.items():
            if name == "steps":
                self.steps = int(value)
            else:
                own[name].copy_(value)

    @property
    def _heads_at_once(self) -> int:
        return max(1, TILE_VALUES // (self.classes * self.width))

    def _logits(self, features: Tensor, heads: slice) -> Tensor:
        """(B, D) -> (B, heads, C)."""
        flat = torch.addmm(self.bias[heads].flatten(), features, self.weight[heads].flatten(0, 1).T)
        return flat.view(len(features), -1, self.classes)

    def _sgd(self, tile: _Tile, slopes: Tensor, features: Tensor, lr_scale: float) -> None:
        of = tile.heads
        moment, bias_moment = (t[of] for t in self._first)
        moment.flatten(0, 1).addmm_(slopes.flatten(1).T, features, beta=self.momentum)
        bias_moment.mul_(self.momentum).add_(slopes.sum(0))
        if tile.decays:
            decay = (self._lr[of] * self._decay[of])[:, None]
            moment.addcmul_(self.weight[of], decay[:, :, None])
            bias_moment.addcmul_(self.bias[of], decay)
        self.weight[of].sub_(moment, alpha=lr_scale)
        self.bias[of].sub_(bias_moment, alpha=lr_scale)

    def _lars(self, tile: _Tile, slopes: Tensor, features: Tensor, lr_scale: float) -> None:
        of = tile.heads
        moment, bias_moment = (t[of] for t in self._first)
        weight, lr = self.weight[of], self._lr[of][:, None]
        gradient = (slopes.flatten(1).T @ features).view_as(weight)
        if tile.decays:
            gradient.addcmul_(weight, self._decay[of][:, None, None])
        own, slope = weight.flatten(1).norm(dim=1), gradient.flatten(1).norm(dim=1)
        trust = torch.where((own > 0) & (slope > 0), TRUST * own / slope, 1.0)[:, None]
        moment.mul_(self.momentum).addcmul_(gradient, (lr * trust)[:, :, None])
        bias_moment.mul_(self.momentum).addcmul_(slopes.sum(0), lr)
        weight.sub_(moment, alpha=lr_scale)
        self.bias[of].sub_(bias_moment, alpha=lr_scale)

    def _adamw(self, tile: _Tile, slopes: Tensor, features: Tensor, lr_scale: float) -> None:
        of = tile.heads
        gradients = ((slopes.flatten(1).T @ features).view_as(self.weight[of]), slopes.sum(0))
        first_correction, second_correction = (1 - beta**self.steps for beta in BETAS)
        for value, gradient, first, second in zip(
            (self.weight, self.bias), gradients, self._first, self._second, strict=True
        ):
            lr = (self._lr[of] * lr_scale).view(-1, *[1] * (value.ndim - 1))
            if tile.decays:
                value[of].mul_(1 - lr * self._decay[of].view_as(lr))
            first[of].lerp_(gradient, 1 - BETAS[0])
            second[of].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            spread = second[of].sqrt().div_(second_correction**0.5).add_(EPSILON)
            value[of].sub_(first[of].div(spread).mul_(lr / first_correction))


def on_device(features: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """``features`` as float32 on ``device``; a part of a memory-mapped file is copied."""
    if isinstance(features, Tensor):
        return features.to(device, torch.float32)
    array = np.asarray(features, np.float32)
    # torch warns of memory that may not be written, as that of a bank.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def _tiles(settings: Sequence[HeadSetting], most: int) -> list[_Tile]:
    """Neighbouring heads with the same rule, ``most`` at a time."""
    tiles, start = [], 0
    for (optimizer, decays), run in groupby(settings, key=lambda s: (s.optimizer, s.weight_decay != 0)):
        stop = start + len(list(run))
        tiles += [_Tile(slice(a, min(a + most, stop)), optimizer, decays) for a in range(start, stop, most)]
        start = stop
    return tiles
