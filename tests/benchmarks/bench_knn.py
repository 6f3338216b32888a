"""k-NN scoring against the bare matrix product of the same size, within one run.

    python tests/benchmarks/bench_knn.py [--repetitions 5] [--faiss]

Prints the time of: the bare product (several tilings, and as one; the fastest median is the measure), the k-NN
protocol's whole scoring (normalisation, search, votes for four k, top-1 and top-5, intervals), and the way published
code does it (full rows sorted out by topk, one-hot scatter for every k) on a tenth of the queries, scaled; then the
peak memory beyond the banks, also for a gallery ten times as large that is read from a file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ibot_eval.features import FeatureBank
from ibot_eval.protocol import Metric, Session
from protocols.knn import KNN, KNNConfig

WIDTH, CLASSES, KS = 384, 1000, (10, 20, 100, 200)


def features(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def bank(array: np.ndarray, seed: int) -> FeatureBank:
    labels = np.random.default_rng(seed).integers(0, CLASSES, len(array))
    labels[:CLASSES] = np.arange(min(CLASSES, len(array)))
    return FeatureBank(array, labels, range(len(array)))  # type: ignore[arg-type] - numbers are names enough here


def score(gallery: FeatureBank, queries: FeatureBank, backend: str = "torch") -> list[Metric]:
    protocol = KNN(KNNConfig(k=KS, backend=backend))  # type: ignore[arg-type]
    banks = {r: gallery if r.split == "train" else queries for r in protocol.features()}
    session = Session(torch.device("cpu"), Path("unused"), (), progress=False)
    return [e for e in protocol.score(banks, session) if isinstance(e, Metric)]


def product(queries: torch.Tensor, gallery: torch.Tensor, rows: int, columns: int) -> None:
    for a in range(0, len(queries), rows):
        for b in range(0, len(gallery), columns):
            queries[a : a + rows] @ gallery[b : b + columns].T


def published_style(queries: torch.Tensor, gallery: torch.Tensor, voters: torch.Tensor) -> None:
    """Hundredths of the queries at a time, as in the evaluation scripts in use."""
    gallery = torch.nn.functional.normalize(gallery, dim=1)
    for k in KS:
        for part in torch.nn.functional.normalize(queries, dim=1).split(max(1, len(queries) // 100)):
            similarities, indices = (part @ gallery.T).topk(k, dim=1)
            one_hot = torch.zeros(len(part) * k, CLASSES).scatter_(1, voters[indices].view(-1, 1), 1)
            weights = (similarities / 0.07).exp()[:, :, None]
            (one_hot.view(len(part), k, CLASSES) * weights).sum(1).sort(1, descending=True)


def timings(n: int, q: int, repetitions: int, with_faiss: bool) -> None:
    gallery, queries = features(n, 0), features(q, 1)
    banks = bank(gallery.numpy(), 2), bank(queries.numpy(), 3)
    products: dict[str, Callable[[], object]] = {
        f"product {rows} x {columns}": lambda rows=rows, columns=columns: product(queries, gallery, rows, columns)
        for rows, columns in ((q, n), (q, 2048), (2500, 1024), (2048, 2048), (1024, 4096))
    }
    cases = products | {"k-NN scoring": lambda: score(*banks)}
    if with_faiss:
        cases["k-NN scoring, faiss"] = lambda: score(*banks, backend="faiss")
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if repetition:  # the first is for warming up
                seconds[name].append(time.perf_counter() - start)
    print(f"{n} gallery x {q} queries x {WIDTH}, {CLASSES} classes, k {KS}, {torch.get_num_threads()} threads")
    for name, taken in seconds.items():
        print(f"  {name:24s} median {statistics.median(taken):7.3f} s   fastest {min(taken):7.3f} s")
    whole = next(iter(products))
    for kind, of in (("medians", statistics.median), ("fastest", min)):
        bare = min(of(seconds[name]) for name in products)
        for name in cases.keys() - products.keys():
            taken = of(seconds[name])
            print(f"  {name} / bare product in one call ({kind}): {taken / of(seconds[whole]):.2f}")
            print(f"  {name} / fastest way of tiling it ({kind}): {taken / bare:.2f}")
    images = q / statistics.median(seconds["k-NN scoring"])
    print(f"  {images:.0f} images/s")
    start = time.perf_counter()
    published_style(queries[: q // 10], gallery, torch.from_numpy(banks[0].labels))
    scaled = 10 * (time.perf_counter() - start)
    bare = min(statistics.median(seconds[name]) for name in products)
    print(f"  published style, scaled from {q // 10} queries: {scaled:.1f} s, {scaled / bare:.1f} times the product")
    print(f"  load average at the end: {os.getloadavg()[0]:.1f}")


def memory(n: int, q: int) -> None:
    """Peak of this process's own memory (file pages left out) while scoring a gallery that is mapped from a file."""

    def own() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) << 10

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gallery.npy"
        mapped = np.lib.format.open_memmap(path, "w+", np.float32, (n, WIDTH))
        for a in range(0, n, 50_000):
            mapped[a : a + 50_000] = features(min(50_000, n - a), a)
        mapped.flush()
        del mapped
        gallery, queries = bank(np.load(path, mmap_mode="r"), 2), bank(features(q, 1).numpy(), 3)
        score(bank(features(2000, 5).numpy(), 2), bank(features(10, 6).numpy(), 3))
        before, peak, done = own(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.002):
                peak = max(peak, own())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        score(gallery, queries)
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    print(f"{n} gallery x {q} queries: {(peak - before) / 2**20:.0f} MB beyond the banks at the peak, {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gallery", type=int, default=50_000)
    parser.add_argument("--queries", type=int, default=5_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--faiss", action="store_true", help="also measure the faiss backend")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_only:
        memory(arguments.gallery, arguments.queries)
        return
    timings(arguments.gallery, arguments.queries, arguments.repetitions, arguments.faiss)
    if Path("/proc/self/status").exists():
        for n in (arguments.gallery, 10 * arguments.gallery):
            command = [sys.executable, __file__, "--memory-only", "--gallery", str(n)]
            subprocess.run([*command, "--queries", str(arguments.queries)], check=True)


if __name__ == "__main__":
    main()
