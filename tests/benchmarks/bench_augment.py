"""A worker's time per image for 2 crops of 224 and 10 of 96 pixels, masks included, against the published pipeline's.

    python tests/benchmarks/bench_augment.py [--data FOLDER] [--images 16] [--rounds 5]

Both decode the same files on one thread, by turns, and the best round of each is taken, since the machine may be busy
with other work. Without --data the files are made up: 500x375 JPEGs, about as smooth as photographs. What the device
does afterwards is measured on this machine's CPU too: on a GPU it costs the workers nothing. The published pipeline is
torchvision's and Pillow's, in tests/published_crops.py.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import repository  # noqa: F401
import torch
from PIL import Image

from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.images import IMAGE_EXTENSIONS
from pretrain.augment import Augmentation
from pretrain.loader import crop_loader, finish
from pretrain.masking import Masking
from pretrain.samples import Samples
from tests.published_crops import PublishedCrop, photograph

AUGMENTATION = Augmentation()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with images, at any depth; default: made-up photographs")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            options.data = Path(folder)
            for i in range(options.images):
                photograph(500, 375, i).save(options.data / f"{i}.jpg", quality=92)
        found = (path for path in sorted(options.data.rglob("*")) if path.suffix.lower() in IMAGE_EXTENSIONS)
        names = [str(path.relative_to(options.data)) for path, _ in zip(found, range(options.images), strict=False)]
        compare(FolderSplit("images", options.data, names, np.full(len(names), -1)), options.rounds)


def compare(split: FolderSplit, rounds: int) -> None:
    n = len(split)
    samples = Samples(split, AUGMENTATION, Masking(), "global", 16, seed=0, skip=False)
    a = AUGMENTATION
    views = [PublishedCrop(i, a.global_size, a.global_scale) for i in range(2)]
    views += [PublishedCrop(2, a.local_size, a.local_scale)] * a.local_crops
    [batch] = crop_loader(split, a, Masking(), batch_size=n, seed=0, epochs=1)

    def published(i: int) -> None:
        with Image.open(split.path(i)) as image:
            rgb = image.convert("RGB")
        for view in views:
            view(rgb)

    tasks: dict[str, Callable[[], object]] = {
        "published": lambda: [published(i) for i in range(n)],
        "worker": lambda: [samples[0, i] for i in range(n)],
        "decoding": lambda: [split.load(i) for i in range(n)],
        "device": lambda: finish(batch, a),
    }
    best = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            best[name] = min(best[name], (time.perf_counter() - start) / n)
    sizes = {Image.open(split.path(i)).size for i in range(n)}
    print(f"{n} images of {len(sizes)} sizes, e.g. {sorted(sizes)[0]}; milliseconds per image, one thread:")
    print(f"published pipeline {1e3 * best['published']:.1f}")
    print(f"worker {1e3 * best['worker']:.1f}, of which decoding {1e3 * best['decoding']:.1f}")
    print(f"worker / published {best['worker'] / best['published']:.3f} (to reach: at most 0.333)")
    total = best["worker"] + best["device"]
    print(f"device part on this CPU {1e3 * best['device']:.1f}; both / published {total / best['published']:.3f}")


if __name__ == "__main__":
    main()
