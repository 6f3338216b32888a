"""Extraction against what it cannot beat: the bare forward pass on pre-decoded tensors, and decoding alone.

    python tests/benchmarks/bench_extraction.py [--size 112] [--images 256] [--rounds 3] [--workers 0 1 2]

On the CPU both take the same cores, so the two bounds are: the slower of the two (as if each had cores of its own), and
both added up. Rounds are interleaved and the best of each is taken, since the machine may be busy with other work.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import timm
import torch

from ibot_eval.cache import BankCache
from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.loading import image_loader
from ibot_eval.data.opening import open_data
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.extraction import extract_banks
from ibot_eval.features import FeatureRequest
from ibot_eval.models import wrap
from ibot_eval.settings import DataSettings

DATA = Path(__file__).parents[3] / "shared" / "data" / "imagenette128"
REQUEST = FeatureRequest("test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=112, help="side of the crop in pixels, a multiple of 16")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with val/CLASS/IMAGE")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if not options.data.is_dir():
        print(f"skipped: {options.data} is not here")
        return
    device = torch.device(options.device)
    per_class = -(-options.images // 10)
    split = open_data(DataSettings(data=str(options.data), test_per_class=per_class), roles=("test",)).splits["test"]
    assert isinstance(split, FolderSplit)
    n = len(split)
    batches = [list(range(i, min(i + options.batch_size, n))) for i in range(0, n, options.batch_size)]
    net = timm.create_model("vit_small_patch16_224", img_size=options.size, num_classes=0)
    backbone = wrap(net).to(device).eval()
    transform = EvalTransform(options.size * 8 // 7, options.size, "bicubic", backbone.mean, backbone.std)
    decoded = [batch.images for batch in image_loader(split, transform, batches, 0)]

    def forward() -> None:
        with torch.inference_mode():
            for images in decoded:
                backbone.outputs(transform.normalize(images.to(device, non_blocking=True))).blocks[0].cls.cpu()

    def decode(workers: int) -> None:
        for _ in image_loader(split, transform, batches, workers):
            pass

    def extract(workers: int) -> None:
        report = SimpleNamespace(sha256="0" * 64, key="", overrides={}, reference="benchmark")
        loaded = SimpleNamespace(backbone=backbone, projection_head=None, classifier=None, report=report)
        with tempfile.TemporaryDirectory() as folder:
            extract_banks(
                [REQUEST],
                loaded,  # type: ignore[arg-type]
                {"test": split},
                transform,
                BankCache(folder),
                device=device,
                batch_size=options.batch_size,
                workers=workers,
                progress=False,
            )

    tasks: dict[str, Callable[[], None]] = {"forward": forward}
    tasks |= {f"decode, {w} workers": lambda w=w: decode(w) for w in options.workers}
    tasks |= {f"extract, {w} workers": lambda w=w: extract(w) for w in options.workers}
    rates: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(options.rounds):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            rates[name].append(n / (time.perf_counter() - begin))

    print(
        f"{n} images, {options.size} px, ViT-S/16, batch {options.batch_size}, {device}, {os.cpu_count()} cores,",
        end="",
    )
    print(f" {torch.get_num_threads()} threads; images/s, best of {options.rounds} (all rounds)")
    best = {name: max(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"  {name:<20} {best[name]:8.1f}   ({', '.join(f'{v:.1f}' for v in values)})")
    decoding = max(best[f"decode, {w} workers"] for w in options.workers)
    bounds = {
        "the slower of the two": min(best["forward"], decoding),
        "both added up (they share the cores)": 1 / (1 / best["forward"] + 1 / decoding),
    }
    for what, bound in bounds.items():
        print(f"  bound: {what}: {bound:.1f}")
        for w in options.workers:
            print(f"    extraction with {w} workers reaches {100 * best[f'extract, {w} workers'] / bound:.1f} % of it")


if __name__ == "__main__":
    main()
