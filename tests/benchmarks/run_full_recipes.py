"""Every recipe of detection and segmentation at its full size: built, two iterations, one test. A line for each.

    OMP_NUM_THREADS=1 python tests/benchmarks/run_full_recipes.py [detect/coco_vitb16 …]

Networks, heads, regions and numbers of classes are those of the recipe; weights are random, and images are small and
few, so that a CPU will do: 10 GB of memory and a minute each. What is printed is how many million weights each part
has, how many of the backbone's are trained, and the two losses. Fails where a run does, or where a loss is not finite.
"""

from __future__ import annotations

import io
import json
import math
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import repository  # noqa: F401
import torch

from ibot_eval import cli, recipes
from tests.dense_data import changed, coco_folder, label_map_folder

NETWORKS = {
    "vits16": "vit_small_patch16_224",
    "vitb16": "vit_base_patch16_224",
    "vitl16": "vit_large_patch16_224",
    "swint": "swin_tiny_patch4_window7_224",
}
"""Part of a recipe's name -> timm's name of its network."""
SMALL = {
    # An epoch is an iteration.
    "detect": "--train-batch 1 --set train_cfg.max_epochs=2 --short-sides 64 --test-side 64 --long-side 128",
    "segment": "--train-batch 2 --iterations 2 --warmup 1 --eval-every 0 --crop-size 64 --short-side 64 --stride 64",
}
SHORT = "--device cpu --workers 0 --log-every 1 --draw 0 --bootstrap 0"


def main() -> int:
    names = sys.argv[1:] or [name for kind in SMALL for name in recipes.names(kind) if "tiny" not in name]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        data = {"detect": coco(Path(folder) / "coco"), "segment": ade20k(Path(folder) / "ade20k")}
        for name in names:
            kind, _, own = name.partition("/")
            network = next(known for part, known in NETWORKS.items() if part in own)
            begin, out = time.monotonic(), Path(folder) / "runs"
            flags = f"--recipe {name} --ckpt random:{network} --data {data[kind]} --output {out} --name run"
            said = io.StringIO()
            with redirect_stdout(said), redirect_stderr(said):
                code = cli.main([kind, *flags.split(), *SMALL[kind].split(), *SHORT.split()])
            losses = [] if code else losses_of(out / "run")
            if code or len(losses) != 2 or not all(map(math.isfinite, losses)):
                failed.append(name)
                print(f"{name}: exit code {code}, losses {losses}\n{said.getvalue()}", flush=True)
            else:
                print(f"{name}: {weights_of(out / 'run')}; losses {losses[0]:.3f} {losses[1]:.3f}", end="", flush=True)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
                print(f"; {time.monotonic() - begin:.0f} s, at most {peak:.1f} GB so far", flush=True)
            shutil.rmtree(out, ignore_errors=True)
    return len(failed)


def losses_of(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def weights_of(run: Path) -> str:
    """Millions in each part of the model."""
    parts: Counter[str] = Counter()
    for name, tensor in torch.load(run / "model.pth", mmap=True, weights_only=True)["state_dict"].items():
        if tensor.is_floating_point() and "running_" not in name:
            parts[name.split(".")[0]] += tensor.numel()
    return ", ".join(f"{part} {count / 1e6:.1f} M" for part, count in parts.items())


def coco(root: Path) -> Path:
    """One image to train on, one to test, and COCO's 80 classes."""
    coco_folder(root, 1, 1)
    more = [{"id": number, "name": f"class {number}"} for number in range(100, 177)]
    for split in ("train", "val"):
        changed(root, lambda content: content["categories"].extend(more), split)
    return root


def ade20k(root: Path) -> Path:
    """Two images to train on, one to test, and 150 classes."""
    root = label_map_folder(root, 2, 1)
    (root / "classes.txt").write_text("\n".join(f"class {number}" for number in range(150)) + "\n")
    return root


if __name__ == "__main__":
    sys.exit(main())
