"""One iBOT step up to its loss: what the networks see, and what becomes of their outputs (iBOT sections 3.1, 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from pretrain.config import ObjectiveSettings
from pretrain.losses import Centre, Targets, cls_loss, patch_losses, teacher_targets
from pretrain.networks import Network, StudentOutputs, Tokens, prototypes
from pretrain.tokenizers import Tokenizer


@dataclass
class Views:
    """The crops of B images on the device, crop-major: all images' first crop, then all their second …"""

    globals: Tensor
    """(G * B, 3, S, S) normalised."""
    batch: int
    """B."""
    locals: Tensor | None = None
    """(L * B, 3, s, s)."""
    masks: Tensor | None = None
    """(G * B, h, w) bool, patches the student does not see; None where nothing is ever masked."""
    positions: Tensor | None = None
    """(M,) int64 masked positions in the G * B * h * w patches, padded."""
    weights: Tensor | None = None
    """(M,) float32: 1 / (masked patches of the crop * crops); 0 for padding."""
    local_masks: Tensor | None = None
    local_positions: Tensor | None = None
    local_weights: Tensor | None = None
    """Likewise for the local crops, where they are masked."""
    boxes: Tensor | None = None
    """(G * B, 5) float32 left, top, width and height of each global crop in pixels of its image, and 1 where the crop
    was flipped; needed for matching by position."""


class Temperatures(NamedTuple):
    """Of the teacher in this step."""

    cls: float
    patch: float


class StepResult(NamedTuple):
    """Scalars on the device, float32, unless a shape is given."""

    loss: Tensor
    """What is differentiated; the others are detached."""
    cls_loss: Tensor
    """0 where its weight is 0."""
    patch_loss: Tensor
    patch_loss_per_token: Tensor
    """Mean over masked tokens, whichever crop they lie in."""
    cls_mean: Tensor
    """(K,) mean of the teacher's [CLS] logits."""
    patch_mean: Tensor | None
    """(K,) mean of the logits of all its patches."""
    targets: Targets
    """(G, B, K) of [CLS]."""
    patch_targets: Targets | None
    """(M, K)"""
    weights: Tensor | None
    """(M,) of the patch losses."""
    student_cls: Tensor
    """(V * B, K) logits."""


class IBOT:
    """The losses of student and teacher, and the two centres.

    Args:
        student: a :class:`pretrain.networks.Student`, or its data-parallel wrapper.
        teacher: of the same family.
        tokenizer: gives the targets of patches; None where patches have no loss.
        settings: of the objective.
        device: of the networks.
    """

    def __init__(
        self,
        student: Callable[..., StudentOutputs],
        teacher: Network,
        tokenizer: Tokenizer | None,
        settings: ObjectiveSettings,
        device: torch.device,
    ) -> None:
        self.student, self.teacher, self.tokenizer, self.settings = student, teacher, tokenizer, settings
        self.centres = nn.ModuleDict({"cls": Centre(teacher.head.num_prototypes, settings.centre_momentum)})
        if tokenizer is not None:
            self.centres["patch"] = Centre(tokenizer.num_words, settings.patch_centre_momentum)
        self.centres.to(device)

    def losses(self, views: Views, temperatures: Temperatures) -> StepResult:
        """Both passes and the loss of one batch; changes nothing."""
        goal = self.settings
        with torch.no_grad():
            tokens = self.teacher.trunk(views.globals)
            cls_logits = prototypes(self.teacher.head.last_layer, self.teacher.head.bottleneck_cls(tokens.cls))
            centre = self._centre("cls")
            targets = teacher_targets(cls_logits.unflatten(0, (-1, views.batch)), centre, temperatures.cls)
        dense = self.tokenizer is not None and goal.patch_objective != "mim"
        positions, weights = _everywhere(tokens.patches) if dense else (views.positions, views.weights)
        student = self.student(
            views.globals,
            views.locals if goal.cls_weight > 0 or views.local_positions is not None else None,
            views.masks,
            None if self.tokenizer is None else positions,
            views.local_masks,
            None if self.tokenizer is None else views.local_positions,
            dense,
        )
        loss = cls_logits.new_zeros(())
        across = patch = per_token = loss
        if goal.cls_weight > 0:
            across = cls_loss(student.cls.unflatten(0, (-1, views.batch)), targets.probabilities, goal.student_temp)
            loss = loss + goal.cls_weight * across
        patch_targets, patch_mean = None, None
        if self.tokenizer is not None and student.patches is not None and weights is not None:
            with torch.no_grad():
                outputs = self.tokenizer.patches(views.globals, tokens)
                patch_mean = outputs.mean()
                asked = positions
                if dense:
                    asked, weights = self._match(tokens, student.tokens, views)
                assert asked is not None  # as there are weights
                logits = outputs.logits_at(asked)
                if views.local_positions is not None:
                    logits, patch_mean, weights = self._with_locals(views, logits, patch_mean, weights)
                patch_targets = teacher_targets(logits, self._centre("patch"), temperatures.patch, goal.targets)
            losses = patch_losses(student.patches, patch_targets.probabilities, goal.student_temp)
            patch = (losses * weights).sum()
            valid = (weights > 0).to(losses.dtype)
            per_token = (losses.detach() * valid).sum() / valid.sum().clamp(min=1)
            loss = loss + goal.patch_weight * patch
        return StepResult(
            loss=loss,
            cls_loss=across.detach(),
            patch_loss=patch.detach(),
            patch_loss_per_token=per_token,
            cls_mean=cls_logits.mean(0),
            patch_mean=patch_mean,
            targets=targets,
            patch_targets=patch_targets,
            weights=weights,
            student_cls=student.cls.detach(),
        )

    def update_centres(self, cls_mean: Tensor, patch_mean: Tensor | None) -> None:
        """Moves both centres towards the batch's means; after the loss, which uses the centres of the step before."""
        cast(Centre, self.centres["cls"]).update(cls_mean)
        if patch_mean is not None:
            cast(Centre, self.centres["patch"]).update(patch_mean)

    def _centre(self, kind: str) -> Tensor | None:
        wanted = self.settings.centring if kind == "cls" else self.settings.patch_centring
        return cast(Centre, self.centres[kind]).mean if wanted else None

    def _with_locals(
        self, views: Views, logits: Tensor, mean: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds masked local crops (Figure 7c): the teacher has to see them, and every crop counts alike."""
        assert views.locals is not None
        assert self.tokenizer is not None
        assert views.local_positions is not None
        assert views.local_weights is not None
        outputs = self.tokenizer.patches(views.locals, self.teacher.trunk(views.locals))
        crops = len(views.globals) + len(views.locals)
        share = len(views.globals) / crops
        patches = views.globals.shape[-1] ** 2 * share, views.locals.shape[-1] ** 2 * (1 - share)
        of_globals = patches[0] / sum(patches)
        return (
            torch.cat([logits, outputs.logits_at(views.local_positions)]),
            of_globals * mean + (1 - of_globals) * outputs.mean(),
            torch.cat([share * weights, (1 - share) * views.local_weights]),
        )

    def _match(self, tokens: Tokens, student: Tensor | None, views: Views) -> tuple[Tensor, Tensor]:
        """For every patch of a global view its nearest in the next global view (iBOT appendix E, after DenseCL).

        Returns:
            (G * B * N,) flat positions, and weights of the losses: by position, only patches that the other view shows
            too count, a mean over those of a crop and then over crops.
        """
        count, length = len(tokens.patches), tokens.patches.shape[1]
        other = torch.arange(count, device=tokens.patches.device).roll(-views.batch)
        if self.settings.patch_objective == "feature":
            assert student is not None
            # In bfloat16, similarities near 1 tie.
            with torch.autocast(student.device.type, enabled=False):
                mine = nn.functional.normalize(student.detach().float(), dim=-1)
                theirs = nn.functional.normalize(tokens.patches[other].float(), dim=-1)
                nearest = torch.bmm(mine, theirs.transpose(1, 2)).argmax(-1)
            shared = torch.ones_like(nearest, dtype=torch.bool)
        else:
            assert views.boxes is not None
            places, box = patch_places(views.boxes, length), views.boxes[other, None]
            # Not by a matrix product, whose reduced precision on GPUs is pixels wide.
            exact = "donot_use_mm_for_euclid_dist"
            nearest = torch.cdist(places, places[other], compute_mode=exact).argmin(-1)
            shared = ((places >= box[..., :2]) & (places <= box[..., :2] + box[..., 2:4])).all(-1)
        weights = shared / (shared.sum(1, keepdim=True).clamp(min=1) * count)
        return (nearest + other[:, None] * length).flatten(), weights.flatten()


def patch_places(boxes: Tensor, length: int) -> Tensor:
    """(n, length, 2) x and y of patch centres in the pixels of their image, for crops ``boxes`` (n, 5)."""
    side = round(length**0.5)
    line = (torch.arange(side, device=boxes.device) + 0.5) / side
    left, top, width, height, flipped = boxes.unbind(1)
    x = torch.where(flipped[:, None] > 0.5, 1 - line, line) * width[:, None] + left[:, None]
    y = line * height[:, None] + top[:, None]
    return torch.stack([x[:, None, :].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)], -1).flatten(1, 2)


def _everywhere(patches: Tensor) -> tuple[Tensor, Tensor]:
    count = patches.shape[0] * patches.shape[1]
    return torch.arange(count, device=patches.device), patches.new_full((count,), 1 / count, dtype=torch.float32)
