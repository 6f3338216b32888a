"""k-NN accuracy of the teacher while it is being trained, without a trace in the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ibot_eval import distributed
from ibot_eval.backbone import Backbone
from ibot_eval.data.loading import explain_worker_death, image_loader
from ibot_eval.data.splits import Data, ImageSplit, first_per_class
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import DataError
from ibot_eval.metrics.votes import cumulative_votes
from ibot_eval.neighbors import search
from ibot_eval.training.logs import read_log

HEADLINE_K = 20
"""The k of ``knn_top1``, or the nearest to it that was asked for; the same rule as the k-NN protocol's."""
VOTING = 1024
"""Queries whose votes are counted at a time."""


def labelled_splits(data: Data, per_class: int | None = None) -> tuple[ImageSplit, ImageSplit]:
    """Gallery (train) and queries (test) of the probe: the labelled images, of each class the first ``per_class``.

    Call it before the training, so that data without labels is refused then and not an epoch later.

    Raises:
        DataError: a split that is missing or has no labelled image.
    """
    return _labelled(data, "train", per_class), _labelled(data, "test", per_class)


def teacher_knn(
    backbone: Backbone,
    data: Data,
    *,
    device: torch.device,
    transform: EvalTransform,
    batch_size: int = 64,
    workers: int = 0,
    ks: Sequence[int] = (10, 20),
    temperature: float = 0.07,
    per_class: int | None = None,
    autocast: torch.dtype | None = None,
) -> dict[str, float]:
    """Top-1 of the test images by the weighted vote of their nearest train images, as the k-NN protocol computes it.

    A collective: the ranks share the images, and all get the number that one process would. Random states, gradients
    and the mode (training or evaluation) of every module are left as they were.

    Args:
        backbone: the teacher's, on ``device``, neither compiled nor wrapped; the [CLS] token of its last block is used.
        transform: of both splits, as :func:`ibot_eval.data.transforms.eval_transform` makes it.
        batch_size: images per pass and process.
        workers: data-loading processes per process, alive during the probe only; 0 for none.
        ks: numbers of neighbours that vote; those above the gallery's size count as that size.
        temperature: a vote weighs exp(similarity / temperature).
        per_class: see :func:`labelled_splits`.
        autocast: precision of the pass, such as torch.bfloat16; None for float32.

    Returns:
        percent right: ``knn_top1@k=K`` of each k, and ``knn_top1``, that of the k nearest to 20.

    Raises:
        DataError: see :func:`labelled_splits`; an image that cannot be decoded (BadImage); features that are not
            finite.
    """
    gallery, queries = labelled_splits(data, per_class)
    with _evaluating(backbone):
        features = [
            _features(backbone, split, transform, device, batch_size, workers, autocast) for split in (gallery, queries)
        ]
    usable = sorted({min(k, len(gallery)) for k in ks})
    similarities, indices = search(
        features[1],
        features[0],
        usable[-1],
        device=device,
        query_ids=queries.image_ids,
        gallery_ids=gallery.image_ids,
    )
    classes, votes_for = np.unique(gallery.labels, return_inverse=True)
    neighbours = torch.from_numpy(votes_for[indices])
    predicted: list[list[Tensor]] = [[] for _ in usable]
    for start in range(0, len(queries), VOTING):
        part = slice(start, start + VOTING)
        tallies = cumulative_votes(
            torch.from_numpy(similarities[part]), neighbours[part], usable, temperature, len(classes)
        )
        for column, votes in zip(predicted, tallies, strict=True):
            column.append(votes.argmax(1))
    top1 = {
        k: 100 * float((classes[torch.cat(column).numpy()] == queries.labels).mean())
        for k, column in zip(usable, predicted, strict=True)
    }
    headline = min(usable, key=lambda k: (abs(k - HEADLINE_K), k))
    return {f"knn_top1@k={k}": value for k, value in top1.items()} | {"knn_top1": top1[headline]}


def logged_knn(path: Path) -> dict[int, dict[str, float]]:
    """What the log of a run says that the probe found, by step and in order; empty without a log."""
    rows = [row for row in read_log(path) if row.get("event") == "knn"] if path.exists() else []
    return {row["step"]: {name: value for name, value in row.items() if name.startswith("knn")} for row in rows}


def _labelled(data: Data, role: str, per_class: int | None) -> ImageSplit:
    todo = "give --data with labelled train and test splits, or leave the probe off (--knn-every 0)"
    if role not in data.splits:
        raise DataError(f"the k-NN probe needs a {role} split, and there is none", where=data.reference, todo=todo)
    split = data.splits[role]
    labelled = np.flatnonzero(split.labels >= 0)
    if not len(labelled):
        raise DataError(
            f"the k-NN probe needs labels, and no image of the {role} split has one", where=data.reference, todo=todo
        )
    if per_class is not None:
        labelled = labelled[first_per_class(split.labels[labelled], per_class)]
    return split if len(labelled) == len(split) else split.take(labelled)


def _features(
    backbone: Backbone,
    split: ImageSplit,
    transform: EvalTransform,
    device: torch.device,
    batch_size: int,
    workers: int,
    autocast: torch.dtype | None,
) -> np.ndarray:
    """(n, D) float32 [CLS] features of all images, on every rank."""
    starts = range(0, len(split), batch_size)[distributed.rank() :: distributed.world_size()]
    batches = [range(start, min(start + batch_size, len(split))) for start in starts]

    def mine() -> tuple[Tensor, Tensor]:
        rows, indices = [torch.empty(0, backbone.dims[-1])], [torch.empty(0, dtype=torch.int64)]
        loader = image_loader(split, transform, batches, workers, pin_memory=device.type == "cuda")
        with explain_worker_death(), closing(loader):
            for batch in loader:
                images = transform.normalize(batch.images.to(device, non_blocking=True))
                # Not inference_mode: what a network keeps from one pass to the next must stay fit for training.
                with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
                    rows.append(backbone.outputs(images).blocks[-1].cls.float().cpu())
                indices.append(batch.indices)
        return torch.cat(rows), torch.cat(indices)

    # A rank that fails must not leave the others waiting for its features.
    rows, indices = distributed.everywhere(mine)
    return distributed.gather_rows(rows, indices, len(split)).numpy()


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
