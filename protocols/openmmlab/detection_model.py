"""Cascade Mask R-CNN over a checkpoint's backbone, as a configuration of mmdet.

The heads and thresholds are those of iBOT's released detection configurations, which are Swin's: three stages of four
convolutions and one fully connected layer with batch norm, box losses on decoded boxes (GIoU, weight 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmengine.registry import MODELS
from torch import Tensor

STAGES = ((0.5, (0.1, 0.1, 0.2, 0.2)), (0.6, (0.05, 0.05, 0.1, 0.1)), (0.7, (0.033, 0.033, 0.067, 0.067)))
"""Of the cascade: IoU from which on a proposal is an object's, and what box offsets are divided by."""
STRIDES = (4, 8, 16, 32)
"""Of the maps that RoIs are cut from; the RPN has one more, of stride 64."""


@MODELS.register_module()
class PreciseRoIExtractor(SingleRoIExtractor):
    """RoIAlign in float32 under any autocast: bfloat16 boxes would be several pixels off in a large image."""

    def forward(self, feats: Sequence[Tensor], rois: Tensor, roi_scale_factor: float | None = None) -> Tensor:
        precise: Any = tuple(level.float() for level in feats)
        return super().forward(precise, rois.float(), roi_scale_factor)


def cascade_mask_rcnn(
    backbone: dict[str, Any],
    widths: Sequence[int],
    classes: int,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    masks: bool = True,
    channels: int = 256,
    head_width: int = 256,
    fc_width: int = 1024,
    rois: int = 512,
    proposals: tuple[int, int] = (2000, 1000),
    norm: str = "SyncBN",
    score_threshold: float = 0.05,
) -> dict[str, Any]:
    """The configuration of the model.

    Args:
        backbone: configuration of one whose four outputs have strides 4, 8, 16 and 32.
        widths: channels of its outputs.
        classes: number of classes.
        mean, std: per channel (RGB) of the inputs, 0 to 1.
        masks: whether there is a mask head.
        channels: of the feature pyramid and the RPN.
        head_width: channels of the box and mask heads' convolutions.
        fc_width: of the box heads' fully connected layer.
        rois: regions per image and stage that the heads are trained on.
        proposals: kept of the RPN, in training and in testing.
        norm: of the box heads: SyncBN or BN.
        score_threshold: least score of a detection.
    """
    extractor: dict[str, Any] = {
        "type": "PreciseRoIExtractor",
        "out_channels": channels,
        "featmap_strides": list(STRIDES),
    }
    roi_head: dict[str, Any] = {
        "type": "CascadeRoIHead",
        "num_stages": len(STAGES),
        "stage_loss_weights": [1, 0.5, 0.25],
        "bbox_roi_extractor": {**extractor, "roi_layer": _roi_align(7)},
        "bbox_head": [_box_head(deviations, classes, channels, head_width, fc_width, norm) for _, deviations in STAGES],
    }
    if masks:
        roi_head["mask_roi_extractor"] = {**extractor, "roi_layer": _roi_align(14)}
        roi_head["mask_head"] = {
            "type": "FCNMaskHead",
            "num_convs": 4,
            "in_channels": channels,
            "conv_out_channels": head_width,
            "num_classes": classes,
            "loss_mask": {"type": "CrossEntropyLoss", "use_mask": True, "loss_weight": 1.0},
        }
    return {
        "type": "CascadeRCNN",
        "data_preprocessor": {
            "type": "DetDataPreprocessor",
            "mean": [255 * value for value in mean],
            "std": [255 * value for value in std],
            "bgr_to_rgb": True,
            "pad_mask": masks,
            "pad_size_divisor": 32,
        },
        "backbone": backbone,
        "neck": {"type": "FPN", "in_channels": list(widths), "out_channels": channels, "num_outs": 5},
        "rpn_head": {
            "type": "RPNHead",
            "in_channels": channels,
            "feat_channels": channels,
            "anchor_generator": {
                "type": "AnchorGenerator",
                "scales": [8],
                "ratios": [0.5, 1.0, 2.0],
                "strides": [*STRIDES, 64],
            },
            "bbox_coder": _box_coder((1.0, 1.0, 1.0, 1.0)),
            "loss_cls": {"type": "CrossEntropyLoss", "use_sigmoid": True, "loss_weight": 1.0},
            "loss_bbox": {"type": "SmoothL1Loss", "beta": 1 / 9, "loss_weight": 1.0},
        },
        "roi_head": roi_head,
        "train_cfg": {
            "rpn": {
                "assigner": _assigner(0.7, 0.3, 0.3, match_low_quality=True),
                "sampler": _sampler(256, 0.5, add_objects=False),
                "allowed_border": 0,
                "pos_weight": -1,
                "debug": False,
            },
            "rpn_proposal": _proposals(proposals[0]),
            "rcnn": [
                {
                    "assigner": _assigner(iou, iou, iou, match_low_quality=False),
                    "sampler": _sampler(rois, 0.25, add_objects=True),
                    "mask_size": 28,
                    "pos_weight": -1,
                    "debug": False,
                }
                for iou, _ in STAGES
            ],
        },
        "test_cfg": {
            "rpn": _proposals(proposals[1]),
            "rcnn": {
                "score_thr": score_threshold,
                "nms": {"type": "nms", "iou_threshold": 0.5},
                "max_per_img": 100,
                "mask_thr_binary": 0.5,
            },
        },
    }


def _roi_align(side: int) -> dict[str, Any]:
    return {"type": "RoIAlign", "output_size": side, "sampling_ratio": 0}


def _box_coder(deviations: Sequence[float]) -> dict[str, Any]:
    return {"type": "DeltaXYWHBBoxCoder", "target_means": [0.0] * 4, "target_stds": list(deviations)}


def _box_head(
    deviations: Sequence[float], classes: int, channels: int, head_width: int, fc_width: int, norm: str
) -> dict[str, Any]:
    return {
        "type": "ConvFCBBoxHead",
        "num_shared_convs": 4,
        "num_shared_fcs": 1,
        "in_channels": channels,
        "conv_out_channels": head_width,
        "fc_out_channels": fc_width,
        "roi_feat_size": 7,
        "num_classes": classes,
        "bbox_coder": _box_coder(deviations),
        "reg_class_agnostic": False,
        "reg_decoded_bbox": True,
        "norm_cfg": {"type": norm, "requires_grad": True},
        "loss_cls": {"type": "CrossEntropyLoss", "use_sigmoid": False, "loss_weight": 1.0},
        "loss_bbox": {"type": "GIoULoss", "loss_weight": 10.0},
    }


def _assigner(positive: float, negative: float, least: float, *, match_low_quality: bool) -> dict[str, Any]:
    return {
        "type": "MaxIoUAssigner",
        "pos_iou_thr": positive,
        "neg_iou_thr": negative,
        "min_pos_iou": least,
        "match_low_quality": match_low_quality,
        "ignore_iof_thr": -1,
    }


def _sampler(number: int, positive: float, *, add_objects: bool) -> dict[str, Any]:
    return {
        "type": "RandomSampler",
        "num": number,
        "pos_fraction": positive,
        "neg_pos_ub": -1,
        "add_gt_as_proposals": add_objects,
    }


def _proposals(number: int) -> dict[str, Any]:
    return {
        "nms_pre": number,
        "max_per_img": number,
        "nms": {"type": "nms", "iou_threshold": 0.7},
        "min_bbox_size": 0,
    }
