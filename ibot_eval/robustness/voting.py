"""The weighted vote of the nearest training images as a classifier of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ibot_eval.cache import BankCache
from ibot_eval.data.splits import few
from ibot_eval.errors import ConfigError
from ibot_eval.extraction import extract_banks
from ibot_eval.metrics.votes import cumulative_votes
from ibot_eval.neighbors import Gallery
from ibot_eval.probes.labelled import require_labels

if TYPE_CHECKING:
    from ibot_eval.features import FeatureRequest
    from ibot_eval.protocol import Session

NO_VOTE = -1e4
"""Logit of a class that no neighbour voted for; a softmax makes 0 of it."""


@dataclass(frozen=True)
class Vote:
    """(B, D) features -> (B, C) logarithms of the votes, on the device of the features."""

    gallery: Gallery
    voters: Tensor
    """(n,) int64 on the CPU, 0 … C - 1: which class each item votes for."""
    k: int
    temperature: float
    classes: int

    def __call__(self, features: Tensor) -> Tensor:
        # The votes of a batch are few, and on the CPU they are added in the order of the k-NN protocol.
        similarities, indices = (part.cpu() for part in self.gallery.nearest(features))
        (votes,) = cumulative_votes(similarities, self.voters[indices], [self.k], self.temperature, self.classes)
        logits = torch.where(votes > 0, votes.log(), NO_VOTE)
        logits[~torch.isfinite(similarities).all(1)] = torch.nan
        return logits.float().to(features.device)


def neighbours_of_train(
    session: Session, request: FeatureRequest, k: int, temperature: float
) -> tuple[Vote, np.ndarray, list[str]]:
    """The vote of the train split's images. A collective call: their features are extracted, or reused.

    Args:
        session: with a loaded checkpoint, data, a transform and an engine.
        request: features of the train split that queries are compared with.
        k: neighbours; the whole train split where it is smaller and k was not given by hand.
        temperature: of the vote.

    Returns:
        the vote, the (C,) labels that its logits stand for, and warnings.

    Raises:
        ConfigError: no train split, or k larger than it.
        DataError: a train split without labels, or with images that cannot be read.
    """
    loaded, data, engine, settings = session.loaded, session.data, session.engine, session.data_settings
    assert loaded is not None
    assert data is not None
    assert engine is not None
    assert settings is not None
    assert session.transform is not None
    if "train" not in data.splits:
        raise ConfigError(
            "the data have no train split whose images could vote",
            where="--head knn",
            todo="train a head with `ibot-eval linear --save-head` and give its run folder: --head RUN",
        )
    train = data.splits["train"]
    require_labels(np.asarray(train.labels), train.image_ids, "train", "the vote of neighbours")
    banks, stats = extract_banks(
        [request],
        loaded,
        data.splits,
        session.transform,
        BankCache(engine.cache),
        device=session.device,
        precision=engine.precision,
        batch_size=engine.batch_size,
        workers=engine.workers,
        bad_images=settings.bad_images,
        progress=session.progress,
        cacheable=loaded.cacheable,
    )
    bank, warnings = banks[request], []
    if stats.skipped.get("train"):
        skipped = stats.skipped["train"]
        warnings.append(f"unreadable images of the train split, left out: {len(skipped)} ({few(skipped, 3)})")
    if k > len(bank) and "k" not in session.asked:
        warnings.append(f"k = {len(bank)} is used, since the train split has no more images")
        k = len(bank)
    gallery = Gallery(bank.features, k, device=session.device, ids=bank.image_ids)
    classes, voters = np.unique(np.asarray(bank.labels), return_inverse=True)
    vote = Vote(gallery, torch.from_numpy(voters), k, temperature, len(classes))
    return vote, classes, warnings
