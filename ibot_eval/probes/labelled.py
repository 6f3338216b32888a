"""Features with labels, checked, as classifiers take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ibot_eval.errors import DataError
from ibot_eval.features import FeatureBank, FeatureRequest, compose

CHECKED_ROWS = 1 << 14
"""Rows looked at together: banks may be larger than memory."""


@dataclass(frozen=True)
class Labelled:
    """Features of a split."""

    features: np.ndarray
    """(n, D) float32, perhaps memory-mapped."""
    labels: np.ndarray
    """(n,) int64, none below 0."""
    image_ids: Sequence[str]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Labelled:
        """Only ``rows`` (indices), in that order."""
        return Labelled(self.features[rows], self.labels[rows], [self.image_ids[int(i)] for i in rows])

    @cached_property
    def classes(self) -> np.ndarray:
        """(C,) int64: the labels that occur, ascending. Classifiers know these only."""
        return np.unique(self.labels)

    def targets(self, classes: np.ndarray) -> np.ndarray:
        """(n,) int64: position of each label in ``classes`` (ascending), -1 where it is not among them."""
        position = np.searchsorted(classes, self.labels)
        known = classes[np.minimum(position, len(classes) - 1)] == self.labels
        return np.where(known, position, -1)


def require_labels(labels: np.ndarray, image_ids: Sequence[str], role: str, who: str) -> None:
    """Raises DataError for a split without images, or with one that has no label; arguments as of :func:`labelled`."""
    if not len(labels):
        raise DataError(f"the {role} split has no images")
    unlabelled = np.flatnonzero(labels < 0)
    if len(unlabelled):
        raise DataError(
            f"{len(unlabelled)} of {len(labels)} images of the {role} split have no label, the first being "
            f"{image_ids[int(unlabelled[0])]}",
            todo=f"{who} needs labels: sort the images into class folders, or give --test-labels",
        )


def labelled(
    banks: Mapping[FeatureRequest, FeatureBank], requests: Sequence[FeatureRequest], role: str, who: str
) -> Labelled:
    """Banks of one split as one matrix of features with labels.

    Args:
        requests: atoms to concatenate, in this order.
        role: what the split is for, for messages: "train", "test" …
        who: what needs the labels, for messages: "linear probing" …

    Raises:
        DataError: no image, one without a label, or features that are not finite (the image is named).
    """
    first = banks[requests[0]]
    labels = np.asarray(first.labels)
    require_labels(labels, first.image_ids, role, who)
    features = compose(banks, requests)
    for start in range(0, len(features), CHECKED_ROWS):
        bad = np.flatnonzero(~np.isfinite(features[start : start + CHECKED_ROWS]).all(axis=1))
        if len(bad):
            raise DataError(
                f"the features of {first.image_ids[start + bad[0]]} ({role} split) are NaN or infinite",
                todo="look at the checkpoint with `ibot-eval inspect`, or use --precision fp32",
            )
    return Labelled(features, labels, first.image_ids)


def unknown_classes(labels: np.ndarray, known: np.ndarray, class_names: Sequence[str], gallery: str) -> str | None:
    """A warning about test images of classes that ``gallery`` (what was learnt from) lacks; None where there are none.

    Args:
        labels: (n,) of the test split.
        known: (C,) ascending, the classes that were learnt.
    """
    missing = ~np.isin(labels, known)
    if not missing.any():
        return None
    return (
        f"{missing.sum()} of {len(labels)} test images count as wrong, since {gallery} has none of their "
        f"{_named(labels[missing], class_names)}"
    )


def _named(labels: np.ndarray, names: Sequence[str], most: int = 10) -> str:
    """``classes a, b and 3 more``."""
    unique = [int(c) for c in np.unique(labels)]
    shown = [names[c] if c < len(names) else str(c) for c in unique[:most]]
    rest = f" and {len(unique) - most} more" if len(unique) > most else ""
    return ("class " if len(unique) == 1 else "classes ") + ", ".join(shown) + rest
