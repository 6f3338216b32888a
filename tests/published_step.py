"""The published iBOT training step once more, written for plainness: the second witness beside ``pretrain``.

Nothing here comes from the product. The head runs on every token, losses loop over pairs of views, clipping and moving
averages loop over parameters, all in the precision and on the device of the networks that are given.

>>> student = Network.from_state(state, heads=6)  # backbone.*, head.*
>>> teacher = Network.from_state(state, heads=6, masked=False)
>>> step = PublishedStep(student, teacher, StepSettings(steps_per_epoch=100))
>>> step.step(global_crops, local_crops, masks)["loss"]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.published_network import Network


@dataclass(frozen=True)
class StepSettings:
    """Defaults: the published command for ViT-S, at a global batch of 256."""

    steps_per_epoch: int = 5004
    epochs: int = 800
    lr: float = 5e-4
    min_lr: float = 1e-6
    warmup_epochs: int = 10
    weight_decay: tuple[float, float] = (0.04, 0.4)
    momentum: float = 0.996
    teacher_temp: tuple[float, float] = (0.04, 0.07)
    patch_temp: tuple[float, float] = (0.04, 0.07)
    temp_warmup_epochs: int = 30
    student_temp: float = 0.1
    centre_momentum: float = 0.9
    clip: float = 3.0
    freeze_last_layer_epochs: int = 1
    cls_weight: float = 1.0
    patch_weight: float = 1.0
    train_gain: bool = True

    def cosine(self, start: float, end: float, step: int, warmup_epochs: int = 0) -> float:
        """Linear from 0 to ``start``, reached by the last warm-up step, then half a cosine towards ``end``."""
        warmup, total = warmup_epochs * self.steps_per_epoch, self.epochs * self.steps_per_epoch
        if step < warmup:
            return start * step / max(1, warmup - 1)
        return end + (start - end) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2

    def temperature(self, ends: tuple[float, float], epoch: int) -> float:
        if epoch >= self.temp_warmup_epochs:
            return ends[1]
        return ends[0] + (ends[1] - ends[0]) * epoch / max(1, self.temp_warmup_epochs - 1)

    def at(self, step: int) -> dict[str, float]:
        """Everything that follows a schedule, named as in the golden rows."""
        epoch = step // self.steps_per_epoch
        return {
            "epoch": epoch,
            "lr": self.cosine(self.lr, self.min_lr, step, self.warmup_epochs),
            "wd": self.cosine(*self.weight_decay, step),
            "momentum": self.cosine(self.momentum, 1, step),
            "teacher_temp": self.temperature(self.teacher_temp, epoch),
            "teacher_patch_temp": self.temperature(self.patch_temp, epoch),
        }


class PublishedStep:
    """The state of a run (networks, centres, optimiser, steps done) and the step that advances it.

    Args:
        student: trained in place.
        teacher: moved in place; the caller decides what it starts from.
        settings: as above.
    """

    def __init__(self, student: Network, teacher: Network, settings: StepSettings | None = None) -> None:
        self.student, self.teacher, self.settings = student, teacher, settings or StepSettings()
        teacher.requires_grad_(False)
        for last in (student.head.last_layer, student.head.last_layer2):
            if last is not None:
                last.weight_g.requires_grad_(self.settings.train_gain)
        patch_layer = teacher.head.last_layer2 or teacher.head.last_layer
        self.centre_cls = teacher.head.last_layer.weight_v.new_zeros(1, len(teacher.head.last_layer.weight_v))
        self.centre_patch = patch_layer.weight_v.new_zeros(1, 1, len(patch_layer.weight_v))
        trained = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
        plain = [p for name, p in trained if name.endswith(".bias") or p.ndim == 1]
        decayed = [p for name, p in trained if not (name.endswith(".bias") or p.ndim == 1)]
        self.optimiser = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])
        self.done = 0

    def step(
        self, global_crops: Sequence[Tensor], local_crops: Sequence[Tensor], masks: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """One optimiser step.

        Args:
            global_crops: two of (B, 3, S, S).
            local_crops: any number, also none, of (B, 3, s, s).
            masks: bool (B, h, w) for each global crop, True where the student sees the masked embedding.

        Returns:
            Scalars, detached: ``loss`` = ``cls`` + ``patch`` (both already weighted), and ``grad_norm_max``, the
            largest norm of one parameter's gradient before clipping.
        """
        now = self.settings.at(self.done)
        for group, decay in zip(self.optimiser.param_groups, (now["wd"], 0.0), strict=True):
            group["lr"], group["weight_decay"] = now["lr"], decay

        with torch.no_grad():
            teacher_cls, teacher_patch = self.teacher(torch.cat(list(global_crops)))
        student_cls, student_patch = self.student(torch.cat(list(global_crops)), torch.cat(list(masks)))
        if local_crops:
            student_cls = torch.cat([student_cls, self.student(torch.cat(list(local_crops)))[0]])

        cls, patch = self.losses(student_cls, student_patch, teacher_cls, teacher_patch, masks, now)
        self.optimiser.zero_grad()
        (cls + patch).backward()
        largest = self.clip()
        if now["epoch"] < self.settings.freeze_last_layer_epochs:
            for name, parameter in self.student.named_parameters():
                if "last_layer" in name:
                    parameter.grad = None
        self.optimiser.step()
        self.move_teacher(now["momentum"])
        self.done += 1
        return {"loss": (cls + patch).detach(), "cls": cls.detach(), "patch": patch.detach(), "grad_norm_max": largest}

    def losses(
        self,
        student_cls: Tensor,
        student_patch: Tensor,
        teacher_cls: Tensor,
        teacher_patch: Tensor,
        masks: Sequence[Tensor],
        now: Mapping[str, float],
    ) -> tuple[Tensor, Tensor]:
        """The two losses (iBOT eqs. 2 and 3), then the centres' update from the same teacher logits."""
        count = len(masks[0])
        views = (student_cls / self.settings.student_temp).split(count)
        cls_targets = ((teacher_cls - self.centre_cls) / now["teacher_temp"]).softmax(-1).split(count)
        patch_targets = ((teacher_patch - self.centre_patch) / now["teacher_patch_temp"]).softmax(-1).split(count)
        patch_views = (student_patch / self.settings.student_temp).split(count)
        cls_terms, patch_terms = [], []
        for target_view, target in enumerate(cls_targets):
            for view, logits in enumerate(views):
                if view != target_view:
                    cls_terms.append(cross_entropy(target, logits).mean())
                    continue
                per_token = cross_entropy(patch_targets[view], patch_views[view])
                mask = masks[view].flatten(1).to(per_token.dtype)
                per_crop = (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)
                patch_terms.append(per_crop.mean())

        keep = self.settings.centre_momentum
        self.centre_cls = keep * self.centre_cls + (1 - keep) * teacher_cls.mean(0, keepdim=True)
        self.centre_patch = keep * self.centre_patch + (1 - keep) * teacher_patch.mean((0, 1), keepdim=True)
        return (
            self.settings.cls_weight * sum(cls_terms, torch.zeros_like(patch_terms[0])) / len(cls_terms),
            self.settings.patch_weight * sum(patch_terms, torch.zeros_like(patch_terms[0])) / len(patch_terms),
        )

    def clip(self) -> Tensor:
        """Scales each parameter's gradient by itself to a norm of at most ``clip``; 0 leaves them alone."""
        norms = []
        for parameter in self.student.parameters():
            if parameter.grad is not None:
                norm = parameter.grad.norm()
                norms.append(norm)
                if self.settings.clip:
                    parameter.grad *= (self.settings.clip / (norm + 1e-6)).clamp(max=1)
        return torch.stack(norms).max()

    @torch.no_grad()
    def move_teacher(self, momentum: float) -> None:
        student = dict(self.student.named_parameters())
        for name, parameter in self.teacher.named_parameters():
            if name in student:
                parameter.copy_(momentum * parameter + (1 - momentum) * student[name])


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """(…, K) probabilities and (…, K) logits -> (…)."""
    return -(target * logits.log_softmax(-1)).sum(-1)
