"""The stand-in for mmcv's compiled operators in its place: what it offers, what it refuses, and mmcv's own on top."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

from protocols.openmmlab import extension, operators
from tests.dense import prepared
from tests.test_openmmlab_operators import boxes_and_scores


def test_the_stand_in_names_what_it_lacks() -> None:
    module = extension.StandIn()
    assert module.nms is operators.nms
    assert hasattr(module, "modulated_deform_conv_forward")
    with pytest.raises(NotImplementedError, match=r"'modulated_deform_conv_forward'.*nms, roi_align_forward"):
        module.modulated_deform_conv_forward(1, kernel=3)
    with pytest.raises(AttributeError):
        module.__path__  # noqa: B018


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_compiled_mmcv_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled: bool) -> None:
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv/__init__.py").touch()
    if is_compiled:
        (tmp_path / "mmcv/_ext.py").write_text("nms = 'compiled'")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mmcv"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert extension.install() is not is_compiled
        assert (extension.compiled() is not None) is is_compiled
        assert importlib.import_module("mmcv._ext").nms == ("compiled" if is_compiled else operators.nms)
    finally:
        # Else the real ones could not be put back.
        sys.modules.pop("mmcv._ext", None)
        sys.modules.pop("mmcv", None)


def test_mmcvs_own_functions_work_with_it() -> None:
    prepared()
    ops = importlib.import_module("mmcv.ops")
    boxes, scores = boxes_and_scores(60)
    dets, kept = ops.nms(boxes, scores, iou_threshold=0.5, score_threshold=0.2, max_num=9)
    assert torch.equal(dets, torch.cat([boxes[kept], scores[kept, None]], 1))
    assert len(kept) == 9
    labels = torch.arange(60) % 3
    _, kept = ops.batched_nms(boxes, scores, labels, {"type": "nms", "iou_threshold": 0.5})
    assert kept.tolist() == torchvision.ops.batched_nms(boxes, scores, labels, 0.5).tolist()
    # The example of mmcv's documentation.
    example = np.array([[4, 3, 5, 3], [4, 3, 5, 4], [3, 1, 3, 1], [3, 1, 3, 1], [3, 1, 3, 1], [3, 1, 3, 1]], np.float32)
    dets, kept = ops.soft_nms(example, np.array([0.9, 0.9, 0.5, 0.5, 0.4, 0.0], np.float32), 0.6, sigma=0.5)
    assert len(dets) == len(kept) == 5
    features = torch.randn(1, 2, 8, 8, requires_grad=True)
    rois = torch.tensor([[0.0, 1, 1, 9, 12]])
    pooled = ops.RoIAlign((3, 3), 0.5)(features, rois)
    assert torch.equal(pooled, torchvision.ops.roi_align(features, rois, (3, 3), 0.5, 0, True))
    pooled.sum().backward()
    assert features.grad is not None
    with pytest.raises(NotImplementedError, match="'roi_pool_forward'"):
        ops.RoIPool((3, 3))(features, rois)
