"""What a detection run reports: AP with intervals, what became of each image, detections and pictures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ibot_eval.data.coco import CocoSplit
from ibot_eval.files import atomic_write_bytes
from ibot_eval.metrics.average_precision import SIZES, Intervals, Table, bootstrap, precision_table, summary
from ibot_eval.protocol import Artifact, Event, Metric, Predictions, Session, Warning
from protocols.openmmlab.coco_results import Evaluation
from protocols.openmmlab.detection_pictures import draw_example

if TYPE_CHECKING:
    from protocols.detect import DetectConfig

DETECTIONS = "predictions.json"
"""In the run's folder, in COCO's format for results."""
PICTURES = "pictures"


def results(
    evaluation: Evaluation, config: DetectConfig, session: Session, test: CocoSplit, truth: Path, *, masks: bool
) -> Iterator[Event]:
    """Metrics, predictions, and files in the run's folder. On rank 0.

    Args:
        evaluation: of the trained network on ``test``.
        truth: file with the annotations of ``test``.
        masks: whether objects have masks.
    """
    if masks and "mask" not in evaluation.tables:
        yield Warning("the configuration's detector gives no masks: only boxes are measured")
    if not evaluation.detections:
        yield Warning(f"nothing was detected with a score of {config.score_threshold} or above: every AP is 0")
    for kind, table in evaluation.tables.items():
        intervals = bootstrap(table, config.bootstrap, seed=session.seed) if config.bootstrap else None
        yield from _metrics(kind, table, session.class_names, intervals)
    yield _by_image(evaluation, test)
    path = session.output / DETECTIONS
    atomic_write_bytes(path, json.dumps(evaluation.detections).encode())
    # Not "predictions": so is the table called that `compare` reads.
    yield Artifact(path, "log")
    yield from _pictures(evaluation, config.draw, session.output / PICTURES, test, json.loads(truth.read_bytes()))


def _metrics(kind: str, table: Table, names: tuple[str, ...], intervals: Intervals | None) -> Iterator[Metric]:
    n = len(table[0][0].objects)
    values = precision_table(table)

    def metric(name: str, value: float, interval: tuple[float, float] | None, **params: str) -> Metric:
        known = None if np.isnan(value) else value
        return Metric(f"{kind}_{name}", known, params=params, n=n, interval=interval)

    for name, value in summary(values).items():
        interval = intervals.of_summary[name] if intervals else None
        if name in SIZES:
            yield metric("ap", value, interval, size=name)
        else:
            yield metric(name, value, interval)
    for index, name in enumerate(names):
        interval = intervals.of_class[index] if intervals else None
        yield metric("ap", float(values[index, 0].mean()), interval, **{"class": name})


def _by_image(evaluation: Evaluation, test: CocoSplit) -> Predictions:
    """Of each image: objects, detections, and how many of these hit an object at an IoU of 0.5."""
    place = {number: index for index, number in enumerate(evaluation.image_ids)}
    order = np.array([place[int(number)] for number in test.coco_ids])
    n = len(order)
    columns = {"detections": np.zeros(n, dtype=np.int64)}
    for detection in evaluation.detections:
        columns["detections"][place[detection["image_id"]]] += 1
    columns["objects"] = sum((sizes[0].objects for sizes in evaluation.tables["box"]), np.zeros(n, dtype=np.int64))
    for kind, table in evaluation.tables.items():
        hits = [sizes[0].images[sizes[0].hits[0]] for sizes in table]
        columns[f"{kind}_hits50"] = np.bincount(np.concatenate(hits), minlength=n)
    return Predictions(list(test.image_ids), {name: column[order] for name, column in columns.items()})


def _pictures(
    evaluation: Evaluation, number: int, folder: Path, test: CocoSplit, truth: Mapping[str, Any]
) -> Iterator[Artifact]:
    """Of ``number`` images from all over the split."""
    objects: dict[int, list[Any]] = defaultdict(list)
    found: dict[int, list[Any]] = defaultdict(list)
    for annotation in truth["annotations"]:
        objects[annotation["image_id"]].append(annotation)
    for detection in evaluation.detections:
        found[detection["image_id"]].append(detection)
    for index in np.unique(np.linspace(0, len(test) - 1, min(number, len(test))).round().astype(int)):
        image, coco_id = test.path(int(index)), int(test.coco_ids[index])
        path = folder / f"{index:06d}_{image.stem}.png"
        yield Artifact(draw_example(path, image, objects[coco_id], found[coco_id], test.categories), "figure")
