"""k-means and spherical k-means of feature banks: faiss when it is installed, else scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.errors import ConfigError, DataError, MissingExtra

Backend = Literal["auto", "faiss", "sklearn"]

# Similarities (points x clusters) or differences (points x width) held at a time: 2 MB, which stay in the cache.
TILE_VALUES = 1 << 19


@dataclass(frozen=True)
class KMeansResult:
    """The best of several restarts."""

    assignment: np.ndarray
    """(n,) int64, 0 … k - 1: the nearest centroid; of equally near ones the first."""
    centroids: np.ndarray
    """(k, D) float32; of unit length where ``spherical``."""
    objective: float
    """Sum of squared distances to the assigned centroids, of unit-length features where ``spherical`` (there it is
    2 n - 2 x the sum of cosines, so that less is better in both)."""
    backend: Literal["faiss", "sklearn"]
    iterations: int
    """How many the best restart took."""
    empty: int
    """Clusters without a point."""


def chosen_backend(backend: Backend) -> Literal["faiss", "sklearn"]:
    """What ``auto`` means here: faiss when it can be imported, else scikit-learn.

    Raises:
        MissingExtra: backend "faiss" without faiss.
    """
    if backend == "sklearn":
        return "sklearn"
    try:
        import faiss  # noqa: F401
    except ImportError:
        if backend == "auto":
            return "sklearn"
        raise MissingExtra(
            "backend faiss was asked for, but faiss is not installed",
            todo="pip install 'ibot-eval[faiss]', or use --backend sklearn",
        ) from None
    return "faiss"


def kmeans(
    features: np.ndarray,
    k: int,
    *,
    restarts: int = 10,
    iterations: int = 25,
    spherical: bool = False,
    seed: int = 0,
    backend: Backend = "auto",
    progress: bool = False,
) -> KMeansResult:
    """Lloyd's algorithm (Lloyd 1982) from several starts; with several ranks each takes some of the starts.

    Spherical k-means (Dhillon and Modha 2001) works on features of unit length and makes each centroid of unit length
    again after each step; rows of zeros stay zero, and join any cluster.

    faiss: ``faiss.Kmeans`` on the CPU, its defaults but for this: all points take part (left alone it draws 256 a
    cluster and leaves the others out), ``seed`` replaces its fixed 1234, and its single start (nredo 1) is repeated
    here. What stays: a start is k random points, and an empty cluster gets half of a larger one. Recent versions (1.15,
    not 1.9) end once the objective stays the same; older ones do all iterations.

    scikit-learn: ``KMeans`` with its defaults: starts by k-means++, an empty cluster gets the point farthest from its
    centroid, and the end is at a tolerance of 1e-4. It has no spherical k-means, so that is done here: starts by its
    k-means++, empty clusters treated alike, and the end once no point changes its cluster.

    The two find different local optima; so may one of them with another number of threads, which changes rounding.

    Euclidean distances are of features less their mean: float32 would lose the differences beside a large one.

    Args:
        features: (n, D) of any float type, in memory or memory-mapped; the same on every rank.
        k: number of clusters, 1 to n.
        restarts: starts of which the one with the least objective is kept; on a tie the first.
        iterations: at most so many from each start. 25 is faiss's default.
        seed: a start depends on it and on the number of the start alone.
        progress: show a bar on stderr.

    Raises:
        ConfigError: k outside of its range, no restart or no iteration.
        DataError: a feature that is NaN, infinite or too large for squared distances in float32, naming the row.
        MissingExtra: backend "faiss" without faiss.
    """
    if not 1 <= k <= len(features):
        raise ConfigError(f"{k} clusters of {len(features)} points", todo=f"choose 1 to {len(features)}")
    for name, value in (("restarts", restarts), ("iterations", iterations)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    chosen = chosen_backend(backend)
    points, centre = _prepared(features, spherical)
    sklearn = _spherical_lloyd if spherical else _sklearn
    run = partial(_faiss, spherical=spherical) if chosen == "faiss" else sklearn

    def best_here() -> tuple[float, int, np.ndarray, int] | None:
        own = tqdm(
            range(distributed.rank(), restarts, distributed.world_size()),
            desc=f"{'spherical ' if spherical else ''}k-means, {k} clusters",
            unit="restarts",
            disable=not progress,
            leave=False,
        )
        best = None
        for start in own:
            # faiss adds to its seed, a signed integer of 32 bits.
            start_seed = int(np.random.SeedSequence([seed, start]).generate_state(1)[0]) >> 2
            objective, centroids, taken = run(points, k, iterations, start_seed)
            if best is None or objective < best[0]:
                best = objective, start, centroids, taken
        return best

    found = [best for best in distributed.gather_objects(distributed.everywhere(best_here)) if best is not None]
    _, _, centroids, taken = min(found, key=lambda best: best[:2])
    assignment, objective = _assign(points, centroids)
    return KMeansResult(
        assignment=assignment,
        centroids=centroids if centre is None else (centroids + centre).astype(np.float32),
        objective=objective,
        backend=chosen,
        iterations=taken,
        empty=k - len(np.unique(assignment)),
    )


def _prepared(features: np.ndarray, spherical: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """(n, D) float32 less their mean, and that mean (D,) float64; or of unit length, and None."""
    points = np.array(features, dtype=np.float32, order="C")
    bad = np.flatnonzero(~np.isfinite(points).all(1))
    if len(bad):
        raise DataError(f"the features in row {bad[0]} are NaN or infinite")
    if spherical:
        return _unit(points), None
    centre = points.mean(0, dtype=np.float64)
    points -= centre.astype(np.float32)
    # A sum of squares beyond float32 makes faiss end the whole process.
    limit = (float(np.finfo(np.float32).max) / points.size) ** 0.5 / 2
    if max(points.max(), -points.min()) > limit:
        row = int(np.abs(points).max(1).argmax())
        raise DataError(f"the features in row {row} are too large for distances in float32 (above {limit:.0e})")
    return points, centre.astype(np.float32).astype(np.float64)


def _faiss(points: np.ndarray, k: int, iterations: int, seed: int, *, spherical: bool) -> tuple[float, np.ndarray, int]:
    """(objective, centroids, iterations taken) from one start, as of the other two; less is better."""
    import faiss

    options: dict[str, Any] = {
        "niter": iterations,
        "nredo": 1,
        "seed": seed,
        "spherical": spherical,
        "max_points_per_centroid": -(-len(points) // k),
        # With its default of 39 faiss prints a warning for small data.
        "min_points_per_centroid": 1,
    }
    found: Any = faiss.Kmeans(points.shape[1], k, **options)
    found.train(points)
    objective = float(found.obj[-1])
    return (-objective if spherical else objective), found.centroids, len(found.obj)


def _sklearn(points: np.ndarray, k: int, iterations: int, seed: int) -> tuple[float, np.ndarray, int]:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # It means fewer different points than clusters; the result counts the empty ones.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found: Any = KMeans(k, n_init="auto", max_iter=iterations, random_state=seed).fit(points)
    return float(found.inertia_), found.cluster_centers_, found.n_iter_


def _spherical_lloyd(points: np.ndarray, k: int, iterations: int, seed: int) -> tuple[float, np.ndarray, int]:
    from scipy.sparse import csr_array
    from sklearn.cluster import kmeans_plusplus

    n = len(points)
    centroids = kmeans_plusplus(points, k, random_state=seed)[0]
    before, taken = None, 0
    while taken < iterations:
        taken += 1
        _, *parts = zip(*_nearest(points, centroids), strict=True)
        nearest, similarity = map(np.concatenate, parts)
        if before is not None and np.array_equal(nearest, before):
            break
        sums = csr_array((np.ones(n, np.float32), (nearest, np.arange(n))), (k, n)) @ points
        empty = np.flatnonzero(np.bincount(nearest, minlength=k) == 0)
        sums[empty] = points[np.argsort(similarity, kind="stable")[: len(empty)]]
        centroids, before = _unit(sums), nearest
    return _assign(points, centroids)[1], centroids, taken


def _unit(rows: np.ndarray) -> np.ndarray:
    """``rows`` (n, D), changed in place to unit length; zeros stay zero."""
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    rows /= np.where(lengths == 0, 1, lengths)[:, None]
    return rows


def _nearest(points: np.ndarray, centroids: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Tiles of the points: rows, nearest centroid, and half of |x|^2 - distance^2 (of unit lengths: cosine - 1/2)."""
    half = np.einsum("ij,ij->i", centroids, centroids) / 2
    step = max(1, TILE_VALUES // max(centroids.shape))
    for start in range(0, len(points), step):
        rows = slice(start, start + step)
        scores = points[rows] @ centroids.T
        scores -= half
        nearest = scores.argmax(1)
        yield rows, nearest, np.take_along_axis(scores, nearest[:, None], 1)[:, 0]


def _assign(points: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, float]:
    """(n,) int64 nearest centroid of each point, and the sum of squared distances to them."""
    assignment = np.empty(len(points), np.int64)
    objective = 0.0
    for rows, nearest, _ in _nearest(points, centroids):
        assignment[rows] = nearest
        # From differences: those of squares lose what is left of them beside large ones.
        difference = (points[rows] - centroids[nearest]).ravel()
        objective += float(difference @ difference)
    return assignment, objective
