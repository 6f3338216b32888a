"""The three ways in which COCO writes masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ibot_eval.data.coco_masks import mask_fault, unpack

from .dense_data import run_lengths


@pytest.mark.parametrize(
    ("mask", "part"),
    [
        ([[0, 0, 1, 0, 1, 1]], ""),
        ([[0, 0, 1, 0]], "fewer than 3 points"),
        ([[0, 0, 1, 0, 1, 1], []], "fewer than 3 points"),
        ([[0, 0, 1, 0, 1, 1, 2]], "odd number"),
        ([[0, 0, 1, 0, 1, "1"]], "no numbers"),
        ([[0, 0, 1, 0, 1, float("inf")]], "no numbers"),
        ([0, 0, 1, 0, 1, 1], "neither"),
        ("mask.png", "neither"),
        ({"size": [4, 5], "counts": [3, 5, 12]}, ""),
        ({"size": [5, 4], "counts": [3, 5, 12]}, "size"),
        ({"counts": [3, 5, 12]}, "size"),
        ({"size": [4, 5], "counts": [3, 5, 11]}, "add up"),
        ({"size": [4, 5], "counts": [25, -5]}, "cannot be read"),
        ({"size": [4, 5], "counts": [3, 5, 12.0]}, "cannot be read"),
        ({"size": [4, 5]}, "cannot be read"),
        ({"size": [4, 5], "counts": "35<"}, ""),
        ({"size": [4, 5], "counts": "35"}, "add up"),
        ({"size": [4, 5], "counts": "35 "}, "cannot be read"),
    ],
)
def test_faults(mask: Any, part: str) -> None:
    fault = mask_fault(mask, {"height": 4, "width": 5})
    assert part in fault
    assert bool(part) == bool(fault)


def test_packed_run_lengths_are_those_of_pycocotools() -> None:
    coding = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for height, width, share in ((4, 5, 0.5), (200, 300, 0.5), (300, 200, 0.001), (64, 64, 1.1), (1, 1, -1)):
        mask = rng.random((height, width)) < share
        packed = coding.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
        assert unpack(packed) == run_lengths(mask)["counts"]
        if len(packed) > 1:
            assert mask_fault({"size": [height, width], "counts": packed[:-1]}, {"height": height, "width": width})
