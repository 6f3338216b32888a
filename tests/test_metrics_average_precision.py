"""Average precision against pycocotools, and by hand."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

from ibot_eval.metrics.average_precision import (
    SIZES,
    THRESHOLDS,
    Matches,
    bootstrap,
    class_precision,
    matches_of,
    precision_table,
    summary,
)

CLASSES = 3


def scene(seed: int = 0, images: int = 9) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Objects of all sizes, some of them crowds, and detections near them and elsewhere; scores are all different."""
    rng = np.random.default_rng(seed)
    objects, found = [], []
    for image in range(images):
        for _ in range(int(rng.integers(0, 7))):
            x, y = rng.uniform(0, 200, 2)
            side = rng.choice([12, 60, 150], size=2) * rng.uniform(0.8, 1.2, 2)
            category = int(rng.integers(1, CLASSES + 1))
            box = [float(v) for v in (x, y, *side)]
            objects.append(
                {
                    "id": len(objects) + 1,
                    "image_id": image,
                    "category_id": category,
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": int(rng.random() < 0.15),
                }
            )
            for _ in range(int(rng.integers(0, 3))):
                shifted = np.array(box) + rng.normal(0, 0.06, 4) * np.array([side[0], side[1], *side])
                guess = category if rng.random() < 0.8 else int(rng.integers(1, CLASSES + 1))
                found.append([image, guess, *shifted])
    scores = rng.permutation(len(found)) / len(found) + 0.001
    detections = [
        {
            "image_id": f[0],
            "category_id": f[1],
            "bbox": [float(v) for v in np.maximum(f[2:], 1)],
            "score": float(s),
        }
        for f, s in zip(found, scores, strict=True)
    ]
    truth = {
        "images": [{"id": i, "width": 400, "height": 400} for i in range(images)],
        "categories": [{"id": c, "name": str(c)} for c in range(1, CLASSES + 1)],
        "annotations": objects,
    }
    return truth, detections


def repeated(
    truth: dict[str, Any], detections: list[dict[str, Any]], times: np.ndarray
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The data set in which image ``i`` is there ``times[i]`` times, copies side by side."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    copies: list[dict[str, Any]] = []
    for image, count in zip(truth["images"], times, strict=True):
        for _ in range(count):
            new = len(images)
            images.append({**image, "id": new})
            for a in truth["annotations"]:
                if a["image_id"] == image["id"]:
                    annotations.append({**a, "id": len(annotations) + 1, "image_id": new})
            copies += [{**d, "image_id": new} for d in detections if d["image_id"] == image["id"]]
    return {**truth, "images": images, "annotations": annotations}, copies


def coco_eval(truth: dict[str, Any], detections: list[dict[str, Any]]) -> Any:
    pytest.importorskip("pycocotools")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def in_percent(stats: np.ndarray) -> list[float]:
    """pycocotools' first six numbers; it says -1 where there is nothing to measure."""
    return [float("nan") if value == -1 else 100 * value for value in stats[:6]]


@pytest.mark.parametrize("seed", range(4))
def test_equals_pycocotools(seed: int) -> None:
    truth, detections = scene(seed)
    evaluation = coco_eval(truth, detections)
    values = precision_table(matches_of(evaluation.evalImgs, CLASSES, len(truth["images"])))
    assert list(summary(values).values()) == pytest.approx(in_percent(evaluation.stats), abs=1e-9, nan_ok=True)
    # precision is (T, recalls, classes, sizes, numbers of detections).
    by_class = 100 * evaluation.eval["precision"][..., 2].mean(axis=1).transpose(1, 2, 0)
    np.testing.assert_allclose(values, np.where(by_class < 0, np.nan, by_class), atol=1e-9)
    assert evaluation.stats[0] > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_weights_are_repetitions_of_images(seed: int) -> None:
    truth, detections = scene(seed)
    matches = matches_of(coco_eval(truth, detections).evalImgs, CLASSES, len(truth["images"]))
    times = np.random.default_rng(seed).integers(0, 4, len(truth["images"]))
    expected = coco_eval(*repeated(truth, detections, times))
    values = summary(precision_table(matches, times))
    assert list(values.values()) == pytest.approx(in_percent(expected.stats), abs=1e-9, nan_ok=True)


def matches(hits: list[bool], objects: list[int], images: list[int]) -> Matches:
    at_all = np.tile(np.array(hits, dtype=bool), (len(THRESHOLDS), 1))
    return Matches(np.array(images, dtype=np.int64), at_all, ~at_all, np.array(objects))


def test_a_curve_by_hand() -> None:
    """Right, wrong, right with two objects: precision 1 up to recall 0.5, then 2/3, at 51 and 50 of 101 recalls."""
    values = class_precision(matches([True, False, True], [2], [0, 0, 0]))
    assert values == pytest.approx([100 * (51 + 50 * 2 / 3) / 101] * 10)


def test_nothing_found_is_nought_and_nothing_to_find_is_left_out() -> None:
    assert class_precision(matches([], [3], [])).tolist() == [0] * 10
    assert np.isnan(class_precision(matches([False], [0], [0]))).all()
    table = [[matches([True], [1], [0])] * len(SIZES), [matches([False], [0], [0])] * len(SIZES)]
    values = summary(precision_table(table))
    assert values == pytest.approx(dict.fromkeys(values, 100))


def test_the_interval_of_a_constant_has_no_width_and_that_of_others_has() -> None:
    perfect = [[matches([True, True], [1, 1], [0, 1])] * len(SIZES)]
    found = bootstrap(perfect, 50)
    assert found.of_summary["ap"] == (100, 100)
    assert found.of_class == [(100, 100)]
    half = [[matches([True, False] * 20, [1] * 40, list(range(40)))] * len(SIZES)]
    low, high = bootstrap(half, 200).of_summary["ap"] or (0, 0)
    middle = class_precision(half[0][0])[0]
    assert 0 < low < middle < high < 100
    assert bootstrap(half, 200) == bootstrap(half, 200)
    assert bootstrap([[matches([], [0], [])] * len(SIZES)], 5).of_summary["ap"] is None


def test_refusals() -> None:
    with pytest.raises(ValueError, match="entries"):
        matches_of([None], 1, 1)
    with pytest.raises(ValueError, match="resamples"):
        bootstrap([[matches([True], [1], [0])] * len(SIZES)], 0)
