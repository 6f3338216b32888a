"""mmcv's operators that Cascade Mask R-CNN needs, on torchvision's kernels.

Names, arguments and results are those of mmcv 2.1's compiled module, whose kernels work in float32 with a float32
threshold. In float32 on a CPU the results are the compiled ones', those of ``offset=1`` to the last bit of an IoU.
Float16 and bfloat16 are computed in float32, which the kernels need for box coordinates anyway.
"""

from __future__ import annotations

import numpy as np
import torch
import torchvision
from torch import Tensor

MEAN = 1
"""mmcv's number for RoIAlign that averages; 0 takes the maximum."""

NAIVE, LINEAR, GAUSSIAN = 0, 1, 2
"""mmcv's numbers for what Soft-NMS does to an overlapping box's score: 0, times (1 - IoU), times exp(-IoU² / sigma)."""


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Non-maximum suppression: keeps a box unless a kept box of a higher score overlaps it by more than the threshold.

    Args:
        boxes: (n, 4), x1 y1 x2 y2 in pixels.
        scores: (n,).
        iou_threshold: an IoU of exactly this in float32 is kept.
        offset: 1 where x2 and y2 are the last pixel inside, so that a side is x2 - x1 + 1; else 0.

    Returns:
        (k,) int64, the kept boxes by falling score. Equal scores come as torch's unstable sort leaves them, which is
        mmcv's order: another one lets training drift.
    """
    if not len(boxes):
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    order = scores.sort(descending=True).indices
    sides = boxes[order].float()
    if offset:
        sides = sides + sides.new_tensor([0, 0, offset, offset])
    # Numbers that all differ, since torchvision sorts again, by another rule for equal scores.
    falling = torch.arange(len(sides), 0, -1, device=sides.device, dtype=torch.float32)
    kept = torchvision.ops.nms(sides, falling, float(np.float32(iou_threshold)))
    return order[kept]


@torch.no_grad()
def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Averages bilinear samples of each bin of each RoI (He et al. 2017, "Mask R-CNN", section 3) into ``output``.

    Args:
        input: (b, c, h, w) feature maps.
        rois: (n, 5), the image's index and x1 y1 x2 y2 in pixels of the image.
        output: (n, c, aligned_height, aligned_width), filled in place.
        argmax_y: of the maximum; left alone.
        argmax_x: likewise.
        aligned_height: bins per RoI.
        aligned_width: bins per RoI.
        spatial_scale: size of the feature map over that of the image.
        sampling_ratio: samples per bin and axis; 0 takes one per pixel of the map, rounded up.
        pool_mode: ``MEAN``.
        aligned: shift by half a pixel, so that pixel centres lie at .5; without, RoIs are at least one pixel wide.

    Raises:
        NotImplementedError: a ``pool_mode`` other than ``MEAN``.
        RuntimeError: on a CPU with ``aligned``, a RoI whose x2 < x1 or y2 < y1, or with NaN.
    """
    dtype = _check_rois(input, rois, pool_mode, aligned)
    # The operator itself: torchvision's function around it would take a slow path of its own, in plain torch, where
    # deterministic algorithms are asked for.
    output.copy_(
        torch.ops.torchvision.roi_align(
            input.to(dtype),
            rois.to(dtype),
            spatial_scale,
            aligned_height,
            aligned_width,
            sampling_ratio,
            aligned,
        )
    )


@torch.no_grad()
def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """The gradient of :func:`roi_align_forward` with respect to its input, written into ``grad_input``.

    Args:
        grad_output: (n, c, aligned_height, aligned_width).
        rois: as given forward, as are all further ones but ``grad_input``.
        argmax_y: not used by averages.
        argmax_x: likewise.
        grad_input: (b, c, h, w), filled in place.
        aligned_height: bins per RoI.
        aligned_width: bins per RoI.
        spatial_scale: size of the feature map over that of the image.
        sampling_ratio: samples per bin and axis.
        pool_mode: ``MEAN``.
        aligned: shift by half a pixel.

    Raises:
        NotImplementedError: a ``pool_mode`` other than ``MEAN``.
        RuntimeError: as forward.
    """
    dtype = _check_rois(grad_output, rois, pool_mode, aligned)
    grad_input.copy_(
        torch.ops.torchvision._roi_align_backward(
            grad_output.to(dtype),
            rois.to(dtype),
            spatial_scale,
            aligned_height,
            aligned_width,
            *grad_input.shape,
            sampling_ratio,
            aligned,
        )
    )


def _check_rois(features: Tensor, rois: Tensor, pool_mode: int, aligned: bool) -> torch.dtype:
    """The type to compute in: torchvision wants both of one type, and has no bfloat16."""
    if pool_mode != MEAN:
        raise NotImplementedError("roi_align with pool_mode='max' is not in ibot-eval's stand-in; use 'avg'")
    # mmcv's CUDA kernel does not look either: it would hold up the queue.
    if aligned and not rois.is_cuda and not bool((rois[:, 3:] >= rois[:, 1:3]).all()):
        raise RuntimeError("roi_align: RoIs of negative size (x2 < x1 or y2 < y1) or that are no numbers")
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Soft-NMS (Bodla et al. 2017, figure 2): lowers the scores of overlapping boxes instead of dropping them.

    Args:
        boxes: (n, 4) on the CPU, x1 y1 x2 y2 in pixels.
        scores: (n,).
        dets: (n, 5), whose first k rows are filled with the kept boxes and their lowered scores.
        iou_threshold: from this IoU on, a score is lowered; the Gaussian lowers all.
        sigma: width of the Gaussian.
        min_score: a box whose score, once lowered, is below is dropped.
        method: ``NAIVE``, ``LINEAR`` or ``GAUSSIAN``.
        offset: as in :func:`nms`.

    Returns:
        (k,) int64, the kept boxes, in the order in which they were taken. Boxes without area have no IoU with each
        other: a score that has become NaN by that is taken once no other box is left.
    """
    # mmcv's loop takes boxes from the front, swaps the taken one with the first and a dropped one with the last, so
    # that equal scores come in an order that only the same swaps give. NumPy, as torch is slow on a few numbers.
    table = np.concatenate([boxes.detach().float().numpy(), scores.detach().float().numpy()[:, None]], axis=1)
    index = np.arange(len(table))
    threshold, lowest = np.float32(iou_threshold), np.float32(min_score)
    taken, left = 0, len(table)
    while taken < left:
        candidates = table[taken:left, 4]
        best = taken + (0 if np.isnan(candidates).all() else int(np.nanargmax(candidates)))
        table[[taken, best]], index[[taken, best]] = table[[best, taken]], index[[best, taken]]
        rest = table[taken + 1 : left]
        rest[:, 4] *= _soft_weights(table[taken], rest, threshold, np.float32(sigma), method, np.float32(offset))
        taken += 1
        for place in taken + np.flatnonzero(rest[:, 4] < lowest):
            # What comes from the end may have to go too.
            while place < left and table[place, 4] < lowest:
                left -= 1
                table[place], index[place] = table[left], index[left]
    dets[:left] = torch.from_numpy(table[:left]).to(dets)
    return torch.from_numpy(index[:left])


def _soft_weights(
    best: np.ndarray, rest: np.ndarray, threshold: np.float32, sigma: np.float32, method: int, offset: np.float32
) -> np.ndarray:
    """(m,) float32, what the scores of ``rest`` (m, 5) are multiplied by when ``best`` (5,) is taken."""
    corner = np.maximum(best[:2], rest[:, :2])
    sides = np.maximum(np.minimum(best[2:4], rest[:, 2:4]) - corner + offset, np.float32(0))
    shared = sides[:, 0] * sides[:, 1]
    area = (best[2] - best[0] + offset) * (best[3] - best[1] + offset)
    areas = (rest[:, 2] - rest[:, 0] + offset) * (rest[:, 3] - rest[:, 1] + offset)
    with np.errstate(invalid="ignore", divide="ignore"):
        iou = shared / (area + areas - shared)
    if method == GAUSSIAN:
        return np.exp(-(iou * iou) / sigma)
    kept = {NAIVE: np.zeros_like(iou), LINEAR: 1 - iou}[method]
    return np.where(iou >= threshold, kept, np.float32(1))
