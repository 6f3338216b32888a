"""Data in COCO's format for mmdet: the data set, its images, and the published augmentation."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmcv.transforms import BaseTransform
from mmdet.datasets import BaseDetDataset
from mmengine.registry import DATASETS, TRANSFORMS

from ibot_eval.data.coco import CocoSplit, read_instances
from ibot_eval.data.images import load_rgb
from ibot_eval.errors import DataError

PRE_CROP_SIDES = (400, 500, 600)
"""Shorter sides before the published crop …"""
CROP = (384, 600)
"""… whose height and width lie between these two."""


@DATASETS.register_module()
class CocoObjects(BaseDetDataset):
    """Images and objects of one JSON file.

    mmdet's own class for this format numbers classes by their order in the file, which may differ between train and
    test, and stops at files without ``area`` or with annotations whose ids repeat.

    Args:
        category_ids: ids in the file, in the order of ``metainfo["classes"]``.
        images: how many images the file has to have.
        masks: whether objects come with masks; those that have none are then not trained on.
    """

    def __init__(
        self,
        *args: Any,
        category_ids: Sequence[int],
        images: int | None = None,
        masks: bool,
        **kwargs: Any,
    ) -> None:
        self.category_ids = list(category_ids)
        self.images = images
        self.masks = masks
        super().__init__(*args, **kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        content = read_instances(Path(str(self.ann_file)))
        objects: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for annotation in content.get("annotations", ()):
            objects[annotation["image_id"]].append(annotation)
        labels = {category: label for label, category in enumerate(self.category_ids)}
        images = {image["id"]: image for image in content["images"]}
        if self.images is not None and len(images) != self.images:
            raise DataError(
                f"{self.ann_file} has {len(images)} images, and {self.images} are to be used",
                todo="write a file of its own for a part of a data set",
            )
        return [
            {
                "img_path": str(Path(self.data_prefix["img"]) / images[number]["file_name"]),
                "img_id": number,
                "height": images[number].get("height") or 0,
                "width": images[number].get("width") or 0,
                "instances": [i for o in objects[number] if (i := _instance(o, images[number], labels, self.masks))],
            }
            for number in images
        ]

    def filter_data(self) -> list[dict[str, Any]]:
        """In training, without the images that have nothing to learn from, as the published code leaves them out."""
        if self.test_mode:
            return self.data_list
        return [image for image in self.data_list if any(not i["ignore_flag"] for i in image["instances"])]


def _instance(
    annotation: Mapping[str, Any], image: Mapping[str, Any], labels: Mapping[int, int], masks: bool
) -> dict[str, Any] | None:
    """An object as mmdet's transforms take it; None for one that is smaller than a pixel or outside the image."""
    x, y, width, height = annotation["bbox"]
    inside_x = min(x + width, image.get("width") or np.inf) - max(x, 0)
    inside_y = min(y + height, image.get("height") or np.inf) - max(y, 0)
    label = labels.get(annotation["category_id"])
    if label is None or annotation.get("ignore") or min(width, height) < 1 or min(inside_x, inside_y) <= 0:
        return None
    instance = {
        "bbox": [x, y, x + width, y + height],
        "bbox_label": label,
        "ignore_flag": int(bool(annotation.get("iscrowd"))),
    }
    return {**instance, "mask": annotation.get("segmentation") or []} if masks else instance


@TRANSFORMS.register_module()
class LoadUprightImage(BaseTransform):
    """Opens ``img_path`` as the core does: upright 8-bit colours of any kind of file, in OpenCV's order (BGR).

    Raises:
        BadImage: the file cannot be decoded.
    """

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        path = Path(results["img_path"])
        pixels = np.asarray(load_rgb(path, str(path)))
        results["img"] = np.ascontiguousarray(pixels[..., ::-1])
        results["img_shape"] = results["ori_shape"] = pixels.shape[:2]
        return results


def train_pipeline(short_sides: Sequence[int], long_side: int, *, crops: bool, masks: bool) -> list[dict[str, Any]]:
    """The augmentation of training.

    Half of the images are only resized; the other half are resized to 400, 500 or 600, cropped to between 384 and 600
    pixels a side, and resized again (DETR's policy, which Swin and iBOT took over).

    Args:
        short_sides: one of these is drawn, in pixels …
        long_side: … or less, so that the longer side is not above this.
        crops: whether there are crops at all; if not, all images are only resized.
        masks: whether objects have masks.
    """
    resize = _choose_size(short_sides, long_side)
    crop = {"type": "RandomCrop", "crop_type": "absolute_range", "crop_size": CROP, "allow_negative_crop": True}
    cropped = [_choose_size(PRE_CROP_SIDES, long_side), crop, resize]
    return [
        {"type": "LoadUprightImage"},
        {"type": "LoadAnnotations", "with_bbox": True, "with_mask": masks},
        {"type": "RandomFlip", "prob": 0.5},
        {"type": "RandomChoice", "transforms": [[resize], cropped]} if crops else resize,
        {"type": "PackDetInputs"},
    ]


def test_pipeline(short_side: int, long_side: int) -> list[dict[str, Any]]:
    """Resized to ``short_side``, or less where the longer side would be above ``long_side``."""
    return [
        {"type": "LoadUprightImage"},
        {"type": "Resize", "scale": (long_side, short_side), "keep_ratio": True},
        {"type": "PackDetInputs", "meta_keys": ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")},
    ]


def _choose_size(short_sides: Sequence[int], long_side: int) -> dict[str, Any]:
    # A side may not be the longer one: the two numbers are only told apart by their size.
    scales = [(side, max(long_side, side)) for side in short_sides]
    return {"type": "RandomChoiceResize", "scales": scales, "keep_ratio": True}


def category_ids(split: CocoSplit, class_names: Sequence[str]) -> list[int]:
    """COCO's id of each class; an unused one for a class that the split's file does not name."""
    own = {name: int(number) for number, name in split.categories.items()}
    unused = itertools.count(1 + max(own.values(), default=0))
    return [own[name] if name in own else next(unused) for name in class_names]


def dataset(
    split: CocoSplit, class_names: Sequence[str], annotations: Path, *, masks: bool, test: bool
) -> dict[str, Any]:
    """The configuration of the data set of ``split``, without its pipeline.

    Args:
        annotations: the JSON file.
        masks: whether objects come with masks.
        test: whether images without objects stay.
    """
    return {
        "type": CocoObjects.__name__,
        "data_root": "",
        "ann_file": str(annotations.resolve()),
        "data_prefix": {"img": str(split.image_root.resolve())},
        "metainfo": {"classes": list(class_names)},
        "category_ids": category_ids(split, class_names),
        "images": len(split),
        "masks": masks,
        "test_mode": test,
    }
