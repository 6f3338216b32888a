"""A bank of patterns against the bare pass through backbone and projection head, and the memory beside the model.

    python tests/benchmarks/bench_patterns.py [--size 224] [--images 128] [--rounds 3] [--prototypes 8192]

The target: time within 1.1x of decoding, backbone and head, and less than 1.5 GB beside the model for 10,000 images.
Rounds are interleaved and the best of each is taken. Memory is measured twice: over the pass, which holds one batch at
a time, and over the bookkeeping of 10,000 images, whose outputs are drawn at random.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import timm
import torch

from ibot_eval.data.loading import image_loader
from ibot_eval.data.opening import open_data
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.heads import ProjectionHead
from ibot_eval.image_pass import Engine
from ibot_eval.models import wrap
from ibot_eval.settings import DataSettings
from ibot_eval.visual.patterns import TOP, make_bank
from ibot_eval.visual.top_patches import TopPatches

DATA = Path(__file__).parents[3] / "shared" / "data" / "imagenette128"
MANY = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="side of the crop in pixels, a multiple of 16")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with val/CLASS/IMAGE")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--prototypes", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if not options.data.is_dir():
        print(f"skipped: {options.data} is not here")
        return
    device = torch.device(options.device)
    per_class = -(-options.images // 10)
    data = open_data(DataSettings(data=str(options.data), test_per_class=per_class), roles=("test",))
    split = data.splits["test"] = data.splits["test"].take(range(options.images))
    net = timm.create_model("vit_small_patch16_224", img_size=options.size, num_classes=0)
    backbone = wrap(net).to(device).eval()
    head = ProjectionHead(backbone.dims[-1], options.prototypes).to(device).eval()
    report = SimpleNamespace(sha256="0" * 64, key="", overrides={}, identity={}, reference="benchmark")
    loaded = SimpleNamespace(backbone=backbone, projection_head=head, classifier=None, report=report)
    transform = EvalTransform(options.size * 8 // 7, options.size, "bicubic", backbone.mean, backbone.std)
    engine = Engine(loaded, transform, device, "fp32", options.batch_size, options.workers, "stop", False)  # type: ignore[arg-type]
    batches = [
        list(range(i, min(i + options.batch_size, len(split)))) for i in range(0, len(split), options.batch_size)
    ]

    def bare() -> None:
        with torch.inference_mode():
            for batch in image_loader(split, transform, batches, options.workers):
                images = transform.normalize(batch.images.to(device, non_blocking=True))
                tokens = backbone.outputs(images).blocks[0].patches.flatten(0, 2)
                # In parts, as the bank does: 12,544 tokens x 8,192 outputs at once are 411 MB.
                for part in tokens.split(4096):
                    head.forward_patches(part)
            if device.type == "cuda":
                torch.cuda.synchronize()

    tasks: dict[str, Callable[[], object]] = {"backbone and head": bare, "patterns": lambda: make_bank(engine, data)}
    before = _resident()
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    busy: dict[str, list[float]] = {name: [] for name in tasks}
    peak = 0.0
    for _ in range(options.rounds):
        for name, task in reversed(tasks.items()):
            begin = time.perf_counter(), time.process_time()
            task()
            seconds[name].append(time.perf_counter() - begin[0])
            busy[name].append(time.process_time() - begin[1])
            if name == "patterns" and not peak:
                # The first task of all, so that the process's peak is its own.
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6 - before
    print(
        f"{len(split)} images, {options.size} px, ViT-S/16, K {options.prototypes}, batch {options.batch_size}, "
        f"{device}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    )
    print(f"  seconds, best of {options.rounds} (all rounds):")
    for name, values in seconds.items():
        print(f"  {name:<18} {min(values):8.2f}   ({', '.join(f'{v:.2f}' for v in values)})")
    ratio, own = (min(t["patterns"]) / min(t["backbone and head"]) for t in (seconds, busy))
    print(f"  patterns take {ratio:.3f}x (target 1.1)")
    print(f"  of this process's processor time, which other work on the machine disturbs less: {own:.3f}x")
    print(f"  memory beside the model over the pass: {peak:.2f} GB (target 1.5)")

    generator = np.random.default_rng(0)
    items = (options.size // 16) ** 2
    best = TopPatches(options.prototypes, TOP, 1000)
    held, spent = [], 0.0
    for start in range(0, MANY, options.batch_size):
        shape = (min(options.batch_size, MANY - start), items)
        chosen = generator.integers(0, options.prototypes, shape)
        values = generator.random(shape, np.float32)
        begin = time.perf_counter()
        best.add(np.arange(start, start + shape[0]), chosen, values, values, generator.integers(0, 1000, shape[0]))
        spent += time.perf_counter() - begin
        held.append(_resident() - before)
    print(
        f"  bookkeeping of {MANY:,} images: {1000 * spent / len(held):.1f} ms a batch; memory after a tenth of them "
        f"{held[len(held) // 10]:.2f} GB, at the end {held[-1]:.2f} GB"
    )


def _resident() -> float:
    """Memory of this process in GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


if __name__ == "__main__":
    main()
