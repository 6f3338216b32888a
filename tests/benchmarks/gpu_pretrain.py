"""What gpu.sh runs: speed, MFU and memory of steps on a GPU, then four minutes of training. See the top of gpu.sh."""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import repository  # noqa: F401
import torch
from torch import Tensor

from pretrain.config import (
    CropSettings,
    DataSettings,
    OptimiserSettings,
    PretrainEngine,
    PretrainOutput,
    PretrainSettings,
)
from pretrain.run import run
from pretrain.setup import autocast_of
from pretrain.throughput import count_flops, mfu, peak_rate
from tests.benchmarks.pretrain_steps import Inputs, OurStep, inputs_of, published_step, settings_of

WAYS = ("published fp32", "published bf16", "ours bf16", "ours bf16 compiled")
STEP_SECONDS = 170.0
"""For all measured steps together, compilation included; a way that no time is left for is skipped, and named."""
TRAIN_SECONDS = 240.0
TOTAL_SECONDS = 465.0
"""What compilation takes beyond its time goes off the training, so that the whole stays within eight minutes."""
SAVING_SECONDS = 25.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu.sh: torch sees no GPU here; --device cpu --tiny tries the script", file=sys.stderr)
        return 2
    device, begin = torch.device(options.device), time.perf_counter()
    report: dict[str, Any] = {"torch": torch.__version__, "device": name_of(device), "steps": []}
    if (options.out / "train").exists():
        print(f"gpu.sh: {options.out / 'train'} is there already; choose another OUT", file=sys.stderr)
        return 2
    lines = [f"{report['device']}, torch {report['torch']}"]

    def keep(text: str) -> None:
        # After every figure, so that a run that is cut off still leaves them.
        print(text, flush=True)
        lines.append(text)
        (options.out / "gpu.txt").write_text("\n".join(lines) + "\n")
        (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")

    print(lines[0], flush=True)
    archs = {"vit_small": 2} if options.tiny else {"vit_small": 64, "vit_base": 32}
    for arch, batch in archs.items():
        rates: dict[str, float] = {}
        for way in WAYS:
            left = STEP_SECONDS - (time.perf_counter() - begin)
            if options.tiny and way.endswith("compiled") and device.type == "cpu":
                continue  # compiling for the CPU alone would take the minute
            if left < (50 if way.endswith("compiled") else 15):
                keep(f"{arch} {way}: skipped, no time left")
                continue
            try:
                row = measured(arch, way, batch, device, options.tiny)
            except Exception as error:  # one way that fails must not take the others' figures along
                keep(f"{arch} {way}: failed, {type(error).__name__}: {error}")
                continue
            report["steps"].append(row)
            rates[way] = row["images_per_second"]
            ratio = rates[way] / rates["published fp32"] if "published fp32" in rates else math.nan
            keep(
                f"{arch:<10} {way:<20} batch {batch}: {rates[way]:8.1f} images/s ({ratio:.2f} x published fp32), "
                f"MFU {row['mfu']:.1f} %, peak memory {row['peak_memory_gb'] or math.nan:.2f} GB, "
                f"loss {row['loss']:.5f}, first step {row['first_step_seconds']:.1f} s"
            )
    left = TOTAL_SECONDS - SAVING_SECONDS - (time.perf_counter() - begin)
    report["training"] = trained(options, 30 if options.tiny else min(TRAIN_SECONDS, left))
    keep(f"training: {json.dumps(report['training'])}")
    return 0 if "error" not in report["training"] else 1


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"


def measured(arch: str, way: str, batch: int, device: torch.device, tiny: bool) -> dict[str, Any]:
    """One way's images/s, MFU in percent of the peak for its arithmetic, and peak memory in GB of steps alone."""
    settings = settings_of(arch, batch, tiny=tiny)
    precision = "bf16" if "bf16" in way else "fp32"
    inputs = inputs_of(settings, device)
    flops = useful_flops(settings, inputs, device)
    step = step_of(OurStep(settings, device, precision=precision, compiled="compiled" in way), way, precision, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    loss = step(inputs).item()
    first = time.perf_counter() - begin
    for _ in range(2):
        step(inputs)
    steps, seconds = 0, 0.0
    wait(device)
    begin = time.perf_counter()
    while steps < 3 or (seconds < 4 and steps < 40):
        step(inputs)
        steps += 1
        if steps % 5 == 0 or steps == 3:  # a wait at every step would hide how far the host runs ahead
            wait(device)
            seconds = time.perf_counter() - begin
    wait(device)
    seconds = time.perf_counter() - begin
    peak = peak_rate(device, "bf16" if precision == "bf16" and device.type == "cuda" else "fp32")
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    row = {
        "arch": arch,
        "way": way,
        "batch": batch,
        "images_per_second": batch * steps / seconds,
        "gflop_per_image": flops / batch / 1e9,
        "mfu": mfu(flops * steps, seconds, peak),
        "peak_rate": peak.source,
        "peak_memory_gb": memory,
        "loss": loss,
        "first_step_seconds": first,
        "steps": steps,
    }
    del step, inputs
    torch.compiler.reset()
    gc.collect()
    return row


def useful_flops(settings: PretrainSettings, inputs: Inputs, device: torch.device) -> int:
    """Operations of our step, which every way's MFU goes by: the published style's further logits win it nothing."""
    ours = OurStep(settings, device, precision="bf16" if device.type == "cuda" else "fp32")
    return count_flops(lambda: ours.step(inputs))


def step_of(ours: OurStep, way: str, precision: str, device: torch.device) -> Callable[[Inputs], Tensor]:
    if way.startswith("ours"):
        return ours.step
    published = ours.published()

    def step(inputs: Inputs) -> Tensor:
        with autocast_of(precision, device):
            return published_step(published, inputs)

    return step


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(options: argparse.Namespace) -> None:
    """What `ibot-eval pretrain` would do; called directly, so that the package need not be installed."""
    batch = 4 if options.tiny else 128
    settings = replace(
        settings_of("vit_small", batch, tiny=options.tiny),
        crops=CropSettings(global_size=128, local_size=64, local_crops=2 if options.tiny else 10),
        optimiser=OptimiserSettings(batch_size=batch, epochs=100),
        data=DataSettings(data=str(options.data)),
        engine=PretrainEngine(device=options.device, compile=not options.tiny),
        output=PretrainOutput(output=options.out, name="train", log_every=1 if options.tiny else 5, save_every=1000),
    )
    run(settings)


def trained(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Trains in a process of its own until the time is over; SIGTERM makes it save and leave."""
    if not options.data.is_dir():
        return {"skipped": f"{options.data} is not here"}
    folder = options.out / "train"
    command = [sys.executable, __file__, "--train", *sys.argv[1:]]
    with open(options.out / "train.log", "w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        with suppress(subprocess.TimeoutExpired):
            running.wait(seconds)
        if running.poll() is None:
            running.terminate()
        try:
            running.wait(SAVING_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
    rows = []
    if (folder / "log.jsonl").exists():
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines() if line.endswith("}")]
    steps = [row for row in rows if "loss" in row]
    if not steps:
        return {"error": "no step was logged", "output": (options.out / "train.log").read_text()[-2000:]}
    shown = ("step", "epoch", "loss", "cls_loss", "patch_loss_per_token", "teacher_entropy", "images_per_second")
    shown += ("data_wait", "mfu", "peak_memory_gb")
    ends = [{k: v for k, v in row.items() if k != "event"} for row in rows if row.get("event") == "epoch"]
    return {
        "seconds": seconds,
        "first": {name: steps[0].get(name) for name in shown},
        "last": {name: steps[-1].get(name) for name in shown},
        "epoch_ends": ends,
    }


if __name__ == "__main__":
    sys.exit(main())
