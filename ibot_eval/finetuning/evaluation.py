"""What a classifier says about the images of a split."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ibot_eval import distributed
from ibot_eval.data.loading import explain_worker_death, image_loader
from ibot_eval.data.splits import ImageSplit, few
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import DataError
from ibot_eval.finetuning.memory import explain_out_of_memory_in_evaluation
from ibot_eval.image_pass import Precision, autocast, evaluating
from ibot_eval.metrics.accuracy import target_ranks


@dataclass(frozen=True)
class Evaluation:
    """Of the n images that could be decoded, in the order of the split; the same on every rank."""

    indices: np.ndarray
    """(n,) int64, into the split."""
    labels: np.ndarray
    """(n,) int64, the right ones."""
    predicted: np.ndarray
    """(n,) int64, labels."""
    in_top5: np.ndarray
    """(n,) bool, whether the right class is among the five best; False for classes that the classifier lacks."""
    loss: float | None
    """Mean cross entropy, without smoothing, over images of known classes; None where there are none."""
    unreadable: list[str]
    """Ids of the images that could not be decoded."""

    @property
    def top1(self) -> float | None:
        """Percent right; None for no images."""
        return _percent(self.predicted == self.labels)

    @property
    def top5(self) -> float | None:
        """Percent with the right class among the five best; None for no images."""
        return _percent(self.in_top5)


def evaluate(
    classifier: Callable[[Tensor], Tensor],
    split: ImageSplit,
    transform: EvalTransform,
    classes: np.ndarray,
    *,
    device: torch.device,
    precision: Precision = "fp32",
    batch_size: int = 64,
    workers: int = 0,
    bad_images: Literal["stop", "skip"] = "stop",
) -> Evaluation:
    """Classify every image once. With several processes each forwards a share; a collective call then.

    Args:
        classifier: (B, 3, H, W) float32, normalised -> (B, C) logits, on ``device``; a module is put into evaluation
            mode, and back into its own.
        split: images with labels.
        transform: of the images.
        classes: (C,) ascending, the labels that the logits stand for.
        device: of the classifier.
        precision: of the forward pass.
        batch_size: images per forward pass and process.
        workers: data-loading processes per process; they outlast SIGINT and SIGTERM.
        bad_images: 'stop' raises at the first image that cannot be decoded, 'skip' leaves it out and names it.

    Raises:
        BadImage: with 'stop'; on every rank.
        DataError: an image file that may not be read, a worker process that was killed, or logits that are not finite.
        ConfigError: too little memory for ``batch_size`` images.
    """
    own, n = list(range(len(split)))[distributed.rank() :: distributed.world_size()], len(split)
    batches = [own[start : start + batch_size] for start in range(0, len(own), batch_size)]
    position = np.minimum(np.searchsorted(classes, split.labels), len(classes) - 1)
    targets = torch.from_numpy(np.where(classes[position] == split.labels, position, -1))
    modules = [classifier] if isinstance(classifier, nn.Module) else []

    def classified() -> tuple[Tensor, Tensor]:
        rows, indices = [torch.zeros(0, _COLUMNS, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
        loader = image_loader(
            split,
            transform,
            batches,
            workers,
            bad_images=bad_images,
            pin_memory=device.type == "cuda",
            outlast=True,
        )
        with (
            explain_worker_death(),
            explain_out_of_memory_in_evaluation(batch_size),
            closing(loader),
            evaluating(*modules),
        ):
            for batch in loader:
                if len(batch.indices):
                    # Not inference mode: what a network in training keeps of a pass may serve one with gradients.
                    with torch.no_grad(), autocast(device, precision):
                        images = transform.normalize(batch.images.to(device, non_blocking=True))
                        logits = classifier(images).float()
                    _check_finite(logits, batch.indices, split)
                    rows.append(_rows(logits, targets[batch.indices]))
                rows.append(torch.zeros(len(batch.bad), _COLUMNS, dtype=torch.float64))
                indices += [batch.indices, torch.tensor([index for index, _ in batch.bad], dtype=torch.int64)]
        return torch.cat(rows), torch.cat(indices)

    gathered = distributed.gather_rows(*distributed.everywhere(classified), n).numpy()
    read = np.flatnonzero(gathered[:, 0])
    places, in_top5, losses = gathered[read, 1:].T
    losses = losses[~np.isnan(losses)]
    return Evaluation(
        indices=read,
        labels=split.labels[read],
        predicted=classes[places.astype(np.int64)],
        in_top5=in_top5 > 0,
        loss=float(losses.mean()) if len(losses) else None,
        unreadable=[split.image_ids[int(i)] for i in np.flatnonzero(gathered[:, 0] == 0)],
    )


_COLUMNS = 4
"""1 for an image that was read, place of its largest logit, whether the right one is in the best five, loss or NaN."""


def _rows(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, _COLUMNS) float64, on the host."""
    known = targets >= 0
    targets = targets.to(logits.device)
    losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none").cpu().double()
    return torch.stack(
        [
            torch.ones(len(logits), dtype=torch.float64),
            logits.argmax(1).cpu().double(),
            (target_ranks(logits, targets) < 5).cpu().double(),
            torch.where(known, losses, torch.nan),
        ],
        dim=1,
    )


def _check_finite(logits: Tensor, indices: Tensor, split: ImageSplit) -> None:
    bad = indices[~torch.isfinite(logits).all(dim=1).cpu()].tolist()
    if bad:
        names = [split.image_ids[int(i)] for i in bad]
        raise DataError(
            f"the logits of {few(names)} ({split.name} split) are NaN or infinite",
            todo="lower the learning rate, or use --precision bf16 or fp32",
        )


def _percent(right: np.ndarray) -> float | None:
    return 100 * float(right.mean()) if len(right) else None
