"""Makers of tiny data sets for detection and segmentation: coloured shapes whose boxes, masks and labels are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ibot_eval.data.coco import CocoSplit, open_coco
from ibot_eval.data.label_maps import LabelMapSplit, open_label_maps
from ibot_eval.data.splits import Data
from ibot_eval.settings import DataSettings

SHAPES = ("square", "disc", "bar")
COLOURS = ((220, 60, 50), (60, 190, 80), (70, 90, 230))


def scene(seed: int, height: int = 96, width: int = 128, objects: int = 2) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """A noisy picture (height, width, 3) uint8 and its objects: ``label`` 0 to 2, ``mask`` (height, width) bool.

    Shapes do not overlap: each has a vertical strip of its own.
    """
    rng = np.random.default_rng(seed)
    picture = rng.integers(90, 140, (height, width, 3)).astype(np.uint8)
    rows, columns = np.mgrid[:height, :width]
    found, strip = [], width // objects
    for place in range(objects):
        label = int(rng.integers(len(SHAPES)))
        radius = int(rng.integers(min(strip, height) // 5, min(strip, height) // 3))
        y = int(rng.integers(radius + 1, height - radius - 1))
        x = place * strip + int(rng.integers(radius + 1, strip - radius - 1))
        if SHAPES[label] == "disc":
            mask = (rows - y) ** 2 + (columns - x) ** 2 <= radius**2
        else:
            half = radius if SHAPES[label] == "square" else max(2, radius // 3)
            mask = (abs(rows - y) <= half) & (abs(columns - x) <= radius)
        picture[mask] = np.array(COLOURS[label]) + rng.integers(-20, 20, 3)
        found.append({"label": label, "mask": mask})
    return picture, found


def coco_annotation(found: dict[str, Any], number: int, image_id: int, ids: Sequence[int]) -> dict[str, Any]:
    """An object of :func:`scene` as COCO writes it: its box as x, y, w, h, its mask as the box's polygon for squares
    and bars, and as uncompressed run lengths for discs."""
    rows, columns = np.nonzero(found["mask"])
    x, y = int(columns.min()), int(rows.min())
    w, h = int(columns.max()) + 1 - x, int(rows.max()) + 1 - y
    if SHAPES[found["label"]] == "disc":
        segmentation: Any = run_lengths(found["mask"])
    else:
        segmentation = [[x, y, x + w, y, x + w, y + h, x, y + h]]
    return {
        "id": number,
        "image_id": image_id,
        "category_id": ids[found["label"]],
        "bbox": [x, y, w, h],
        "area": int(found["mask"].sum()),
        "iscrowd": 0,
        "segmentation": segmentation,
    }


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """COCO's uncompressed RLE: lengths of runs down the columns, the first of background."""
    flat = mask.ravel(order="F").astype(np.int8)
    ends = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff(np.array([0, *ends, flat.size])).tolist()
    return {"size": list(mask.shape), "counts": [0, *lengths] if flat[0] else lengths}


def coco_folder(
    root: Path,
    train: int = 4,
    test: int = 2,
    *,
    height: int = 96,
    width: int = 128,
    names: Sequence[str] = ("train", "val"),
    ids: Sequence[int] = (1, 3, 7),
) -> Path:
    """``root`` in COCO's layout: annotations/instances_NAME.json and NAME/*.jpg, category ids with gaps."""
    for split, (name, count) in enumerate(zip(names, (train, test), strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        for i in range(count):
            picture, found = scene(1000 * split + i, height, width)
            image_id, file = 10 * i + 5, f"{i:04}.jpg"
            Image.fromarray(picture).save(root / name / file, quality=95)
            images.append({"id": image_id, "file_name": file, "height": height, "width": width})
            for one in found:
                annotations.append(coco_annotation(one, len(annotations) + 1, image_id, ids))
        categories = [{"id": i, "name": shape} for i, shape in zip(ids, SHAPES, strict=True)]
        write_instances(root / "annotations" / f"instances_{name}.json", images, annotations, categories)
    return root


def write_instances(file: Path, images: Sequence[Any], annotations: Sequence[Any], categories: Sequence[Any]) -> Path:
    """A JSON file of these three lists; folders are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return file


def label_map_folder(
    root: Path,
    train: int = 4,
    test: int = 2,
    *,
    height: int = 96,
    width: int = 128,
    names: Sequence[str] = ("training", "validation"),
    classes: bool = True,
) -> Path:
    """``root`` in ADE20K's layout: images/NAME/*.jpg and annotations/NAME/*.png with labels 0 (background), 1 square,
    2 disc, 3 bar, and 255 (ignored) in the first row; with ``classes``, a classes.txt that names the four."""
    for split, (name, count) in enumerate(zip(names, (train, test), strict=True)):
        for kind in ("images", "annotations"):
            (root / kind / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture, found = scene(1000 * split + i, height, width)
            labels = np.zeros((height, width), np.uint8)
            for one in found:
                labels[one["mask"]] = one["label"] + 1
            labels[0] = 255
            Image.fromarray(picture).save(root / "images" / name / f"{i:04}.jpg", quality=95)
            Image.fromarray(labels).save(root / "annotations" / name / f"{i:04}.png")
    if classes:
        (root / "classes.txt").write_text("\n".join(("background", *SHAPES)) + "\n")
    return root


def opened_coco(root: Path, roles: Sequence[str] = ("train", "test"), **settings: Any) -> Data:
    """The COCO-format data in ``root``; ``settings`` as of DataSettings."""
    return open_coco(DataSettings(data=str(root), **settings), roles)


def coco_split(data: Data, role: str = "train") -> CocoSplit:
    """A split of :func:`opened_coco`, known to the type checker."""
    split = data.splits[role]
    assert isinstance(split, CocoSplit)
    return split


def changed(root: Path, change: Callable[[dict[str, Any]], Any], name: str = "train") -> Path:
    """``root`` with the content of one JSON file changed in place."""
    file = root / "annotations" / f"instances_{name}.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return root


def opened_label_maps(root: Path, roles: Sequence[str] = ("train", "test"), **settings: Any) -> Data:
    """The images and label maps in ``root``; ``settings`` as of DataSettings, and those of open_label_maps."""
    own = {name: settings.pop(name) for name in ("classes", "reduce_zero", "ignore") if name in settings}
    return open_label_maps(DataSettings(data=str(root), **settings), roles, **own)


def label_map_split(data: Data, role: str = "train") -> LabelMapSplit:
    """A split of :func:`opened_label_maps`, known to the type checker."""
    split = data.splits[role]
    assert isinstance(split, LabelMapSplit)
    return split
