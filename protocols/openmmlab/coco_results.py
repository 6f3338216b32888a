"""Detections as COCO has them, and how they compare with the annotations."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mmdet.structures.mask import encode_mask_results
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ibot_eval.data.coco import read_instances
from ibot_eval.metrics.average_precision import Table, matches_of, precision_table, summary

EVALUATION = "evaluation"
"""Under this name :meth:`CocoResults.compute_metrics` gives the whole :class:`Evaluation`."""
KINDS: Mapping[str, Any] = {"box": "bbox", "mask": "segm"}
"""What is compared -> pycocotools' name for it."""

_SUMMARY = {"ap": "ap", "ap50": "ap50", "ap75": "ap75", **{s: f"ap_{s}" for s in ("small", "medium", "large")}}


@dataclass(frozen=True)
class Evaluation:
    """The detections of a test split and their matches with its objects."""

    detections: list[dict[str, Any]]
    """In COCO's format for results: image_id, category_id, bbox (x, y, width, height), score, perhaps segmentation."""
    tables: Mapping[str, Table]
    """``box``, and ``mask`` where there are masks."""
    image_ids: list[int]
    """COCO's ids of the images, in the order of the tables' images."""

    def numbers(self) -> dict[str, float]:
        """``box_ap``, ``box_ap50`` … ``mask_ap_large`` in percent, NaN where there is nothing to find."""
        return {
            f"{kind}_{_SUMMARY[name]}": value
            for kind, table in self.tables.items()
            for name, value in summary(precision_table(table)).items()
        }


def evaluate(
    content: Mapping[str, Any], category_ids: Sequence[int], detections: list[dict[str, Any]], *, masks: bool
) -> Evaluation:
    """Matches ``detections`` with the annotations, by pycocotools.

    Args:
        content: of a file of annotations, all of whose images were tested.
        category_ids: in the order of the classes.
        detections: in COCO's format for results.
        masks: whether masks are compared as well as boxes.
    """
    known = set(category_ids)
    objects = [a for a in content.get("annotations", ()) if a["category_id"] in known]
    images = content["images"]
    tables = {}
    for kind in ("box", "mask") if masks else ("box",):
        truth = [_object(a) for a in objects if kind == "box" or a.get("segmentation")]
        found = [_detection(d, kind) for d in detections]
        # Both print what they do.
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCOeval(_coco(images, category_ids, truth), _coco(images, category_ids, found), iouType=KINDS[kind])
            coco.evaluate()
        # pycocotools sorts the categories by id, and the classes have an order of their own.
        by_category = dict(zip(sorted(known), matches_of(coco.evalImgs, len(known), len(images)), strict=True))
        tables[kind] = [by_category[category] for category in category_ids]
    return Evaluation(detections, tables, sorted(image["id"] for image in images))


def _object(annotation: Mapping[str, Any]) -> dict[str, Any]:
    width, height = annotation["bbox"][2:]
    return {"area": width * height, "iscrowd": 0, **annotation}


def _detection(detection: Mapping[str, Any], kind: str) -> dict[str, Any]:
    width, height = detection["bbox"][2:]
    area = width * height if kind == "box" else float(rle.area(detection["segmentation"]))
    return {**detection, "area": area, "iscrowd": 0}


def _coco(images: list[Any], category_ids: Sequence[int], annotations: list[dict[str, Any]]) -> COCO:
    coco: Any = COCO()
    coco.dataset = {
        "images": images,
        "categories": [{"id": number} for number in category_ids],
        # pycocotools takes an id of 0 for no match at all.
        "annotations": [{**a, "id": number} for number, a in enumerate(annotations, 1)],
    }
    coco.createIndex()
    return coco


@METRICS.register_module()
class CocoResults(BaseMetric):
    """Collects detections and compares them with the annotations.

    Args:
        annotation_file: with the annotations of all images that are tested, and of no others.
        category_ids, masks: of :func:`evaluate`; masks are compared only where the model gives them.
    """

    def __init__(
        self,
        annotation_file: str,
        category_ids: Sequence[int],
        masks: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.annotation_file, self.masks = Path(annotation_file), masks
        self.category_ids = list(category_ids)

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Any]]) -> None:
        for sample in data_samples:
            found = sample["pred_instances"]
            image = {
                "img_id": int(sample["img_id"]),
                "boxes": found["bboxes"].float().cpu().numpy(),
                "scores": found["scores"].float().cpu().numpy(),
                "labels": found["labels"].cpu().numpy(),
            }
            # A configuration may describe a detector of boxes, whatever the data have.
            if self.masks and "masks" in found:
                image["masks"] = encode_mask_results(found["masks"].detach().cpu().numpy())
            self.results.append(image)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """AP by name in percent, and the whole under ``evaluation``."""
        # Each image counts once, however often a sampler gave it.
        by_image = {image["img_id"]: image for image in results}
        detections = [d for number in sorted(by_image) for d in self._detections(by_image[number])]
        evaluation = evaluate(
            read_instances(self.annotation_file),
            self.category_ids,
            detections,
            masks=self.masks and all("masks" in image for image in results),
        )
        return {**evaluation.numbers(), EVALUATION: evaluation}

    def _detections(self, image: Mapping[str, Any]) -> list[dict[str, Any]]:
        corners = image["boxes"].reshape(-1, 4)
        boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1).round(3)
        found = []
        for index, (box, score, label) in enumerate(zip(boxes, image["scores"], image["labels"], strict=True)):
            detection = {
                "image_id": image["img_id"],
                "category_id": self.category_ids[int(label)],
                "bbox": box.tolist(),
                "score": float(score),
            }
            if "masks" in image:
                mask = image["masks"][index]
                counts = mask["counts"]
                text = counts.decode() if isinstance(counts, bytes) else counts
                detection["segmentation"] = {"size": [int(side) for side in mask["size"]], "counts": text}
            found.append(detection)
        return found
