"""Our operators in the place of mmcv's against torchvision's own calls, on one thread: seconds and ratios.

    python tests/benchmarks/bench_operators.py [--boxes 2000] [--rois 512] [--rounds 7]

Both take the same boxes by turns, and the best round of each is taken, since the machine may be busy with other work.
The sizes are those of a detector in training: proposals of one level, which mostly lie around the objects, and RoIs of
256 channels. Where a compiled mmcv is installed, its operators are measured too.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchvision
from torch import Tensor

from protocols.openmmlab import extension, operators


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=2000)
    parser.add_argument("--rois", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    modules: dict[str, Any] = {"ours": operators}
    if extension.compiled() is not None:
        modules["compiled"] = importlib.import_module("mmcv._ext")
    for name, boxes in (("clustered", clustered(options.boxes)), ("scattered", scattered(options.boxes))):
        scores = torch.rand(len(boxes), generator=torch.Generator().manual_seed(1))
        calls: dict[str, Callable[[], object]] = {
            "torchvision": lambda b=boxes, s=scores: torchvision.ops.nms(b, s, 0.7)
        }
        for who, module in modules.items():
            calls[who] = lambda m=module, b=boxes, s=scores: m.nms(b, s, iou_threshold=0.7, offset=0)
        show(f"nms of {len(boxes)} {name} boxes", calls, options.rounds)
    boxes = clustered(min(options.boxes, 500))
    scores = torch.rand(len(boxes), generator=torch.Generator().manual_seed(1))
    settings = {"iou_threshold": 0.5, "sigma": 0.5, "min_score": 1e-3, "method": operators.GAUSSIAN, "offset": 0}
    soft = {
        who: lambda m=module: m.softnms(boxes, scores, boxes.new_empty(len(boxes), 5), **settings)
        for who, module in modules.items()
    }
    show(f"softnms of {len(boxes)} boxes", soft, options.rounds)
    roi_align(options.rois, modules, options.rounds)


def clustered(n: int) -> Tensor:
    """(n, 4) boxes around 20 objects in an image of 1333 x 800, so that many overlap."""
    generator = torch.Generator().manual_seed(0)
    objects = torch.cat([torch.rand(20, 2, generator=generator), torch.full((20, 2), 0.15)], 1)
    near = objects[torch.randint(20, (n,), generator=generator)]
    near = near + 0.02 * torch.randn(n, 4, generator=generator)
    return _corners(near)


def scattered(n: int) -> Tensor:
    """(n, 4) small boxes anywhere in an image of 1333 x 800, so that few overlap: the most comparisons."""
    generator = torch.Generator().manual_seed(0)
    return _corners(torch.cat([torch.rand(n, 2, generator=generator), 0.05 * torch.rand(n, 2, generator=generator)], 1))


def _corners(relative: Tensor) -> Tensor:
    pixels = relative * torch.tensor([1333.0, 800, 1333, 800])
    return torch.cat([pixels[:, :2], pixels[:, :2] + pixels[:, 2:].clamp(min=1)], 1)


def roi_align(n: int, modules: Mapping[str, Any], rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 256, 50, 84, generator=generator)
    rois = torch.cat([(torch.arange(n) % 2)[:, None], clustered(n)], 1)
    output, grad = torch.empty(n, 256, 7, 7), torch.randn(n, 256, 7, 7, generator=generator)
    nothing, grad_input = torch.empty(0), torch.empty_like(features)
    plain = (0.0625, 7, 7)
    settings: dict[str, Any] = {
        "aligned_height": 7,
        "aligned_width": 7,
        "spatial_scale": 0.0625,
        "sampling_ratio": 0,
        "pool_mode": operators.MEAN,
        "aligned": True,
    }
    forward: dict[str, Callable[[], object]] = {
        "torchvision": lambda: torchvision.ops.roi_align(features, rois, (7, 7), 0.0625, 0, True)
    }
    backward: dict[str, Callable[[], object]] = {
        "torchvision": lambda: torch.ops.torchvision._roi_align_backward(grad, rois, *plain, *features.shape, 0, True)
    }
    for who, module in modules.items():
        forward[who] = lambda m=module: m.roi_align_forward(features, rois, output, nothing, nothing, **settings)
        backward[who] = lambda m=module: m.roi_align_backward(grad, rois, nothing, nothing, grad_input, **settings)
    show(f"roi_align of {n} RoIs, forward", forward, rounds)
    show(f"roi_align of {n} RoIs, backward", backward, rounds)


def show(what: str, calls: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """One line: the best of ``rounds`` of each call, and how much slower ours is than each other."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for who, call in calls.items():
            start = time.perf_counter()
            call()
            best[who] = min(best[who], time.perf_counter() - start)
    seconds = ", ".join(f"{who} {1000 * value:.2f} ms" for who, value in best.items())
    ratios = ", ".join(f"ours / {who} {best['ours'] / best[who]:.2f}" for who in best if who != "ours")
    print(f"{what}: {seconds}" + (f" ({ratios})" if ratios else ""), flush=True)


if __name__ == "__main__":
    main()
