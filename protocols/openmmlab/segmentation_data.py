"""Images and label maps for mmsegmentation: the data set, its label maps, and the published augmentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmcv.transforms import BaseTransform
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS, TRANSFORMS

from ibot_eval.data.label_maps import LabelMapSplit
from ibot_eval.data.label_rule import IGNORED, LabelRule, read_labels
from ibot_eval.files import atomic_write_bytes
from protocols.openmmlab import detection_data  # noqa: F401 - registers LoadUprightImage
from protocols.openmmlab.segmentation_pictures import palette_of

LARGEST_SHARE = 0.75
"""Of a crop that one class may cover; ten other crops are tried for that, as the published runs do."""
ASPECT = 4
"""How many times as long as the shorter side the longer may be after resizing: the published 2048 x 512."""
OURS = {"LoadImageFromFile": "LoadUprightImage", "LoadAnnotations": "LoadLabelMap"}
"""What opens files in configurations of mmsegmentation -> what does it here."""

Values = dict[str, Any]


def write_split(split: LabelMapSplit, file: Path) -> Path:
    """Lists the files of ``split`` and how their labels are read, for :class:`LabelMaps`; returns ``file``."""
    names = list(split.class_names)
    content = {
        "classes": names,
        "palette": [list(colour) for colour in split.label_rule.colours] or palette_of(len(names)),
        "rule": asdict(split.label_rule),
        "pairs": [
            [str(image.resolve()), str(label.resolve())]
            for image, label in zip(split.paths, split.label_paths, strict=True)
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(file, json.dumps(content).encode())
    return file


@DATASETS.register_module()
class LabelMaps(BaseDataset):
    """Pairs of an image and a label map.

    Takes the place of the data set in a user's configuration, whose other arguments (suffixes, reduce_zero_label …) it
    has no need of. Whatever opens files in the pipeline gives way to what the core opens them with.

    Args:
        ann_file: of :func:`write_split`.
        pipeline, test_mode: of mmengine.
    """

    def __init__(self, ann_file: str, pipeline: Sequence[Any] = (), test_mode: bool = False, **_: Any) -> None:
        listed = json.loads(Path(ann_file).read_bytes())
        self._pairs = listed["pairs"]
        self.rule = LabelRule(tuple(listed["rule"]["table"]), tuple(map(tuple, listed["rule"]["colours"])))
        about = {name: listed[name] for name in ("classes", "palette")}
        super().__init__(ann_file, metainfo=about, pipeline=_with_our_loading(pipeline), test_mode=test_mode)

    def load_data_list(self) -> list[Values]:
        return [{"img_path": image, "seg_map_path": label} for image, label in self._pairs]

    def get_data_info(self, idx: int) -> Values:
        return {**super().get_data_info(idx), "label_rule": self.rule, "reduce_zero_label": False, "seg_fields": []}


def _with_our_loading(node: Any) -> Any:
    if isinstance(node, dict):
        found = {name: _with_our_loading(value) for name, value in node.items()}
        return {"type": OURS[found["type"]]} if found.get("type") in OURS else found
    # mmsegmentation takes sizes as tuples only.
    return type(node)(map(_with_our_loading, node)) if isinstance(node, (list, tuple)) else node


@TRANSFORMS.register_module()
class LoadLabelMap(BaseTransform):
    """Opens ``seg_map_path`` as the core does: ``gt_seg_map``, (H, W) uint8 classes, 255 where there is none."""

    def transform(self, results: Values) -> Values:
        results["gt_seg_map"] = read_labels(Path(results["seg_map_path"]), results["label_rule"])
        results["seg_fields"] = [*results["seg_fields"], "gt_seg_map"]
        return results


def training_pipeline(
    short_side: int, crop_size: int, random_scale: Sequence[float], *, photometric: bool
) -> list[Values]:
    """The published augmentation: scaled at random, cropped, mirrored, and its colours changed.

    Args:
        short_side: of images before they are scaled, pixels.
        crop_size: side of the crops, pixels. Smaller images are padded by the data preprocessor.
        random_scale: smallest and largest factor.
        photometric: whether colours change.
    """
    return [
        {"type": "LoadUprightImage"},
        {"type": "LoadLabelMap"},
        {"type": "RandomResize", "scale": _scale(short_side), "ratio_range": tuple(random_scale), "keep_ratio": True},
        {
            "type": "RandomCrop",
            "crop_size": (crop_size, crop_size),
            "cat_max_ratio": LARGEST_SHARE,
            "ignore_index": IGNORED,
        },
        {"type": "RandomFlip", "prob": 0.5},
        *([{"type": "PhotoMetricDistortion"}] if photometric else []),
        {"type": "PackSegInputs"},
    ]


def evaluation_pipeline(short_side: int, scales: Sequence[float] = (), *, flip: bool = False) -> list[Values]:
    """Images resized, label maps left as they are.

    Args:
        short_side: pixels.
        scales: factors on ``short_side`` of several looks at each image; none is one look.
        flip: whether mirrored images are looked at as well.
    """
    load, pack = {"type": "LoadUprightImage"}, {"type": "PackSegInputs"}
    sizes = [
        {"type": "Resize", "scale": _scale(round(short_side * factor)), "keep_ratio": True} for factor in scales or [1]
    ]
    if not scales and not flip:
        return [load, *sizes, {"type": "LoadLabelMap"}, pack]
    flips = [{"type": "RandomFlip", "prob": p, "direction": "horizontal"} for p in ((0.0, 1.0) if flip else (0.0,))]
    return [load, {"type": "TestTimeAug", "transforms": [sizes, flips, [{"type": "LoadLabelMap"}], [pack]]}]


def _scale(short_side: int) -> tuple[int, int]:
    return ASPECT * short_side, short_side
