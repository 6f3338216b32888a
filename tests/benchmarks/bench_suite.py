"""A suite against one extraction plus the sum of its scorers, within one run.

    python tests/benchmarks/bench_suite.py [--repetitions 3] [--train-per-class 150] [--test-per-class 80]

Runs k-NN, linear, logreg, lowshot, clustering and part-probe on imagenette128 with the shared ViT-S/14: as a suite into
an empty cache, then once more with all records moved aside (no forward pass may be made) and once more as it is; and,
alternating with it, the bare parts: one extraction of the union of their features into another empty cache, and each
protocol's ``score`` of banks that are there. Medians; target: at most 1.3.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ibot_eval import runner
from ibot_eval.cache import BankCache
from ibot_eval.data.opening import open_data
from ibot_eval.data.transforms import eval_transform
from ibot_eval.models.vit import ViTBackbone
from ibot_eval.protocol import FrozenProtocol, Session
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings
from ibot_eval.suite import Overwrite, run_suite
from ibot_eval.suite_material import Member
from protocols.clustering import Clustering
from protocols.knn import KNN
from protocols.linear import Linear
from protocols.logreg import LogReg
from protocols.lowshot import LowShot
from protocols.part_probe import PartProbe

SHARED = Path(__file__).resolve().parents[3] / "shared"
PROTOCOLS: dict[str, type[FrozenProtocol[Any]]] = {
    "knn": KNN,
    "linear": Linear,
    "logreg": LogReg,
    "lowshot": LowShot,
    "clustering": Clustering,
    "part-probe": PartProbe,
}
T = TypeVar("T")


def timed(function: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        value = function()
    return time.perf_counter() - begin, value


def suite(settings: RunSettings, overwrite: Overwrite = "failed") -> list[str]:
    members = [Member(name, kind(kind.config_type()), settings) for name, kind in PROTOCOLS.items()]
    return run_suite(members, settings, overwrite).failed


def parts(settings: RunSettings) -> dict[str, float]:
    """Seconds of one extraction and of each protocol's scoring."""
    device, cache = torch.device("cpu"), BankCache(settings.engine.cache)
    loaded = runner.load_any(settings.checkpoint, cache, seed=0)
    data, transform = open_data(settings.data), eval_transform(settings.data, loaded.backbone)
    protocols, requests = {}, {}
    for name, kind in PROTOCOLS.items():
        protocols[name] = kind(kind.config_type()).for_network(loaded.backbone, transform, frozenset())
        requests[name] = runner.available(protocols[name].features(), loaded)
    union = [request for usable, _ in requests.values() for request in usable]
    seconds: dict[str, float] = {}

    def extract() -> Any:
        return runner.extract_union(union, loaded, data.splits, transform, cache, settings, device)[0]

    seconds["extraction"], banks = timed(extract)
    for name, protocol in protocols.items():
        usable, unavailable = requests[name]
        with tempfile.TemporaryDirectory() as folder:
            session = Session(
                device,
                Path(folder),
                data.class_names,
                data=data,
                checkpoint=loaded.report.as_dict(),
                unavailable=unavailable,
                transform=transform,
                engine=settings.engine,
                data_settings=settings.data,
            )
            torch.manual_seed(0)
            own = {request: banks[request] for request in usable}
            seconds[name], _ = timed(lambda protocol=protocol, own=own, s=session: list(protocol.score(own, s)))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--train-per-class", type=int, default=150)
    parser.add_argument("--test-per-class", type=int, default=80)
    arguments = parser.parse_args()
    if not SHARED.is_dir():
        print("left out: ../shared is not here")
        return
    forwards = 0
    original = ViTBackbone.outputs

    def outputs(self: ViTBackbone, *given: Any, **named: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return original(self, *given, **named)

    ViTBackbone.outputs = outputs  # type: ignore[method-assign]
    taken: dict[str, list[float]] = {}
    passes: dict[str, int] = {}
    for _ in range(arguments.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            settings = RunSettings(
                CheckpointSettings(ckpt=str(SHARED / "weights" / "vits14_focus_fp16.safetensors")),
                DataSettings(
                    data=str(SHARED / "data" / "imagenette128"),
                    resize=128,
                    crop=112,
                    train_per_class=arguments.train_per_class,
                    test_per_class=arguments.test_per_class,
                ),
                EngineSettings(device="cpu", cache=Path(folder, "cache")),
                OutputSettings(output=Path(folder, "runs")),
            )
            calls: dict[str, Overwrite] = {"suite": "failed", "scoring anew": "always", "nothing to do": "failed"}
            for name, overwrite in calls.items():
                forwards = 0
                seconds, failed = timed(lambda settings=settings, how=overwrite: suite(settings, how))
                taken.setdefault(name, []).append(seconds)
                passes[name] = forwards
                if failed:
                    print(f"{name}: failed: {', '.join(failed)}")
            apart = RunSettings(
                settings.checkpoint,
                settings.data,
                EngineSettings(device="cpu", cache=Path(folder, "other")),
                settings.output,
            )
            for name, seconds in parts(apart).items():
                taken.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(f"{arguments.repetitions} repetitions, {torch.get_num_threads()} threads; medians")
    for name, seconds in medians.items():
        print(f"  {name:14s} {seconds:8.2f} s" + (f"   {passes[name]} forward passes" if name in passes else ""))
    whole = medians["extraction"] + sum(medians[name] for name in PROTOCOLS)
    print(f"  suite / (one extraction + sum of the scorers): {medians['suite'] / whole:.2f}")
    print(f"  load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
