"""k-means of features against faiss called directly, with as many points, iterations and restarts, within one run.

    python tests/benchmarks/bench_kmeans.py [--points 50000] [--clusters 100] [--repetitions 5]

Prints medians and the ratios that matter: at most 1.05 for both kinds of k-means. scikit-learn, which is used where
faiss is not installed, is measured once with --sklearn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import faiss
import numpy as np
import torch

from ibot_eval.kmeans import Backend, kmeans

WIDTH = 384


def features(n: int) -> np.ndarray:
    """Overlapping clusters, so that no start is done before its last iteration."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(1000, WIDTH)).astype(np.float32)
    points = centres[generator.integers(0, 1000, n)]
    return points + 2 * generator.standard_normal(points.shape, dtype=np.float32)


def direct(points: np.ndarray, k: int, restarts: int, iterations: int, spherical: bool) -> None:
    if spherical:
        points = points / np.linalg.norm(points, axis=1, keepdims=True)
    options = {"niter": iterations, "nredo": restarts, "spherical": spherical, "max_points_per_centroid": len(points)}
    found = faiss.Kmeans(points.shape[1], k, **options)
    found.train(points)
    found.assign(points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--clusters", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sklearn", action="store_true")
    arguments = parser.parse_args()
    points, k = features(arguments.points), arguments.clusters
    restarts, iterations = arguments.restarts, arguments.iterations

    def own(spherical: bool, backend: Backend = "faiss") -> None:
        kmeans(points, k, restarts=restarts, iterations=iterations, spherical=spherical, backend=backend)

    cases: dict[str, Callable[[], None]] = {}
    for spherical, name in ((False, "k-means"), (True, "spherical")):
        cases[f"{name}, faiss directly"] = lambda s=spherical: direct(points, k, restarts, iterations, s)
        cases[name] = lambda s=spherical: own(s)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(arguments.repetitions + 1):
        # Every other time in reverse, so that what comes first has no advantage.
        for name in list(cases)[:: 1 if repetition % 2 else -1]:
            start = time.perf_counter()
            cases[name]()
            if repetition:  # the first is for warming up
                seconds[name].append(time.perf_counter() - start)
    print(
        f"{len(points)} x {WIDTH}, {k} clusters, {restarts} restarts of {iterations} iterations, "
        f"faiss {faiss.__version__} with {faiss.omp_get_max_threads()} threads, torch {torch.get_num_threads()}"
    )
    for name, taken in seconds.items():
        print(f"  {name:26s} median {statistics.median(taken):7.3f} s   fastest {min(taken):7.3f} s")
    for name in ("k-means", "spherical"):
        for kind, of in (("medians", statistics.median), ("fastest", min)):
            print(
                f"  {name} / faiss directly ({kind}): {of(seconds[name]) / of(seconds[f'{name}, faiss directly']):.3f}"
            )
    if arguments.sklearn:
        for spherical in (False, True):
            start = time.perf_counter()
            own(spherical, "sklearn")
            print(f"  {'spherical' if spherical else 'k-means'}, sklearn: {time.perf_counter() - start:.3f} s")
    print(f"  load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
