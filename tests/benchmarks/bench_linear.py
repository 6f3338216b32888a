"""A step of the linear sweep against its bare matrix products and against heads trained one by one, within one run.

    python tests/benchmarks/bench_linear.py [--repetitions 15] [--rates 45] [--groups 2]

Prints the time per step of: the two matrix products that any such step needs (logits, gradient; as one product each and
in several tilings, the fastest median being the measure), the sweep, and the published way, a loop over one layer and
one optimizer for each head; and the largest difference between the weights of the last two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from ibot_eval.probes.grid import grid, published_rates
from ibot_eval.probes.sweep import HeadSetting, Sweep

SEED = 0


def products(features: torch.Tensor, weight: torch.Tensor, slopes: torch.Tensor, rows: int) -> None:
    """(B, D) x (D, H C), then (H C, B) x (B, D), ``rows`` of the H C at a time."""
    for a in range(0, len(weight), rows):
        features @ weight[a : a + rows].T
        slopes[:, a : a + rows].T @ features


class OneByOne:
    """A layer and a torch.optim.SGD for each head, as published."""

    def __init__(self, sweep: Sweep) -> None:
        self.heads = []
        for index, setting in enumerate(sweep.settings * sweep.groups):
            layer = torch.nn.Linear(sweep.width, sweep.classes)
            weight, bias = sweep.head(index)
            layer.load_state_dict({"weight": weight, "bias": bias})
            optimizer = torch.optim.SGD(layer.parameters(), setting.lr, 0.9, weight_decay=setting.weight_decay)
            self.heads.append((layer, optimizer))

    def step(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        for layer, optimizer in self.heads:
            optimizer.zero_grad()
            F.cross_entropy(layer(features), targets).backward()
            optimizer.step()


def compare(settings: tuple[HeadSetting, ...], arguments: argparse.Namespace) -> None:
    width, classes, batch, groups = arguments.width, arguments.classes, arguments.batch, arguments.groups
    generator = torch.Generator().manual_seed(SEED)
    features = torch.randn(batch, width, generator=generator)
    targets = torch.randint(classes, (batch,), generator=generator)
    sweep = Sweep(width, classes, settings, groups=groups, seed=SEED)
    weight, slopes = torch.randn(len(sweep) * classes, width), torch.randn(batch, len(sweep) * classes)
    one_by_one = OneByOne(sweep)
    bare: dict[str, Callable[[], object]] = {
        f"products, {heads} heads at a time": lambda rows=heads * classes: products(features, weight, slopes, rows)
        for heads in (len(sweep), 16, 4, 2, 1)
    }
    cases = bare | {
        "sweep": lambda: sweep.step(features, targets),
        "one by one": lambda: one_by_one.step(features, targets),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(arguments.repetitions + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if repetition:  # the first is for warming up
                seconds[name].append(time.perf_counter() - start)
    print(f"{len(sweep)} heads, {width} features, {classes} classes, batch {batch}, {torch.get_num_threads()} threads")
    for name, taken in seconds.items():
        print(f"  {name:30s} median {1e3 * statistics.median(taken):8.1f} ms   fastest {1e3 * min(taken):8.1f} ms")
    for kind, of in (("medians", statistics.median), ("fastest", min)):
        taken = {name: of(times) for name, times in seconds.items()}
        print(f"  sweep / products in one call each ({kind}): {taken['sweep'] / taken[next(iter(bare))]:.2f}")
        print(f"  sweep / fastest way of tiling them ({kind}): {taken['sweep'] / min(taken[n] for n in bare):.2f}")
        print(f"  one by one / sweep ({kind}): {taken['one by one'] / taken['sweep']:.1f}")
        least = min(taken[n] for n in bare)
        print(f"  one by one / bare products, which no sweep can surpass ({kind}): {taken['one by one'] / least:.1f}")
    own = [(sweep.head(i), layer) for i, (layer, _) in enumerate(one_by_one.heads)]
    apart = max(float((weight - layer.weight.detach()).abs().max()) for (weight, _), layer in own)
    print(f"  largest difference of a weight after {arguments.repetitions + 1} steps: {apart:.1e}")
    print(f"  load average at the end: {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, default=45)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--full", action="store_true", help="the 180 heads with weight decay and LARS")
    arguments = parser.parse_args()
    if arguments.full:
        # One by one only SGD is compared.
        compare(tuple(s for s in grid("full", arguments.batch) if s.optimizer == "sgd"), arguments)
    else:
        compare(tuple(map(HeadSetting, published_rates(arguments.batch)[: arguments.rates])), arguments)


if __name__ == "__main__":
    main()
