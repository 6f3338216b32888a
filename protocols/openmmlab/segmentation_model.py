"""Segmentation networks as mmsegmentation's configuration describes them: a backbone's four levels and a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ibot_eval.data.label_rule import IGNORED

Head = Literal["upernet", "linear", "setr-pup"]
Values = dict[str, Any]

AUXILIARY_WEIGHT = 0.4
"""Of the loss of auxiliary heads, as in UperNet's and SETR's published configurations."""
AUXILIARY_CHANNELS = 256
SETR_CHANNELS = 256
TEST_DIVISOR = 32
"""Test images seen whole are padded to a multiple of this many pixels. Windows are cut from unpadded images, as
published: padding would move the last ones."""


def segmentor(
    head: Head,
    backbone: Mapping[str, Any],
    widths: Sequence[int],
    classes: int,
    *,
    channels: int,
    dropout: float,
    norm: str,
    mean: Sequence[float],
    std: Sequence[float],
    crop_size: int,
    inference: Literal["slide", "whole"],
    stride: int,
) -> Values:
    """``model`` of the configuration: an EncoderDecoder.

    - upernet (Xiao et al. 2018): pyramid pooling over the last level, a feature pyramid over all four, and an auxiliary
      fully convolutional head on the third, as BEiT and iBOT train it.
    - linear: all four levels resized to the first one's size and concatenated, and one 1x1 convolution over them.
    - setr-pup (Zheng et al. 2021): four convolutions, each followed by a doubling of the map, on the last level, with
      one such step (times 4) on each of the others as auxiliary heads.

    Args:
        head: which.
        backbone: what builds the backbone.
        widths: channels of its four levels.
        classes: at least 2.
        channels: width of the head; 0 is the last level's (upernet), or 256 (setr-pup). ``linear`` has none.
        dropout: of whole channels, before each head's classifier.
        norm: of the head's layers, BN or SyncBN.
        mean, std: of the inputs, 0 to 1, RGB.
        crop_size: side of the training crops and of the sliding window, pixels.
        inference: windows over the image whose scores are averaged, or the whole image at once.
        stride: pixels between windows.
    """
    layer_norm = {"type": norm, "requires_grad": True}
    common: Values = {
        "num_classes": classes,
        "dropout_ratio": dropout,
        "align_corners": False,
        "ignore_index": IGNORED,
        "loss_decode": _loss(1.0),
    }
    every: Values = {"in_channels": list(widths), "in_index": list(range(len(widths)))}
    auxiliary: Values | list[Values] | None = None
    if head == "upernet":
        decode = {
            "type": "UPerHead",
            **every,
            "pool_scales": (1, 2, 3, 6),
            "channels": channels or widths[-1],
            "norm_cfg": layer_norm,
        }
        third = {"in_channels": widths[2], "in_index": 2, "channels": min(AUXILIARY_CHANNELS, channels or 1 << 30)}
        shape = {"num_convs": 1, "concat_input": False, "norm_cfg": layer_norm}
        auxiliary = {"type": "FCNHead", **common, **third, **shape, "loss_decode": _loss(AUXILIARY_WEIGHT)}
    elif head == "linear":
        decode = {
            "type": "FCNHead",
            **every,
            "input_transform": "resize_concat",
            "channels": sum(widths),
            "num_convs": 0,
            "kernel_size": 1,
            "concat_input": False,
            "norm_cfg": None,
        }
    else:
        step = {"type": "SETRUPHead", "channels": channels or SETR_CHANNELS, "kernel_size": 3, "norm_cfg": layer_norm}
        decode = {**step, "in_channels": widths[3], "in_index": 3, "num_convs": 4, "up_scale": 2}
        once = {"num_convs": 1, "up_scale": 4, "loss_decode": _loss(AUXILIARY_WEIGHT)}
        auxiliary = [{**common, **step, "in_channels": widths[i], "in_index": i, **once} for i in range(3)]
    model: Values = {
        "type": "EncoderDecoder",
        "data_preprocessor": {
            "type": "SegDataPreProcessor",
            "mean": [255 * value for value in mean],
            "std": [255 * value for value in std],
            "bgr_to_rgb": True,
            "pad_val": 0,
            "seg_pad_val": IGNORED,
            "size": (crop_size, crop_size),
            "test_cfg": {"size_divisor": TEST_DIVISOR} if inference == "whole" else None,
        },
        "backbone": dict(backbone),
        "decode_head": {**common, **decode},
        "train_cfg": {},
        "test_cfg": {"mode": "whole"}
        if inference == "whole"
        else {"mode": "slide", "crop_size": (crop_size, crop_size), "stride": (stride, stride)},
    }
    if auxiliary is not None:
        model["auxiliary_head"] = auxiliary
    return model


def _loss(weight: float) -> Values:
    return {"type": "CrossEntropyLoss", "use_sigmoid": False, "loss_weight": weight}


def schedule(iterations: int, warmup: int, ratio: float = 1e-6) -> list[Values]:
    """``param_scheduler``: a linear rise over the linear fall to 0 of the whole run.

    At iteration t, counted from 0, the rate is the highest one times (1 - t / iterations) and, in the warm-up, times
    1 - (1 - t / warmup) (1 - ratio): the two overlap in the published runs, so the fall begins at once.

    Args:
        iterations: of the run.
        warmup: iterations of the rise; 0 for none.
        ratio: of the first rate to the one at the end of the warm-up.
    """
    # mmengine's schedulers reach their end one iteration before ``end``, and multiply where they overlap.
    fall: Values = {
        **{"type": "PolyLR", "power": 1.0, "eta_min": 0.0},
        **{"begin": 0, "end": iterations + 1, "by_epoch": False},
    }
    if not warmup:
        return [fall]
    rise: Values = {
        **{"type": "LinearLR", "start_factor": ratio},
        **{"begin": 0, "end": warmup + 1, "by_epoch": False},
    }
    return [rise, fall]
