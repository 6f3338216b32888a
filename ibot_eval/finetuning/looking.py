"""Accuracies while a run goes on, and the weights of the epoch that is best on held-out images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import DataError
from ibot_eval.finetuning.augmentation import TrainTransform
from ibot_eval.finetuning.evaluation import Evaluation, evaluate
from ibot_eval.image_pass import Precision


@dataclass(frozen=True)
class Images:
    """What a run sees."""

    train: ImageSplit
    """All of them labelled, none of them held out."""
    test: ImageSplit
    held_out: ImageSplit | None
    """Part of train that the reported epoch is chosen on."""
    classes: np.ndarray
    """(C,) int64 ascending: the labels that the classifier's outputs stand for, which are those of train."""
    augmentation: TrainTransform
    transform: EvalTransform
    """Of held-out and test images."""
    workers: int = 0
    """Data-loading processes per process."""
    bad_images: Literal["stop", "skip"] = "stop"
    """Whether an image that cannot be decoded stops the run; else another is trained on, and none tested, instead."""


class Look(NamedTuple):
    """Top-1 after an epoch, in percent."""

    epoch: int
    """From 1."""
    test: float
    held_out: float | None


class Looks:
    """All looks of a run. Every method is a collective.

    Args:
        images: of the run.
        device, precision, batch_size: of the forward passes.
    """

    def __init__(self, images: Images, device: torch.device, precision: Precision, batch_size: int) -> None:
        self.images, self.device, self.batch_size = images, device, batch_size
        self.precision: Precision = precision
        self.all: list[Look] = []
        self.best: Look | None = None
        """The first that was best on held-out images; None without such images."""
        self.best_weights: dict[str, Tensor] | None = None
        """Of that epoch, on the CPU; of a network that is shared out, on rank 0."""

    @property
    def reported(self) -> Look:
        """The best on held-out images, or without such images the last, which nobody chose."""
        return self.all[-1] if self.best is None else self.best

    def take(
        self, classifier: nn.Module, epoch: int, weights: Callable[[], Mapping[str, Tensor]]
    ) -> dict[str, float | None]:
        """Looks at test and held-out images after ``epoch`` epochs.

        Args:
            weights: gives the classifier's, which are kept if they are the best.

        Returns:
            what the log is to hold of it.
        """
        tested = self.at(classifier, self.images.test)
        held = None if self.images.held_out is None else self.at(classifier, self.images.held_out).top1
        now = Look(epoch, tested.top1 or 0.0, held)
        self.all.append(now)
        if held is not None and (self.best is None or held > (self.best.held_out or 0.0)):
            copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights().items()}
            self.best, self.best_weights = now, copied
        return {"test_top1": tested.top1, "test_loss": tested.loss, "held_out_top1": held}

    def at(self, classifier: nn.Module, split: ImageSplit) -> Evaluation:
        """What ``classifier`` says about ``split``. Raises DataError where no image of it can be read."""
        result = evaluate(
            classifier,
            split,
            self.images.transform,
            self.images.classes,
            device=self.device,
            precision=self.precision,
            batch_size=self.batch_size,
            workers=self.images.workers,
            bad_images=self.images.bad_images,
        )
        if not len(result.indices):
            raise DataError(f"none of the {len(split)} images of {split.name!r} can be decoded")
        return result

    def state_dict(self) -> dict[str, Any]:
        """For :meth:`load_state_dict`; plain values and tensors."""
        return {
            "all": [list(look) for look in self.all],
            "best": self.best and list(self.best),
            "best_weights": self.best_weights,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave."""
        self.all = [Look(*values) for values in state["all"]]
        self.best = state["best"] and Look(*state["best"])
        self.best_weights = state["best_weights"]
