"""What a classifier answers to the images of a split, in the classes of the test set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.data.loading import explain_worker_death, image_loader
from ibot_eval.data.splits import few
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.extraction import check_loading, default_workers
from ibot_eval.finetuning.memory import is_out_of_memory

if TYPE_CHECKING:
    from ibot_eval.data.splits import ImageSplit
    from ibot_eval.protocol import Session


class Classifies(Protocol):
    """What :func:`answers` needs of a classifier."""

    def logits(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) normalised -> (B, C)."""
        ...


@dataclass(frozen=True)
class Reading:
    """How logits are read."""

    columns: np.ndarray
    """(K,) int64, the logits among which the largest wins; the softmax is over these alone."""
    labels: np.ndarray
    """(K,) int64, the class of the test set that each stands for; -1 for none, which is always wrong."""

    def decide(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C) logits -> (B,) labels, int64, and (B,) float64 probabilities of the winning logits, there."""
        columns, labels = (torch.from_numpy(array).to(logits.device) for array in (self.columns, self.labels))
        confidence, place = logits[:, columns].softmax(1, dtype=torch.float64).max(1)
        return labels[place], confidence


@dataclass(frozen=True)
class Answers:
    """Of the n images that could be decoded, in the order of the split; the same on every rank."""

    indices: np.ndarray
    """(n,) int64, into the split."""
    labels: np.ndarray
    """(n,) int64, the right ones."""
    predicted: np.ndarray
    """(n,) int64, labels, or -1."""
    confidence: np.ndarray
    """(n,) float64, probability of the winning logit, 0 to 1."""
    unreadable: list[str]
    """Ids of the images that could not be decoded."""

    @property
    def right(self) -> np.ndarray:
        """(n,) bool."""
        return self.predicted == self.labels


def restricted_to_data(classes: Sequence[int] | np.ndarray, class_names: Sequence[str]) -> Reading:
    """Only the logits of classes that the data have.

    Args:
        classes: for each logit, its index into ``class_names``, -1 for a class that the data lack.
        class_names: those of the data.

    Raises:
        ConfigError: the classifier lacks a class of the data.
    """
    classes = np.asarray(classes, np.int64)
    missing = np.setdiff1d(np.arange(len(class_names)), classes)
    if len(missing):
        raise ConfigError(
            f"the classifier lacks {len(missing)} of the {len(class_names)} classes of the data: "
            f"{few((class_names[int(i)] for i in missing), 5)}",
            where="--head",
            todo="use a classifier that knows them, such as one of all 1000 classes of ImageNet",
        )
    columns = np.flatnonzero(classes >= 0)
    return Reading(columns, classes[columns])


def own_share(count: int) -> list[int]:
    """Which of ``count`` images this rank takes: neighbours, since what comes next to it is often near on the disk."""
    rank, world = distributed.rank(), distributed.world_size()
    return list(range(count * rank // world, count * (rank + 1) // world))


def answers(classifier: Classifies, split: ImageSplit, reading: Reading, session: Session, title: str = "") -> Answers:
    """Classify every image once. With several processes each forwards a share; a collective call then.

    Args:
        classifier: gives logits.
        split: images with labels.
        reading: of the logits.
        session: device, transform and engine.
        title: of the progress bar; the split's name by default.

    Raises:
        BadImage: an image that cannot be decoded, unless --bad-images is skip.
        DataError: logits that are not finite.
        ConfigError: batches of no images, or too little memory for them.
    """
    transform, engine, settings = session.transform, session.engine, session.data_settings
    assert transform is not None
    assert engine is not None
    assert settings is not None
    check_loading(engine.batch_size, engine.workers)
    own, size = own_share(len(split)), engine.batch_size
    batches = [own[start : start + size] for start in range(0, len(own), size)]
    workers = default_workers(session.device) if engine.workers is None else engine.workers

    def classified() -> tuple[Tensor, Tensor]:
        # A row: whether the image was read, its label predicted, and the confidence in it.
        rows, indices = [torch.zeros(0, 3, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
        cuda = session.device.type == "cuda"
        loader = image_loader(split, transform, batches, workers, bad_images=settings.bad_images, pin_memory=cuda)
        show = session.progress and distributed.is_main()
        bar = tqdm(total=len(own), desc=title or split.name, unit="image", disable=not show, leave=False, delay=1)
        with (
            explain_memory(size),
            explain_worker_death(),
            closing(loader),
            bar,
            torch.inference_mode(),
        ):
            for batch in loader:
                if len(batch.indices):
                    images = transform.normalize(batch.images.to(session.device, non_blocking=True))
                    logits = classifier.logits(images)
                    check_finite(logits, [split.image_ids[int(i)] for i in batch.indices], engine.precision)
                    predicted, confidence = reading.decide(logits)
                    rows.append(torch.stack([torch.ones_like(confidence), predicted.double(), confidence], 1).cpu())
                rows.append(torch.zeros(len(batch.bad), 3, dtype=torch.float64))
                indices += [batch.indices, torch.tensor([index for index, _ in batch.bad], dtype=torch.int64)]
                bar.update(len(batch.indices) + len(batch.bad))
        return torch.cat(rows), torch.cat(indices)

    gathered = distributed.gather_rows(*distributed.everywhere(classified), len(split)).numpy()
    read = np.flatnonzero(gathered[:, 0])
    return Answers(
        indices=read,
        labels=np.asarray(split.labels)[read],
        predicted=gathered[read, 1].astype(np.int64),
        confidence=gathered[read, 2],
        unreadable=[split.image_ids[int(i)] for i in np.flatnonzero(gathered[:, 0] == 0)],
    )


def check_finite(logits: Tensor, ids: Sequence[str], precision: str) -> None:
    """Raises DataError unless all of (B, C) are finite, naming the image."""
    wrong = torch.nonzero(~torch.isfinite(logits).all(1)).flatten()
    if len(wrong):
        raise DataError(
            f"the logits of {ids[int(wrong[0])]} are NaN or infinite",
            where=f"precision {precision}",
            todo="use --precision fp32" if precision == "fp16" else "look at the checkpoint with `ibot-eval inspect`",
        )


@contextmanager
def explain_memory(batch_size: int) -> Iterator[None]:
    """Turns torch's report of too little memory into a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"memory ran out with --batch-size {batch_size}: {str(error).splitlines()[0]}",
            todo=f"use --batch-size {batch_size // 2}; the numbers stay the same"
            if batch_size > 1
            else "choose a device with more free memory (other programs may hold it)",
        ) from error
