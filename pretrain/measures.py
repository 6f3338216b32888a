"""What a step says about how the run is going."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ibot_eval import distributed
from pretrain.ibot import StepResult
from pretrain.losses import cls_loss


@torch.no_grad()
def measures(result: StepResult, norms: Tensor, student_temp: float) -> dict[str, float]:
    """Means over ranks of the losses, the teacher's entropy and the KL of student from teacher (DINO section 5.3).

    A cross-entropy is the targets' entropy plus the KL, and every target enters as many pairs as any other, so the KL
    of [CLS] is its loss less the mean entropy. Entropies of patches are means over masked tokens.

    Args:
        result: of the last forward pass of the step.
        norms: (n,) gradient norms before clipping.
        student_temp: the student's temperature.
    """
    values: dict[str, Tensor] = {
        "loss": result.loss.detach(),
        "cls_loss": result.cls_loss,
        "patch_loss": result.patch_loss,
        "patch_loss_per_token": result.patch_loss_per_token,
        "teacher_entropy": result.targets.entropy().mean(),
        "gradient_norm": torch.linalg.vector_norm(norms),
    }
    batch = result.targets.probabilities.shape[1]
    student = result.student_cls.unflatten(0, (-1, batch))
    if student.shape[0] > 1:
        across = cls_loss(student, result.targets.probabilities, student_temp)
        values["kl"] = across - values["teacher_entropy"]
    patches = result.patch_targets
    if patches is not None and result.weights is not None:
        # Sums, for ranks have different numbers of masked tokens, and some have none.
        valid = (result.weights > 0).to(torch.float32)
        values["masked_tokens"] = valid.sum()
        values["patch_entropy"] = (patches.entropy() * valid).sum()
        values["patch_loss_per_token"] = result.patch_loss_per_token * valid.sum()
    stacked = torch.stack([value.to(torch.float32) for value in values.values()])
    if distributed.world_size() > 1:
        torch.distributed.all_reduce(stacked)
        stacked = stacked / distributed.world_size()
    named = dict(zip(values, stacked.tolist(), strict=True))
    if patches is not None:
        # A batch without a masked token says nothing about patches; a 0 would read as a collapse.
        tokens = named.pop("masked_tokens") or math.nan
        for name in ("patch_loss_per_token", "patch_entropy"):
            named[name] /= tokens
        # A hard target has no entropy of its own.
        own = 0.0 if patches.hard else named["patch_entropy"]
        named["patch_kl"] = named["patch_loss_per_token"] - own
    return named


class EpochPredictions:
    """Arg-max of the teacher's and the student's [CLS] outputs over an epoch, for NMI, ARI and FMI against labels.

    As in the published code the teacher's first global view is compared with labels, and agreement is how often the
    student's second view says the same as the teacher's first.
    """

    def __init__(self) -> None:
        self._teacher: list[Tensor] = []
        self._agreed: list[Tensor] = []
        self._labels: list[Tensor] = []

    @torch.no_grad()
    def add(self, result: StepResult, labels: Tensor) -> None:
        """Keeps a batch's arg-max on the device; labels (B,) int64 may be anywhere."""
        teacher = result.targets.scores[0].argmax(-1)
        student = result.student_cls.unflatten(0, (-1, len(labels)))
        self._teacher.append(teacher)
        self._agreed.append((student[min(1, len(student) - 1)].argmax(-1) == teacher).to(torch.float32))
        self._labels.append(labels.clone())  # not a view of page-locked memory, which is wanted for the next batches

    def state(self) -> dict[str, Tensor]:
        """On the CPU, for a checkpoint."""
        parts = {"teacher": self._teacher, "agreed": self._agreed, "labels": self._labels}
        # Part by part: what a checkpoint brought back is on the CPU already.
        return {name: torch.cat([part.cpu() for part in tensors]) for name, tensors in parts.items() if tensors}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, tensors in (("teacher", self._teacher), ("agreed", self._agreed), ("labels", self._labels)):
            tensors[:] = [state[name]] if name in state else []

    def finish(self) -> dict[str, float]:
        """nmi, ari and fmi where any image has a label, and agreement, in percent; starts anew. Collective."""
        from ibot_eval.metrics import clustering

        gathered = distributed.gather_objects(self.state())
        self.restore({})
        parts = {name: torch.cat([state[name] for state in gathered]) for name in gathered[0]}
        if not parts:
            return {}
        found = {"agreement": 100 * parts["agreed"].mean().item()}
        known = parts["labels"] >= 0
        if bool(known.any()):
            labels, clusters = parts["labels"][known].numpy(), parts["teacher"][known].numpy()
            for name in ("nmi", "ari", "fmi"):
                found[name] = getattr(clustering, name)(labels, clusters)
        return found


def finite_flags(result: StepResult, images: Tensor) -> list[tuple[str, Tensor]]:
    """What may turn out not finite, in the order in which it is computed, and a bool scalar each, True if finite."""
    named = [
        ("the normalised images", images),
        ("the teacher's [CLS] outputs", result.targets.scores),
        ("the teacher's patch outputs", None if result.patch_targets is None else result.patch_targets.scores),
        ("the student's [CLS] outputs", result.student_cls),
        ("the [CLS] loss", result.cls_loss),
        ("the patch loss", result.patch_loss),
        ("the loss", result.loss),
    ]
    return [(name, _all_finite(tensor)) for name, tensor in named if tensor is not None]


def _all_finite(tensor: Tensor) -> Tensor:
    # One pass and no tensor of its size; what is looked at here is far from sums that leave float32.
    return torch.isfinite(tensor.detach().sum(dtype=torch.float32))
