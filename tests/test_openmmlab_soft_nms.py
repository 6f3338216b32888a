"""Soft-NMS in the place of mmcv's compiled one: values written down, and a plain second loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from protocols.openmmlab import operators
from tests.test_openmmlab_operators import boxes_and_scores, pairwise_iou

NAIVE, LINEAR, GAUSSIAN = 0, 1, 2


def soft(
    boxes: Tensor, scores: Tensor, method: int, threshold: float = 0.3, lowest: float = 1e-3, offset: int = 0
) -> tuple[list[int], list[float]]:
    dets = boxes.new_empty(len(boxes), 5)
    kept = operators.softnms(
        boxes, scores, dets, iou_threshold=threshold, sigma=0.5, min_score=lowest, method=method, offset=offset
    )
    assert torch.equal(dets[: len(kept), :4], boxes[kept])
    return kept.tolist(), dets[: len(kept), 4].tolist()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("method", [NAIVE, LINEAR, GAUSSIAN])
def test_soft_nms_is_the_plain_loop(method: int, offset: int) -> None:
    boxes, scores = boxes_and_scores(80)
    left, kept, lowered = {i: float(s) for i, s in enumerate(scores)}, [], []
    while left:
        best = max(left, key=lambda i: left[i])
        kept.append(best)
        lowered.append(left.pop(best))
        for i in list(left):
            iou = float(pairwise_iou(boxes[best].numpy(), boxes[i].numpy(), offset))
            if method == GAUSSIAN:
                left[i] *= math.exp(-iou * iou / 0.5)
            elif iou >= 0.3:
                left[i] *= 0 if method == NAIVE else 1 - iou
            if left[i] < 0.05:
                del left[i]
    found, found_scores = soft(boxes, scores, method, lowest=0.05, offset=offset)
    assert found == kept
    assert found_scores == pytest.approx(lowered, rel=1e-5)
    assert 10 < len(kept) < 80


def test_soft_nms_by_hand() -> None:
    # IoUs with the first: 0.5, 0.25, 0.
    boxes = torch.tensor([[0.0, 0, 4, 1], [0, 0, 2, 1], [0, 0, 1, 1], [9, 9, 10, 10]])
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6])
    # 0.8 x (1 - 0.5), and the third then overlaps the second by 0.5, with 0.7 > 0.4 taken before it.
    assert soft(boxes, scores, LINEAR) == ([0, 2, 3, 1], pytest.approx([0.9, 0.7, 0.6, 0.2]))
    gauss = [0.9, 0.7 * math.exp(-0.125), 0.6, 0.8 * math.exp(-0.5) * math.exp(-0.5)]
    assert soft(boxes, scores, GAUSSIAN) == ([0, 2, 3, 1], pytest.approx(gauss))
    assert soft(boxes, scores, NAIVE, lowest=0.05) == ([0, 2, 3], pytest.approx([0.9, 0.7, 0.6]))


def test_soft_nms_lowers_an_iou_of_exactly_the_threshold() -> None:
    boxes, scores = torch.tensor([[0.0, 0, 10, 1], [0, 0, 3, 1]]), torch.tensor([0.9, 0.8])
    assert soft(boxes, scores, LINEAR, threshold=0.3)[1] == pytest.approx([0.9, 0.56])
    assert soft(boxes, scores, LINEAR, threshold=0.31)[1] == pytest.approx([0.9, 0.8])


def test_soft_nms_orders_equal_scores_as_mmcvs_swaps_do() -> None:
    apart = torch.arange(5.0)[:, None] * 10 + torch.tensor([0.0, 0, 5, 5])
    assert soft(apart, torch.tensor([0.5] * 5), LINEAR)[0] == [0, 1, 2, 3, 4]
    # The best changes places with the first.
    assert soft(apart, torch.tensor([0.5, 0.4, 0.9, 0.5, 0.5]), LINEAR)[0] == [2, 0, 3, 4, 1]
    # The last takes the place of a dropped one.
    apart[1] = apart[0]
    assert soft(apart, torch.tensor([0.9, 0.6, 0.5, 0.5, 0.5]), NAIVE)[0] == [0, 4, 2, 3]


def test_soft_nms_where_boxes_have_no_area() -> None:
    boxes = torch.tensor([[2.0, 2, 2, 2], [2, 2, 2, 2], [5, 5, 9, 9]])
    kept, scores = soft(boxes, torch.tensor([0.9, 0.8, 0.7]), GAUSSIAN)
    assert kept == [0, 2, 1]
    assert math.isnan(scores[2])
    assert soft(boxes, torch.tensor([0.9, 0.8, 0.7]), LINEAR) == ([0, 1, 2], pytest.approx([0.9, 0.8, 0.7]))


def test_soft_nms_of_nothing() -> None:
    assert soft(torch.zeros(0, 4), torch.zeros(0), LINEAR) == ([], [])
