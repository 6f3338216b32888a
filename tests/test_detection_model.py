"""Cascade Mask R-CNN as it is built, its data, and the comparison of detections with annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ibot_eval.data.coco import open_coco, standardised
from ibot_eval.settings import DataSettings
from tests.dense import prepared
from tests.dense_data import coco_folder

prepared()

from mmdet.registry import DATASETS, MODELS  # noqa: E402
from mmengine.config import ConfigDict  # noqa: E402
from mmengine.dataset import pseudo_collate  # noqa: E402
from mmengine.model import BaseModule  # noqa: E402
from mmengine.registry import DefaultScope  # noqa: E402
from pycocotools import mask as rle  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from protocols.openmmlab import coco_results, detection_data, detection_model  # noqa: E402

CLASSES = ("square", "disc", "bar")
SMALL: dict[str, Any] = {
    **{"channels": 16, "head_width": 8, "fc_width": 16, "rois": 16, "proposals": (40, 20), "norm": "BN"},
    **{"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)},
}


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    """Names are those of mmdet's registries, as in a run."""
    with DefaultScope.overwrite_default_scope("mmdet"):
        yield


@MODELS.register_module()
class FourLevels(BaseModule):
    """Maps of strides 4, 8, 16 and 32."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(3, 8, stride, stride) for stride in (4, 8, 16, 32))

    def forward(self, images: Tensor) -> list[Tensor]:
        return [level(images) for level in self.levels]


def model(classes: int = 3, **changes: Any) -> Any:
    config = detection_model.cascade_mask_rcnn({"type": "FourLevels"}, (8,) * 4, classes, **{**SMALL, **changes})
    return MODELS.build(ConfigDict(config))


def opened(folder: Path, **changes: Any) -> Any:
    return open_coco(DataSettings(data=str(coco_folder(folder, **changes))))


def train_set(data: Any, *, masks: bool = True, crops: bool = True) -> Any:
    split = data.splits["train"]
    return DATASETS.build(
        {
            **detection_data.dataset(split, data.class_names, split.annotation_file, masks=masks, test=False),
            "pipeline": detection_data.train_pipeline((96, 128), 200, crops=crops, masks=masks),
        }
    )


def test_the_published_heads() -> None:
    """Layer by layer, for COCO's classes."""
    built = model(80, channels=256, head_width=256, fc_width=1024, norm="SyncBN")
    assert len(built.roi_head.bbox_head) == 3
    for head in built.roi_head.bbox_head:
        convolutions = [layer.conv.weight.shape for layer in head.shared_convs]
        assert convolutions == [torch.Size((256, 256, 3, 3))] * 4
        assert all(isinstance(layer.bn, nn.SyncBatchNorm) for layer in head.shared_convs)
        assert [tuple(layer.weight.shape) for layer in head.shared_fcs] == [(1024, 256 * 7 * 7)]
        assert head.fc_cls.weight.shape == (81, 1024)
        assert head.fc_reg.weight.shape == (320, 1024)
        assert head.reg_decoded_bbox
        assert type(head.loss_bbox).__name__ == "GIoULoss"
        assert head.loss_bbox.loss_weight == 10
    assert [layer.conv.weight.shape[0] for layer in built.roi_head.mask_head[0].convs] == [256] * 4
    assert built.roi_head.mask_head[0].conv_logits.weight.shape[0] == 80
    assert [a.pos_iou_thr for a in built.roi_head.bbox_assigner] == [0.5, 0.6, 0.7]
    assert built.rpn_head.prior_generator.strides == [(s, s) for s in (4, 8, 16, 32, 64)]


@pytest.mark.parametrize("masks", [True, False])
def test_every_weight_learns(tmp_path: Path, masks: bool) -> None:
    torch.manual_seed(0)
    built, data = model(masks=masks).train(), train_set(opened(tmp_path), masks=masks)
    batch = built.data_preprocessor(pseudo_collate([data[0], data[1]]), True)
    loss, parts = built.parse_losses(built.forward(**batch, mode="loss"))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())
    assert ("s2.loss_mask" in parts) == masks


def test_an_image_without_objects_teaches_too(tmp_path: Path) -> None:
    """A crop may leave none."""
    built, data = model().train(), train_set(opened(tmp_path))
    sample = data[0]
    empty = sample["data_samples"].gt_instances[:0]
    sample["data_samples"].gt_instances = empty
    loss, _ = built.parse_losses(built.forward(**built.data_preprocessor(pseudo_collate([sample]), True), mode="loss"))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in built.parameters())


def test_regions_are_cut_in_float32() -> None:
    """bfloat16 has no number between 1192 and 1184."""
    extractor = detection_model.PreciseRoIExtractor(
        roi_layer={"type": "RoIAlign", "output_size": 7, "sampling_ratio": 0}, out_channels=1, featmap_strides=[4]
    )
    ramp = torch.arange(400.0).expand(1, 1, 16, 400)
    rois = torch.tensor([[0, 1190.2, 8.0, 1218.2, 36.0]])
    exact = extractor((ramp,), rois)
    assert exact.dtype == torch.float32
    rounded = extractor((ramp.bfloat16(),), rois)
    assert rounded.dtype == torch.float32
    # The map itself is off by at most one; boxes rounded to bfloat16 would not be the same boxes at all.
    assert (exact - rounded).abs().max() < 1
    # Seven cells of four pixels each, in units of the stride, the middle of the first half a cell from the edge.
    expected = (1190.2 + 2 + 4 * torch.arange(7.0)) / 4 - 0.5
    torch.testing.assert_close(exact[0, 0, 3], expected)


def test_boxes_labels_and_masks_of_the_data_set(tmp_path: Path) -> None:
    """Category ids have gaps, and the order of the classes is that of the train file even where test has another."""
    coco_folder(tmp_path)
    file = tmp_path / "annotations" / "instances_val.json"
    content = json.loads(file.read_text())
    content["categories"].reverse()
    file.write_text(json.dumps(content))
    data = open_coco(DataSettings(data=str(tmp_path)))
    split = data.splits["test"]
    built = DATASETS.build(
        {
            **detection_data.dataset(split, data.class_names, file, masks=True, test=True),
            "pipeline": [{"type": "LoadUprightImage"}, {"type": "LoadAnnotations", "with_mask": True}],
        }
    )
    assert tuple(built.metainfo["classes"]) == CLASSES
    names = {category["id"]: category["name"] for category in content["categories"]}
    for index in range(len(split)):
        sample = built[index]
        own = [a for a in content["annotations"] if a["image_id"] == split.coco_ids[index]]
        assert [CLASSES[label] for label in sample["gt_bboxes_labels"]] == [names[a["category_id"]] for a in own]
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (a["bbox"] for a in own)]
        np.testing.assert_allclose(sample["gt_bboxes"].tensor, boxes)
        assert sample["gt_masks"].masks.sum(axis=(1, 2)).tolist() == [a["area"] for a in own]


def test_a_class_that_test_does_not_name_keeps_the_others_in_place(tmp_path: Path) -> None:
    coco_folder(tmp_path, ids=(4, 2, 9))
    file = tmp_path / "annotations" / "instances_val.json"
    content = json.loads(file.read_text())
    content["categories"] = [c for c in content["categories"] if c["name"] != "disc"]
    content["annotations"] = [a for a in content["annotations"] if a["category_id"] != 2]
    file.write_text(json.dumps(content))
    data = open_coco(DataSettings(data=str(tmp_path)))
    ids = [detection_data.category_ids(data.splits[role], data.class_names) for role in ("train", "test")]
    assert ids == [[4, 2, 9], [4, 10, 9]]
    truth = standardised(data.splits["test"])
    found = coco_results.evaluate(truth, ids[1], detections_like(truth), masks=True)
    by_class = [sizes[0].objects.sum() for sizes in found.tables["box"]]
    assert by_class == [sum(a["category_id"] == number for a in content["annotations"]) for number in (4, 2, 9)]


@pytest.mark.parametrize("crops", [True, False])
def test_sizes_of_training_images(tmp_path: Path, crops: bool) -> None:
    data = train_set(opened(tmp_path, height=100, width=300), crops=crops)
    sizes = {tuple(data[0]["inputs"].shape[1:]) for _ in range(30)}
    if crops:
        assert len(sizes) > 5
        assert max(max(size) for size in sizes) <= 200
    else:
        # 96 x 288 and 128 x 384 have their longer side brought down to 200.
        assert sizes == {(67, 200)}


def test_the_published_crop(tmp_path: Path) -> None:
    policy = detection_data.train_pipeline((480, 800), 1333, crops=True, masks=True)[3]
    plain, cropped = policy["transforms"]
    assert plain == [{"type": "RandomChoiceResize", "scales": [(480, 1333), (800, 1333)], "keep_ratio": True}]
    assert cropped[0]["scales"] == [(400, 1333), (500, 1333), (600, 1333)]
    assert (cropped[1]["crop_type"], cropped[1]["crop_size"]) == ("absolute_range", (384, 600))
    assert cropped[1]["allow_negative_crop"]
    assert cropped[2] == plain[0]


def test_grey_images_and_those_without_objects(tmp_path: Path) -> None:
    data = opened(tmp_path, train=3)
    with Image.open(tmp_path / "train" / "0000.jpg") as image:
        image.convert("L").save(tmp_path / "train" / "0000.jpg")
    file = tmp_path / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    left = content["images"][1]["id"]
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != left]
    file.write_text(json.dumps(content))
    built = train_set(data)
    assert len(built) == 2
    assert built[0]["inputs"].shape[0] == 3


def detections_like(truth: dict[str, Any], score: float = 0.9) -> list[dict[str, Any]]:
    """The annotations as if they had been detected."""
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    found = []
    for a in truth["annotations"]:
        mask, size = a["segmentation"], sizes[a["image_id"]]
        lengths: Any = (
            rle.merge(rle.frPyObjects(mask, *size)) if isinstance(mask, list) else rle.frPyObjects(mask, *size)
        )
        detection = {key: a[key] for key in ("image_id", "category_id", "bbox")}
        found.append({**detection, "score": score, "segmentation": {**lengths, "counts": lengths["counts"].decode()}})
    return found


def numbers(data: Any, detections: list[dict[str, Any]]) -> dict[str, float]:
    split = data.splits["test"]
    return coco_results.evaluate(standardised(split), list(split.categories), detections, masks=True).numbers()


def test_perfect_detections_are_perfect_and_none_is_nought(tmp_path: Path) -> None:
    data = opened(tmp_path)
    perfect = numbers(data, detections_like(standardised(data.splits["test"])))
    assert [value for value in perfect.values() if not np.isnan(value)] == pytest.approx([100] * 10)
    nothing = numbers(data, [])
    assert [value for value in nothing.values() if not np.isnan(value)] == [0] * 10


def test_an_evaluation_is_that_of_mmdet(tmp_path: Path) -> None:
    """Of an untrained network's detections, box and mask, against mmdet's own metric."""
    from mmdet.evaluation import CocoMetric

    torch.manual_seed(0)
    data = opened(tmp_path, test=3)
    split, file = data.splits["test"], tmp_path / "truth.json"
    file.write_text(json.dumps(standardised(split)))
    tested = DATASETS.build(
        {
            **detection_data.dataset(split, data.class_names, file, masks=False, test=True),
            "pipeline": detection_data.test_pipeline(96, 200),
        }
    )
    built = model(score_threshold=0.0).eval()
    ours: Any = coco_results.CocoResults(str(file), list(split.categories), True)
    theirs = CocoMetric(str(file), ["bbox", "segm"])
    theirs.dataset_meta = tested.metainfo
    with torch.no_grad():
        for index in range(len(tested)):
            samples = [sample.to_dict() for sample in built.test_step(pseudo_collate([tested[index]]))]
            # Objects, among what an untrained network sees in every corner.
            for sample in samples:
                add_objects(
                    sample["pred_instances"], standardised(split), int(sample["img_id"]), list(split.categories)
                )
            ours.process(None, samples)
            theirs.process({}, samples)
    own, other = ours.compute_metrics(ours.results), theirs.compute_metrics(theirs.results)
    assert own["box_ap"] > 5
    names = {"box_ap": "bbox_mAP", "box_ap50": "bbox_mAP_50", "box_ap75": "bbox_mAP_75", "mask_ap": "segm_mAP"}
    for name, theirs_name in names.items():
        # mmdet rounds to three digits.
        assert own[name] == pytest.approx(100 * other[theirs_name], abs=0.05), name


def add_objects(found: dict[str, Any], truth: dict[str, Any], image_id: int, categories: list[int]) -> None:
    own = [a for a in truth["annotations"] if a["image_id"] == image_id]
    corners = torch.tensor([[x + 2, y, x + w, y + h] for x, y, w, h in (a["bbox"] for a in own)], dtype=torch.float32)
    masks = torch.from_numpy(
        np.stack([rle.decode(d["segmentation"]) for d in detections_like({**truth, "annotations": own})])
    )
    found["bboxes"] = torch.cat([found["bboxes"], corners])
    found["labels"] = torch.cat([found["labels"], torch.tensor([categories.index(a["category_id"]) for a in own])])
    found["scores"] = torch.cat([found["scores"], torch.linspace(0.2, 0.4, len(own))])
    found["masks"] = torch.cat([found["masks"], masks.bool()])
