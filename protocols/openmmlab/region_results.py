"""Scores of a segmentation network on test images, for mmengine's evaluator and for the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS

from ibot_eval.data.label_rule import IGNORED
from ibot_eval.metrics.regions import INTERSECTION, LABELLED, PREDICTED, count_pixels, region_intervals, region_scores
from ibot_eval.protocol import Metric, Predictions


@METRICS.register_module()
class RegionResults(BaseMetric):
    """Counts the pixels of each test image by class. The classes are the data set's.

    Args:
        drawn: paths of images whose predicted maps are kept.
    """

    def __init__(self, drawn: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drawn = frozenset(drawn)

    def process(self, data_batch: Any, data_samples: Sequence[Mapping[str, Any]]) -> None:
        """Takes one batch of samples with ``pred_sem_seg``, ``gt_sem_seg`` and ``img_path``."""
        meta: Any = self.dataset_meta
        for sample in data_samples:
            predicted, label = (
                sample[name]["data"].squeeze(0).cpu().numpy() for name in ("pred_sem_seg", "gt_sem_seg")
            )
            path = sample["img_path"]
            kept = predicted.astype(np.uint8) if path in self.drawn else None
            self.results.append((count_pixels(predicted, label, len(meta["classes"]), IGNORED), path, kept))

    def compute_metrics(self, results: list[tuple[np.ndarray, str, np.ndarray | None]]) -> dict[str, Any]:
        """``miou``, ``macc`` and ``aacc`` in percent, and what they come from.

        Returns:
            these, ``counts`` (n, 3, C) int64 as of :func:`ibot_eval.metrics.regions.count_pixels`, in the order of
            ``results``, and ``maps``: (H, W) uint8 classes by path.
        """
        counts = np.stack([one for one, _, _ in results])
        scores = region_scores(counts.sum(0))
        return {
            **{name: float(getattr(scores, name)) for name in ("miou", "macc", "aacc")},
            "counts": counts,
            "maps": {path: kept for _, path, kept in results if kept is not None},
        }


def metrics(
    counts: np.ndarray, class_names: Sequence[str], params: Mapping[str, Any], *, resamples: int, seed: int
) -> Iterator[Metric]:
    """Means, then the IoU and the accuracy of each class, under the means' names with the class as a parameter.

    Args:
        counts: (n, 3, C), as of :func:`ibot_eval.metrics.regions.count_pixels`.
        params: of all of them.
        resamples: of the images, for 95 % intervals; 0 for none.
    """
    scores = region_scores(counts.sum(0))
    bounds: Mapping[str, Any] = region_intervals(counts, resamples=resamples, seed=seed) if resamples else {}

    def metric(name: str, value: Any, interval: Any, n: int, **more: Any) -> Metric:
        # A class that never occurs has neither.
        low, high = (None, None) if interval is None else (_known(bound) for bound in interval)
        bounded = None if low is None or high is None else (low, high)
        return Metric(name, _known(value), params={**params, **more}, n=n, interval=bounded)

    for name in ("miou", "macc", "aacc"):
        yield metric(name, getattr(scores, name), bounds.get(name), len(counts))
    images = (counts[:, LABELLED] > 0).sum(0)
    for index, label in enumerate(class_names):
        for name, field in (("miou", "iou"), ("macc", "accuracy")):
            interval = bounds[field][:, index] if bounds else None
            yield metric(name, getattr(scores, field)[index], interval, int(images[index]), **{"class": label})


def _known(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def predictions(counts: np.ndarray, image_ids: Sequence[str]) -> Predictions:
    """Scores of each image by itself, and the counts that any other score can be made of.

    Args:
        counts: (n, 3, C), in the order of ``image_ids``.
    """
    each = region_scores(counts)
    values = {
        "image_miou": each.miou,
        "image_aacc": each.aacc,
        "intersection": counts[:, INTERSECTION],
        "predicted": counts[:, PREDICTED],
        "labelled": counts[:, LABELLED],
    }
    return Predictions(list(image_ids), values)
