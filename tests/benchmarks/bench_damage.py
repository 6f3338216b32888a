"""What damaging images costs beside the network that then looks at them: the target is less than 5 % of its pass.

    python tests/benchmarks/bench_damage.py [--size 224] [--batch-size 64] [--rounds 3] [--device cuda]

A batch is damaged in all the ways of a default run of `occlusion` (three kinds, nine levels; each fill, and shifted
squares) and of `shuffle` (seven grids), and the time for one damaged batch is set against one forward pass of ViT-S/16
on it. The attention pass that tells what is salient is counted as damage, shared by all levels as in a run. Rounds are
interleaved and the best of each is taken, since the machine may be busy with other work.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import timm
import torch

from ibot_eval.data.transforms import EvalTransform
from ibot_eval.models import wrap
from ibot_eval.robustness.occluding import Occlusions
from ibot_eval.robustness.saliency import Saliency
from ibot_eval.robustness.shuffling import Shuffles
from ibot_eval.robustness.sweep import Damage

TARGET = 5
LEVELS = tuple(range(10, 100, 10))
GRIDS = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (14, 14), (16, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="side of the images in pixels, a multiple of 112")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the forward pass")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, side, n = torch.device(options.device), options.size, options.batch_size
    net = timm.create_model("vit_small_patch16_224", img_size=side, num_classes=0)
    backbone = wrap(net).to(device).eval()
    transform = EvalTransform(side * 8 // 7, side, "bicubic", backbone.mean, backbone.std)
    images = torch.randn(n, 3, side, side, device=device)
    indices = torch.arange(n, device=device)
    grid = (side // 16, side // 16)
    saliency = Saliency(backbone, "mean", "", transform.mean, transform.std, side, grid)

    def occlusions(*kinds: str, **changes: object) -> Occlusions:
        return Occlusions(kinds, LEVELS, 16, transform, saliency, **changes)  # type: ignore[arg-type]

    ways: dict[str, Damage] = {
        "random": occlusions("random"),
        "three kinds": occlusions("random", "salient", "non-salient"),
        "random, black": occlusions("random", fill="black"),
        "random, noise": occlusions("random", fill="noise"),
        "random, shifted": occlusions("random", offset="random"),
        "shuffle": Shuffles(GRIDS),
    }

    def forward() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            backbone.outputs(images)

    def damage(way: Damage) -> None:
        for _ in way(images, indices):
            pass

    tasks: dict[str, Callable[[], None]] = {"forward": forward}
    tasks |= {name: lambda way=way: damage(way) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    with torch.inference_mode():
        for _ in range(options.rounds + 1):
            for name, task in tasks.items():
                seconds[name].append(_timed(task, device))
    # The first round is for warming up.
    best = {name: min(values[1:]) for name, values in seconds.items()}
    print(f"{n} images, {side} px, ViT-S/16 in {options.precision}, {device}, {os.cpu_count()} cores,", end="")
    print(f" {torch.get_num_threads()} threads; best of {options.rounds}")
    print(f"  forward pass {1000 * best['forward']:10.2f} ms")
    for name, way in ways.items():
        each = best[name] / len(way)
        share = 100 * each / best["forward"]
        print(
            f"  {name:<16} {1000 * each:6.2f} ms a damaged batch of {len(way)}: {share:5.2f} % of the pass, "
            f"{'within' if share < TARGET else 'above'} the target of {TARGET} %"
        )


def _timed(task: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
