"""NMS and RoIAlign in the place of mmcv's compiled ones: values written down, torchvision's, and plain second loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor

from protocols.openmmlab import operators


def boxes_and_scores(n: int, side: float = 100, distinct: bool = True, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(n, 2, generator=generator) * side
    sizes = torch.rand(n, 2, generator=generator) * side / 3 + 1
    scores = torch.rand(n, generator=generator)
    return torch.cat([corner, corner + sizes], 1), scores if distinct else (scores * 8).floor() / 8


def pairwise_iou(one: np.ndarray, other: np.ndarray, offset: int) -> np.float32:
    """Of two boxes in float32, step by step as mmcv's kernel goes."""
    o, zero = np.float32(offset), np.float32(0)
    width = max(zero, min(one[2], other[2]) - max(one[0], other[0]) + o)
    height = max(zero, min(one[3], other[3]) - max(one[1], other[1]) + o)
    areas = [(b[2] - b[0] + o) * (b[3] - b[1] + o) for b in (one, other)]
    with np.errstate(invalid="ignore"):
        return np.float32(width * height) / (areas[0] + areas[1] - width * height)


# --- NMS ---


def test_nms_keeps_the_better_of_two_that_overlap() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [50, 50, 60, 60]])
    assert operators.nms(boxes, torch.tensor([0.5, 0.9, 0.3]), 0.5, 0).tolist() == [1, 2]
    # 81 / 119 = 0.68.
    assert operators.nms(boxes, torch.tensor([0.5, 0.9, 0.3]), 0.7, 0).tolist() == [1, 0, 2]


@pytest.mark.parametrize(("threshold", "width"), [(0.3, 3.0), (0.6, 6.0), (0.7, 7.0), (0.1, 1.0)])
@pytest.mark.parametrize("offset", [0, 1])
def test_nms_keeps_an_iou_of_exactly_the_threshold_in_float32(threshold: float, width: float, offset: int) -> None:
    boxes = torch.tensor([[0.0, 0, 10, 1], [0, 0, width, 1]]) - torch.tensor([0.0, 0, offset, offset])
    scores = torch.tensor([0.9, 0.8])
    assert operators.nms(boxes, scores, threshold, offset).tolist() == [0, 1]
    assert operators.nms(boxes, scores, threshold - 0.01, offset).tolist() == [0]
    if np.float32(threshold) > threshold and not offset:
        # The reason for the rule: torchvision compares with the double.
        assert torchvision.ops.nms(boxes, scores, threshold).tolist() == [0]


def test_nms_counts_the_last_pixel_with_offset_1() -> None:
    # Without it 1 / 31 = 0.032, with it 4 / 46 = 0.087.
    boxes, scores = torch.tensor([[0.0, 0, 4, 4], [3, 3, 7, 7]]), torch.tensor([0.9, 0.8])
    assert operators.nms(boxes, scores, 0.05, 0).tolist() == [0, 1]
    assert operators.nms(boxes, scores, 0.05, 1).tolist() == [0]


def test_nms_takes_equal_scores_in_the_order_of_an_unstable_sort() -> None:
    apart = torch.arange(300.0)[:, None] * 10 + torch.tensor([0.0, 0, 5, 5])
    scores = (torch.arange(300) % 3).float()
    assert operators.nms(apart, scores, 0.5, 0).tolist() == scores.sort(descending=True).indices.tolist()
    twins = torch.tensor([[0.0, 0, 5, 5]]).repeat(300, 1)
    assert operators.nms(twins, scores, 0.5, 0).tolist() == [int(scores.sort(descending=True).indices[0])]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("distinct", [True, False])
def test_nms_is_the_plain_loop(offset: int, threshold: float, distinct: bool) -> None:
    boxes, scores = boxes_and_scores(150, distinct=distinct)
    # Whole numbers, since x2 + 1 - x1 and x2 - x1 + 1 differ in the last bit of others.
    boxes = boxes.round()
    order, kept = scores.sort(descending=True).indices.tolist(), []
    for i in order:
        if not any(pairwise_iou(boxes[k].numpy(), boxes[i].numpy(), offset) > np.float32(threshold) for k in kept):
            kept.append(i)
    assert operators.nms(boxes, scores, threshold, offset).tolist() == kept
    assert 10 < len(kept) < 150


@pytest.mark.parametrize("boxes_type", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scores_type", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nms_takes_any_two_types(boxes_type: torch.dtype, scores_type: torch.dtype) -> None:
    boxes = torch.tensor([[0.0, 0, 8, 8], [1, 1, 9, 9], [32, 32, 40, 40]], dtype=boxes_type)
    kept = operators.nms(boxes, torch.tensor([0.5, 0.75, 0.25], dtype=scores_type), 0.5, 0)
    assert kept.tolist() == [1, 2]
    assert kept.dtype == torch.int64


def test_nms_of_nothing() -> None:
    kept = operators.nms(torch.zeros(0, 4), torch.zeros(0), 0.5, 0)
    assert kept.shape == (0,)
    assert kept.dtype == torch.int64


def test_nms_keeps_boxes_without_area_and_undefined_ones() -> None:
    boxes = torch.tensor([[2.0, 2, 2, 2], [2, 2, 2, 2], [math.nan, 0, 1, 1], [0, 0, 4, 4]])
    assert operators.nms(boxes, torch.tensor([0.9, 0.8, 0.7, 0.6]), 0.5, 0).tolist() == [0, 1, 2, 3]


# --- RoIAlign ---


def align(features: Tensor, rois: Any, size: tuple[int, int], **changes: Any) -> Tensor:
    rois = torch.as_tensor(rois, dtype=features.dtype)
    settings: dict[str, Any] = {"spatial_scale": 1.0, "sampling_ratio": 0, "pool_mode": 1, "aligned": True}
    output = features.new_full((len(rois), features.shape[1], *size), -7)
    places = (features.new_zeros(0), features.new_zeros(0))
    height, width = size
    returned = operators.roi_align_forward(
        features, rois, output, *places, aligned_height=height, aligned_width=width, **{**settings, **changes}
    )
    assert returned is None
    return output


class Align(torch.autograd.Function):
    """As mmcv's own function calls the two."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, rois: Tensor, size: tuple[int, int], changes: dict[str, Any]) -> Tensor:
        ctx.rois, ctx.size, ctx.changes, ctx.shape = rois, size, changes, features.shape
        return align(features, rois, size, **changes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        settings: dict[str, Any] = {"spatial_scale": 1.0, "sampling_ratio": 0, "pool_mode": 1, "aligned": True}
        result, nothing = grad.new_zeros(ctx.shape), grad.new_zeros(0)
        height, width = ctx.size
        operators.roi_align_backward(
            grad.contiguous(),
            ctx.rois,
            nothing,
            nothing,
            result,
            aligned_height=height,
            aligned_width=width,
            **{**settings, **ctx.changes},
        )
        return result, None, None, None


RAMP = torch.arange(16.0).reshape(1, 1, 4, 4)
"""4 y + x, of which a bilinear sample at (y, x) is 4 y + x."""


def test_roi_align_averages_samples_of_a_ramp() -> None:
    # Two samples an axis: at 1 and 2 aligned, at 1.5 and 2.5 not.
    assert align(RAMP, [[0, 1, 1, 3, 3]], (1, 1)).item() == pytest.approx(4 * 1.5 + 1.5)
    assert align(RAMP, [[0, 1, 1, 3, 3]], (1, 1), aligned=False).item() == pytest.approx(4 * 2 + 2)
    # One sample a bin: x at 1 and 2, y at 1.5.
    assert align(RAMP, [[0, 1, 1, 3, 3]], (1, 2), sampling_ratio=1).flatten().tolist() == pytest.approx([7, 8])
    # An image twice as large.
    assert align(RAMP, [[0, 2, 2, 6, 6]], (1, 1), spatial_scale=0.5).item() == pytest.approx(7.5)


def test_roi_align_weighs_the_four_neighbours() -> None:
    features = torch.zeros(1, 1, 4, 4)
    features[0, 0, 1, 1] = 1
    # The sample lies at (1.25, 1.5): 0.75 x 0.5.
    assert align(features, [[0, 1.5, 1.25, 2.5, 2.25]], (1, 1)).item() == pytest.approx(0.375)
    # 2 x 2 samples at 1.0 and 1.5 both ways: 1, 0.5, 0.5, 0.25.
    assert align(features, [[0, 1.25, 1.25, 2.25, 2.25]], (1, 1), sampling_ratio=2).item() == pytest.approx(0.5625)


def test_roi_align_beyond_the_map() -> None:
    # Up to one pixel outside the border's value holds, further out there is nothing.
    ones = torch.ones(1, 1, 4, 4)
    assert align(ones, [[0, -1, -1, 0, 0]], (1, 1)).item() == 1
    assert align(ones, [[0, -9, -9, -8, -8]], (1, 1)).item() == 0
    assert align(ones, [[0, 20, 20, 21, 21]], (1, 1)).item() == 0


def test_roi_align_takes_the_image_and_the_channel() -> None:
    features = torch.arange(6.0).reshape(2, 3, 1, 1).expand(2, 3, 4, 4).contiguous()
    assert align(features, [[1, 0, 0, 2, 2], [0, 1, 1, 3, 3]], (1, 1)).flatten().tolist() == [3, 4, 5, 0, 1, 2]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_roi_align_is_torchvisions(aligned: bool, sampling_ratio: int) -> None:
    features = torch.randn(2, 3, 13, 17, generator=torch.Generator().manual_seed(0), requires_grad=True)
    boxes, _ = boxes_and_scores(20, side=100)
    rois = torch.cat([torch.arange(20)[:, None] % 2, boxes], 1)
    changes = {"spatial_scale": 0.125, "sampling_ratio": sampling_ratio, "aligned": aligned}
    expected = torchvision.ops.roi_align(features, rois, (7, 5), 0.125, sampling_ratio, aligned)
    found: Any = Align.apply(features, rois, (7, 5), changes)
    assert torch.equal(found, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((found * weights).sum(), features)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), features)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.filterwarnings("ignore:Input #0 requires gradient and is not a double:UserWarning")
@pytest.mark.parametrize("aligned", [True, False])
def test_roi_aligns_gradient_in_float32(aligned: bool) -> None:
    features = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rois = torch.tensor([[0, 0.3, 0.2, 9.1, 7.7], [1, -2.0, 1.0, 4.0, 30.0], [1, 3.0, 3.0, 3.0, 3.0]])
    changes = {"spatial_scale": 0.5, "aligned": aligned}
    # The operator is linear, so that the step may be large.
    assert torch.autograd.gradcheck(
        lambda x: Align.apply(x, rois, (2, 3), changes), features, eps=0.5, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_roi_align_in_other_types(dtype: torch.dtype) -> None:
    features = RAMP.to(dtype).requires_grad_()
    rois = torch.tensor([[0, 1, 1, 3, 3]], dtype=dtype)
    found: Any = Align.apply(features, rois, (1, 1), {})
    assert found.dtype == dtype
    assert found.item() == 7.5
    found.sum().backward()
    assert features.grad is not None
    assert features.grad.dtype == dtype
    assert features.grad[0, 0, 1:3, 1:3].flatten().tolist() == [0.25] * 4


def test_roi_align_refuses_what_mmcv_refuses() -> None:
    for bad in ([0, 3, 1, 1, 3], [0, 1, 3, 3, 1], [0, 1, math.nan, 3, 3]):
        with pytest.raises(RuntimeError, match="negative size"):
            align(RAMP, [[0, 1, 1, 3, 3], bad], (1, 1))
    # Without alignment a RoI is made one pixel wide: at x = 3.5, which the map's last column, 3, stands for.
    assert align(RAMP, [[0, 3, 1, 1, 2]], (1, 1), aligned=False).item() == pytest.approx(4 * 1.5 + 3)
    with pytest.raises(NotImplementedError, match="'avg'"):
        align(RAMP, [[0, 1, 1, 3, 3]], (1, 1), pool_mode=0)


def test_roi_align_of_nothing() -> None:
    features = torch.randn(1, 2, 4, 4, requires_grad=True)
    found: Any = Align.apply(features, torch.zeros(0, 5), (3, 3), {})
    assert found.shape == (0, 2, 3, 3)
    found.sum().backward()
    assert features.grad is not None
    assert not features.grad.any()
