"""The two losses of iBOT as pure functions of logits.

A cross-entropy against targets q that sum to 1 is ``logsumexp(z) - <q, z>``, so log-probabilities are never formed.
Logits come before the temperature, in float32.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ibot_eval import distributed


class Targets(NamedTuple):
    """What the teacher asks for."""

    probabilities: Tensor
    """(…, K), rows sum to 1."""
    scores: Tensor
    """(…, K) centred logits over the temperature, whose softmax ``probabilities`` are unless hard."""
    hard: bool = False

    def entropy(self) -> Tensor:
        """(…) nats, of the teacher's softmax output (DINO section 5.3)."""
        return torch.logsumexp(self.scores, -1) - (self.scores.softmax(-1) * self.scores).sum(-1)


def teacher_targets(
    logits: Tensor, centre: Tensor | None, temperature: float, kind: Literal["softmax", "hardmax"] = "softmax"
) -> Targets:
    """Targets from the teacher's logits (…, K) (iBOT eq. 1 and 2; Table 18 for hardmax).

    Args:
        logits: before temperature and centre.
        centre: (K,) to subtract, or None.
        temperature: the teacher's.
        kind: "softmax", or "hardmax" for all the weight on the largest output.
    """
    scores = (logits if centre is None else logits - centre) / temperature
    if kind == "hardmax":
        return Targets(nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype), scores, hard=True)
    return Targets(scores.softmax(-1), scores)


def cls_loss(student: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy over all pairs of a teacher's view and another view of the student (iBOT eq. 1, DINO eq. 3).

    The pairs of one student view share its logsumexp, and their inner products add up to one with the sum of targets.

    Args:
        student: (V, B, K) logits of every view, the G global ones first.
        targets: (G, B, K) the teacher's.
        temperature: the student's.
    """
    views, batch, _ = student.shape
    count = len(targets)
    scores = student / temperature
    total = targets.sum(0)
    globals_, locals_ = scores[:count], scores[count:]
    log_partition = torch.logsumexp(scores, -1).sum(1)
    loss = (count - 1) * log_partition[:count].sum() + count * log_partition[count:].sum()
    loss = loss - ((total - targets) * globals_).sum() - (total * locals_).sum()
    return loss / (batch * count * (views - 1))


def patch_losses(student: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """(M,) cross-entropies of patch tokens (iBOT eq. 2): student's logits (M, K) against targets (M, K)."""
    scores = student / temperature
    return torch.logsumexp(scores, -1) - (targets * scores).sum(-1)


class Centre(nn.Module):
    """Running mean of a kind of teacher outputs, subtracted before their softmax (DINO eq. 4).

    Args:
        width: K.
        momentum: weight of the past.
    """

    def __init__(self, width: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(width))

    @torch.no_grad()
    def update(self, batch_mean: Tensor) -> None:
        """Moves towards the mean (K,) of this batch, averaged over ranks that each have as many samples."""
        if distributed.world_size() > 1:
            batch_mean = batch_mean / distributed.world_size()
            torch.distributed.all_reduce(batch_mean)
        self.mean.mul_(self.momentum).add_(batch_mean, alpha=1 - self.momentum)
