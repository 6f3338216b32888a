"""Faults in COCO-format boxes: x, y (of the upper left corner), width and height in pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from ibot_eval.data.annotation_report import Finding, found

_SLIPS = 0.01
"""Share of odd boxes up to which they count as the annotators' slips, which training leaves out; more of them are a
sign that something is wrong with all."""
_FAR = 1e9
"""Pixels; beyond it, as NaN is, nothing is a coordinate."""
_SLACK = 1.0
"""Pixels that a box may reach over the border without a word: annotators round."""


def check_boxes(annotations: Sequence[Mapping[str, Any]], images: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Findings about the boxes of ``annotations``, all of which belong to one of ``images`` (by id)."""
    proper = [_is_box(a.get("bbox")) for a in annotations]
    findings = found(
        "error",
        "objects without a box of four finite numbers",
        (f"object {a.get('id')}: {a.get('bbox')!r:.60}" for a, ok in zip(annotations, proper, strict=True) if not ok),
    )
    rows = [a for a, ok in zip(annotations, proper, strict=True) if ok]
    rows = [a for a in rows if all(is_side(images[a["image_id"]].get(k)) for k in ("width", "height"))]
    if not rows:
        return findings
    boxes = np.array([a["bbox"] for a in rows], np.float64)
    limits = np.array([[images[a["image_id"]]["width"], images[a["image_id"]]["height"]] for a in rows], np.float64)
    if systematic := _systematic(boxes, limits):
        return [*findings, systematic]
    start, size = boxes[:, :2], boxes[:, 2:]
    end = start + size
    flat = np.any(size <= 0, axis=1)
    away = ~flat & np.any((end <= 0) | (start >= limits), axis=1)
    over = ~flat & ~away & np.any((start < -_SLACK) | (end > limits + _SLACK), axis=1)

    def odd(what: str, chosen: np.ndarray) -> list[Finding]:
        many = chosen.mean() > _SLIPS
        todo = "too many to be slips: is something wrong with all boxes?" if many else "training leaves them out"
        return found("error" if many else "note", what, cases(chosen), todo)

    def cases(chosen: np.ndarray) -> list[str]:
        return [_case(rows[i], images) for i in np.flatnonzero(chosen)]

    return [
        *findings,
        *odd("boxes without width or height", flat),
        *odd("boxes that lie outside of their image", away),
        *found("note", "boxes that reach over the border of their image", cases(over)),
    ]


def is_side(value: Any) -> TypeGuard[int]:
    """Whether an image can be so many pixels wide or high."""
    return type(value) is int and 0 < value < _FAR


def _is_box(box: Any) -> bool:
    if not isinstance(box, list) or len(box) != 4:
        return False
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and -_FAR < v < _FAR for v in box)


def _case(annotation: Mapping[str, Any], images: Mapping[int, Mapping[str, Any]]) -> str:
    image = images[annotation["image_id"]]
    box = ", ".join(f"{value:g}" for value in annotation["bbox"])
    return f"object {annotation.get('id')}: [{box}] in {image['file_name']} of {image['width']}x{image['height']}"


def _systematic(boxes: np.ndarray, limits: np.ndarray) -> Finding | None:
    """Whether all boxes are in another convention: fractions of the image, or two corners.

    Two corners fit every image and never cross, while x, y, width and height of the same numbers would often reach over
    the border.
    """
    if boxes.max() <= 1.0 and boxes.min() >= 0.0 and limits.min() > 2:
        return Finding(
            "error",
            "all boxes lie within 0 and 1, as fractions of the image do",
            todo="COCO's are x, y, width, height in pixels",
        )
    corners = (boxes[:, 2:] >= boxes[:, :2]) & (boxes[:, 2:] <= limits + _SLACK) & (boxes[:, :2] >= -_SLACK)
    over = np.any(boxes[:, :2] + boxes[:, 2:] > limits + _SLACK, axis=1)
    if np.all(corners, axis=1).mean() >= 1 - _SLIPS and over.mean() > 0.1:
        return Finding(
            "error",
            f"boxes look like two corners (x1, y1, x2, y2): {over.sum():,} of {len(boxes):,} reach over their image as "
            "x, y, width, height, and none as corners",
            todo="COCO's are x, y, width, height",
        )
    return None
