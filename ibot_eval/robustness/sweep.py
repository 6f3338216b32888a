"""One pass over the images of a split for all damage: decoded once, then damaged and classified in every way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.data.loading import explain_worker_death, image_loader
from ibot_eval.data.splits import few
from ibot_eval.errors import DataError
from ibot_eval.extraction import check_loading, default_workers
from ibot_eval.probes.labelled import unknown_classes
from ibot_eval.robustness.answers import explain_memory

if TYPE_CHECKING:
    from ibot_eval.data.splits import ImageSplit
    from ibot_eval.protocol import Session


@dataclass(frozen=True)
class Damaged:
    """A batch after one kind of damage."""

    images: Tensor
    """(B, 3, H, W) float, normalised."""
    loss: Tensor | None = None
    """(B,) share of each image that was removed, 0 to 1; None where nothing was."""
    kept: Tensor | None = None
    """(B, N) bool, the patches that a network may see; None for all."""


class Damage(Protocol):
    """All that is done to images, in a fixed order."""

    def __len__(self) -> int:
        """How many ways there are, at least one."""
        ...

    def __call__(self, images: Tensor, indices: Tensor) -> Iterator[Damaged]:
        """Each way in turn, of (B, 3, H, W) clean normalised images and their (B,) indices in the split."""
        ...


@dataclass(frozen=True)
class Swept:
    """Of the n images that could be decoded, in the order of the split; the same on every rank."""

    indices: np.ndarray
    """(n,) int64, into the split."""
    labels: np.ndarray
    """(n,) int64, the right ones."""
    clean: np.ndarray
    """(n,) int64, labels predicted for the images as they are; -1 for a class that the data lack."""
    predicted: np.ndarray
    """(n, V) int64, likewise for each of the V ways of damage."""
    loss: np.ndarray
    """(n, V) float64, shares of the image that were removed, 0 to 1."""
    unreadable: list[str]
    """Ids of the images that could not be decoded."""

    def notes(self, classes: Sequence[int] | np.ndarray | Tensor, class_names: Sequence[str]) -> list[str]:
        """Warnings about images that were left out, and about classes that the classifier lacks."""
        notes = []
        if self.unreadable:
            notes.append(f"unreadable images, left out: {len(self.unreadable)} ({few(self.unreadable, 3)})")
        known = torch.as_tensor(classes).unique().cpu().numpy()
        unknown = unknown_classes(self.labels, known, class_names, "the classifier")
        return [*notes, unknown] if unknown else notes


def sweep(
    classify: Callable[[Damaged], Tensor],
    classes: Sequence[int] | np.ndarray | Tensor,
    split: ImageSplit,
    damage: Damage,
    session: Session,
    name: str,
) -> Swept:
    """Classify every image, clean and damaged. With several processes each takes a share; a collective call then.

    The clean images are classified once, and whatever a level of no damage is called, its numbers are these.

    Args:
        classify: a batch on the session's device -> (B, C) logits.
        classes: (C,) which label each logit stands for, -1 for none.
        split: images with labels.
        damage: what is done to them.
        session: device, transform and engine.
        name: for the progress bar.

    Raises:
        BadImage: an image that cannot be decoded, unless --bad-images is skip.
        DataError: an image without a label, an image file that may not be read, or logits that are not finite.
        ConfigError: batches of no images, or too little memory for them.
    """
    transform, engine, settings = session.transform, session.engine, session.data_settings
    assert transform is not None
    assert engine is not None
    assert settings is not None
    check_loading(engine.batch_size, engine.workers)
    unlabelled = np.flatnonzero(np.asarray(split.labels) < 0)
    if len(unlabelled):
        raise DataError(
            f"{len(unlabelled)} of {len(split)} images of {split.name} have no label, the first being "
            f"{split.image_ids[int(unlabelled[0])]}",
            todo="put images into a folder per class, or give --test-labels",
        )
    ways = len(damage)
    names = torch.as_tensor(classes).to(session.device, torch.int64)
    world, size = distributed.world_size(), engine.batch_size
    own = list(range(len(split)))[distributed.rank() :: world]
    batches = [own[start : start + size] for start in range(0, len(own), size)]
    workers = default_workers(session.device) if engine.workers is None else engine.workers

    def classified() -> tuple[Tensor, Tensor]:
        # A row: whether the image was read, its label predicted as it is and after each damage, and the losses.
        rows = [torch.zeros(0, 2 + 2 * ways, dtype=torch.float64)]
        indices = [torch.zeros(0, dtype=torch.int64)]
        loader = image_loader(
            split,
            transform,
            batches,
            workers,
            bad_images=settings.bad_images,
            pin_memory=session.device.type == "cuda",
        )
        bar = _bar(len(split) * (1 + ways), name, session.progress and distributed.is_main())
        with explain_memory(engine.batch_size), explain_worker_death(), closing(loader), bar, torch.inference_mode():
            for batch in loader:
                # Rank 0 speaks for all.
                step = len(batch.indices) * world
                if len(batch.indices):
                    images = transform.normalize(batch.images.to(session.device, non_blocking=True))
                    columns, finite, losses = [], [], []
                    for damaged in _clean_first(damage, images, batch.indices.to(session.device)):
                        logits = classify(damaged).float()
                        finite.append(torch.isfinite(logits).all(1))
                        columns.append(names[logits.argmax(1)])
                        losses.append(logits.new_zeros(len(images)) if damaged.loss is None else damaged.loss)
                        bar.update(min(step, bar.total - bar.n))
                    _check_finite(torch.stack(finite, 1).cpu(), batch.indices, split, engine.precision)
                    parts = [torch.stack(part, 1).cpu().double() for part in (columns, losses[1:])]
                    rows.append(torch.cat([torch.ones(len(images), 1, dtype=torch.float64), *parts], 1))
                rows.append(torch.zeros(len(batch.bad), 2 + 2 * ways, dtype=torch.float64))
                indices += [batch.indices, torch.tensor([index for index, _ in batch.bad], dtype=torch.int64)]
        return torch.cat(rows), torch.cat(indices)

    gathered = distributed.gather_rows(*distributed.everywhere(classified), len(split)).numpy()
    read = np.flatnonzero(gathered[:, 0])
    if not len(read):
        raise DataError(f"no image of {split.name} can be read", todo="look at the files, or choose another split")
    return Swept(
        indices=read,
        labels=np.asarray(split.labels)[read],
        clean=gathered[read, 1].astype(np.int64),
        predicted=gathered[read, 2 : 2 + ways].astype(np.int64),
        loss=gathered[read, 2 + ways :],
        unreadable=[split.image_ids[int(i)] for i in np.flatnonzero(gathered[:, 0] == 0)],
    )


def _clean_first(damage: Damage, images: Tensor, indices: Tensor) -> Iterator[Damaged]:
    yield Damaged(images)
    yield from damage(images, indices)


def _check_finite(finite: Tensor, indices: Tensor, split: ImageSplit, precision: str) -> None:
    """Raises DataError unless all of (B, 1 + V) are True."""
    if finite.all():
        return
    row, way = (int(i) for i in torch.nonzero(~finite)[0])
    raise DataError(
        f"the logits of {split.image_ids[int(indices[row])]} are NaN or infinite"
        + (" after damage" if way else ", undamaged"),
        where=f"split {split.name!r}, precision {precision}",
        todo="use --precision fp32" if precision == "fp16" else "look at the checkpoint with `ibot-eval inspect`",
    )


def _bar(total: int, name: str, shown: bool) -> tqdm[Any]:
    return tqdm(
        total=total,
        desc=name,
        unit="image",
        unit_scale=True,
        file=sys.stderr,
        disable=not shown,
        leave=False,
        # A log file gets a line now and then instead of a redrawn bar.
        mininterval=0.2 if sys.stderr.isatty() else 30,
        smoothing=0.05,
        dynamic_ncols=True,
    )
