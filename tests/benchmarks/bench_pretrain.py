"""One pre-training step against the published-style step and against the machine's matrix products, within one run.

    python tests/benchmarks/bench_pretrain.py [--batch 4] [--rounds 5] [--threads 2] [--arch vit_small] [--profile]

ViT-S/16, 2 crops of 224 and 10 of 96 pixels, K = 8192, float32. Whole optimiser steps (both networks' forward passes,
losses, backward pass, clipping, AdamW, moving average, centres) take turns, on the same inputs, from the same weights:
ours, the published style's (tests/published_step.py), and ours without masks and patch loss (DINO). The machine's rate
is that of all matrix products of our step, taken from it by their shapes and strides and timed alone, each as often as
the step has it. Peak memory comes from processes of their own, counted from the end of the imports.

Leaves with 1 where the losses of the two ways differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import repository  # noqa: F401
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.throughput import count_flops
from tests.benchmarks.pretrain_steps import OurStep, inputs_of, published_step, settings_of

CPU = torch.device("cpu")
TOLERANCE = 1e-5

Layout = tuple[tuple[int, ...], tuple[int, ...]]
Product = tuple[Any, tuple[Layout, ...]]


class Products(TorchDispatchMode):
    """Counts the matrix products of what runs under it, by operator and the shapes and strides of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()
        aten = torch.ops.aten
        self.kinds = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.kinds:
            self.found[func, tuple((tuple(a.shape), a.stride()) for a in args if isinstance(a, Tensor))] += 1
        return func(*args, **(kwargs or {}))


def product_flops(product: Product) -> int:
    left, right = (layout[0] for layout in product[1][-2:])
    batch = left[0] if len(left) == 3 else 1
    return 2 * batch * left[-2] * left[-1] * right[-1]


def product_seconds(product: Product, repetitions: int = 3) -> float:
    """Fastest of a few."""
    tensors = [torch.empty_strided(shape, stride).normal_() for shape, stride in product[1]]
    taken = []
    for _ in range(repetitions + 1):
        begin = time.perf_counter()
        product[0](*tensors)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def megabytes(name: str) -> int:
    """A line of this process's memory figures: VmRSS for now, VmHWM for its peak."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) >> 10


def memory_child(options: argparse.Namespace) -> None:
    settings = settings_of(options.arch, options.batch, dino=options.memory_of == "dino", tiny=options.tiny)
    inputs = inputs_of(settings, CPU)
    before = megabytes("VmRSS")
    run = OurStep(settings, CPU)
    for _ in range(2):  # the optimiser's state exists from the second on
        run.step(inputs)
    print(f"peak {megabytes('VmHWM') - before}")


def peak_memory(kind: str, options: argparse.Namespace) -> int:
    """MB of two steps beyond imports and inputs."""
    command = [sys.executable, __file__, "--memory-of", kind, "--arch", options.arch, "--batch", str(options.batch)]
    command += ["--threads", str(options.threads), *(["--tiny"] if options.tiny else [])]
    # Tensors are then mapped and unmapped one by one: the peak is theirs, not the allocator's holes.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found = re.search(r"peak (\d+)", output)
    assert found, output
    return int(found[1])


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--arch", default="vit_small")
    parser.add_argument("--tiny", action="store_true", help="a network and crops that only try this script")
    parser.add_argument("--profile", action="store_true", help="also print where our step's time goes")
    parser.add_argument("--memory-of", choices=["ibot", "dino"], help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        memory_child(options)
        return 0

    settings = settings_of(options.arch, options.batch, tiny=options.tiny)
    inputs = inputs_of(settings, CPU)
    ours = OurStep(settings, CPU)
    dino = OurStep(settings_of(options.arch, options.batch, dino=True, tiny=options.tiny), CPU)
    published = ours.published()
    print(
        f"{'tiny' if options.tiny else options.arch}, batch {options.batch}, {options.threads} threads of "
        f"{os.cpu_count()} cores, float32; {100 * inputs.masks.float().mean():.1f} % of the patches masked"
    )

    losses: list[tuple[float, float]] = []
    results: dict[str, Tensor] = {}
    steps: dict[str, Callable[[], None]] = {
        "ours": lambda: results.update(ours=ours.step(inputs)),
        "published": lambda: results.update(published=published_step(published, inputs)),
        "dino": lambda: results.update(dino=dino.step(inputs)),
    }
    # Two rounds that are not timed, since watching costs time; they also warm up.
    work = {name: count_flops(step) for name, step in steps.items()}
    losses.append((results["ours"].item(), results["published"].item()))
    with Products() as products:
        steps["ours"]()
    steps["published"]()
    losses.append((results["ours"].item(), results["published"].item()))

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    alone: dict[Product, float] = dict.fromkeys(products.found, float("inf"))
    for _ in range(options.rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step))
        losses.append((results["ours"].item(), results["published"].item()))
        for product, before in alone.items():
            alone[product] = min(before, product_seconds(product))

    worst = max(abs(a - b) / abs(b) for a, b in losses)
    print(f"losses of {len(losses)} steps: first {losses[0][0]:.7f} ours, {losses[0][1]:.7f} published style;")
    print(f"  largest relative difference {worst:.1e} (allowed {TOLERANCE:.0e})")
    for name, values in seconds.items():
        print(
            f"  {name:<10} median {statistics.median(values):7.3f} s   best {min(values):7.3f} s   "
            f"{work[name] / 1e9:7.1f} GFLOP   {work[name] / min(values) / 1e9:6.1f} GFLOP/s at best"
        )
    for kind, of in (("medians", statistics.median), ("best", min)):
        print(f"published style / ours ({kind}): {of(seconds['published']) / of(seconds['ours']):.3f} (aim: 1.4)")
        print(f"iBOT / DINO, time ({kind}): {of(seconds['ours']) / of(seconds['dino']):.3f} (aim: at most 1.07)")
    print(f"published style / ours, counted work: {work['published'] / work['ours']:.3f}")
    print(f"iBOT / DINO, counted work: {work['ours'] / work['dino']:.3f}")

    total = sum(product_flops(p) * n for p, n in products.found.items())
    rate = total / sum(alone[p] * n for p, n in products.found.items())
    share = work["ours"] / min(seconds["ours"]) / rate
    print(
        f"matrix products of our step alone, {len(alone)} shapes, {sum(products.found.values())} products, "
        f"{total / 1e9:.1f} GFLOP: {rate / 1e9:.1f} GFLOP/s"
    )
    print(f"our step reaches {100 * share:.1f} % of that rate (aim: 60, hope: 75)")

    if Path("/proc/self/status").exists():
        peaks = {kind: peak_memory(kind, options) for kind in ("ibot", "dino")}
        print(f"peak memory of two steps: iBOT {peaks['ibot']} MB, DINO {peaks['dino']} MB", end="")
        print(f", ratio {peaks['ibot'] / peaks['dino']:.3f} (aim: at most 1.05)")
    if options.profile:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            ours.step(inputs)
        print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    if worst > TOLERANCE:
        print("the losses differ: the times above compare unequal things")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
