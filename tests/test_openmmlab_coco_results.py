"""What is collected of detections, and compared with annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ibot_eval.data.coco import open_coco
from ibot_eval.settings import DataSettings
from tests.dense import prepared
from tests.dense_data import coco_folder

prepared()

from protocols.openmmlab import coco_results  # noqa: E402


def test_a_detector_of_boxes_is_measured_on_data_with_masks(tmp_path: Path) -> None:
    """Such as mmdet's RetinaNet, given by --config."""
    data = open_coco(DataSettings(data=str(coco_folder(tmp_path, 1, 2))))
    split: Any = data.splits["test"]
    metric: Any = coco_results.CocoResults(str(split.annotation_file), list(split.categories), True)
    for image_id, boxes in ((5, [[1.0, 2, 30, 40]]), (15, [])):
        found = {
            "bboxes": torch.tensor(boxes).reshape(-1, 4),
            "scores": torch.full((len(boxes),), 0.9),
            "labels": torch.zeros(len(boxes), dtype=torch.int64),
        }
        metric.process(None, [{"img_id": image_id, "pred_instances": found}])
    evaluation = metric.compute_metrics(metric.results)["evaluation"]
    assert list(evaluation.tables) == ["box"]
    assert [d["bbox"] for d in evaluation.detections] == [[1, 2, 29, 38]]
