"""ibot_eval.kmeans: both backends against brute force, each other and known clusters, and odd data."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from ibot_eval import distributed
from ibot_eval import kmeans as module
from ibot_eval.errors import ConfigError, DataError, MissingExtra
from ibot_eval.kmeans import chosen_backend, kmeans
from tests.ranks import run_ranks

BACKENDS = ("faiss", "sklearn")


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "faiss":
        pytest.importorskip("faiss")
    return request.param


def _blobs(n=300, k=5, width=8, spread=0.05, seed=0):
    generator = np.random.default_rng(seed)
    labels = np.arange(n) % k
    centres = generator.normal(size=(k, width))
    return (centres[labels] + spread * generator.normal(size=(n, width))).astype(np.float32), labels


def _noise(n=400, width=6, seed=0):
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


def _unit(features):
    return features / np.linalg.norm(features, axis=1, keepdims=True)


@pytest.mark.parametrize("spherical", [False, True])
def test_well_separated_clusters_are_found(backend, spherical):
    features, labels = _blobs()
    found = kmeans(features, 5, spherical=spherical, backend=backend)
    assert adjusted_rand_score(labels, found.assignment) == 1
    assert found.assignment.shape == (300,)
    assert found.assignment.dtype == np.int64
    assert (found.centroids.shape, found.centroids.dtype) == ((5, 8), np.float32)
    assert (found.backend, found.empty) == (backend, 0)
    rows = _unit(features) if spherical else features
    for cluster, centroid in enumerate(found.centroids):
        mean = rows[found.assignment == cluster].mean(0, dtype=np.float64)
        np.testing.assert_allclose(centroid, mean / np.linalg.norm(mean) if spherical else mean, atol=1e-5)


@pytest.mark.parametrize("spherical", [False, True])
@pytest.mark.parametrize("tile", [1, 37, 1 << 24])
def test_assignment_and_objective_by_brute_force(backend, spherical, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE_VALUES", tile)
    features = _noise(120)
    found = kmeans(features, 7, spherical=spherical, backend=backend, restarts=2, iterations=4)
    rows = (_unit(features) if spherical else features).astype(np.float64)
    squared = cdist(rows, found.centroids.astype(np.float64), "sqeuclidean")
    assert found.assignment.tolist() == squared.argmin(1).tolist()
    assert found.objective == pytest.approx(squared.min(1).sum(), rel=1e-5)
    assert found.iterations <= 4
    if spherical:
        np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1, atol=1e-6)
        cosines = (rows * found.centroids[found.assignment]).sum()
        assert found.objective == pytest.approx(2 * 120 - 2 * cosines, rel=1e-5)


def test_as_good_as_scikit_learn_from_as_many_starts():
    pytest.importorskip("faiss")
    features = _noise()
    reference = min(-KMeans(10, max_iter=100, random_state=s).fit(features).score(features) for s in range(10))
    for backend in BACKENDS:
        assert kmeans(features, 10, backend=backend, iterations=100).objective == pytest.approx(reference, rel=0.02)


def test_spherical_backends_agree_on_how_good_it_gets():
    pytest.importorskip("faiss")
    features = _noise()
    objectives = [kmeans(features, 10, spherical=True, backend=b, iterations=100).objective for b in BACKENDS]
    assert objectives[0] == pytest.approx(objectives[1], rel=0.02)
    single = [kmeans(features, 10, spherical=True, backend=b, restarts=1, iterations=1).objective for b in BACKENDS]
    assert min(single) > max(objectives), "one step is not all there is to gain"


def test_spherical_steps_are_those_of_plain_loops():
    points = _unit(_noise(60))
    start = module._spherical_lloyd(points, 4, 1, seed=3)[1]
    centroids = start.astype(np.float64)
    for _ in range(100):
        nearest = (points @ centroids.T).argmax(1)
        sums = np.array([points[nearest == c].sum(0, dtype=np.float64) for c in range(4)])
        centroids = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    _, found, taken = module._spherical_lloyd(points, 4, 100, seed=3)
    np.testing.assert_allclose(found, centroids, atol=1e-5)
    assert 1 < taken < 100


def test_length_matters_to_one_and_direction_to_the_other(backend):
    directions = np.repeat(np.eye(2, 4), 20, axis=0)
    lengths = np.tile([1.0, 50.0], 20)[:, None]
    features = directions * lengths
    spherical = kmeans(features, 2, spherical=True, backend=backend).assignment
    assert adjusted_rand_score(np.repeat([0, 1], 20), spherical) == 1
    three = kmeans(features, 3, backend=backend).assignment
    assert len(set(three[::2])) == 1, "short vectors of both directions lie together"
    assert len(set(three)) == 3


def test_every_point_takes_part(backend, capfd):
    # Left alone faiss takes 256 points a cluster, and complains about fewer than 39.
    features = _noise(3000)
    found = kmeans(features, 1, backend=backend)
    np.testing.assert_allclose(found.centroids[0], features.mean(0, dtype=np.float64), atol=1e-6)
    assert found.objective == pytest.approx(((features - features.mean(0)) ** 2).sum(), rel=1e-5)
    kmeans(features[:20], 10, backend=backend)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("spherical", [False, True])
def test_a_seed_fixes_the_result_and_more_restarts_are_never_worse(backend, spherical):
    features = _noise()
    options = {"spherical": spherical, "backend": backend, "iterations": 5}
    one, again, other = (kmeans(features, 20, restarts=1, seed=s, **options) for s in (0, 0, 1))
    np.testing.assert_array_equal(one.assignment, again.assignment)
    np.testing.assert_array_equal(one.centroids, again.centroids)
    assert not np.array_equal(one.centroids, other.centroids)
    objectives = [kmeans(features, 20, restarts=r, **options).objective for r in (1, 8)]
    assert objectives[1] < objectives[0]
    kmeans(features, 20, restarts=1, seed=(1 << 63) - 1, **options)


def test_the_callers_features_stay_as_they_are(backend):
    features = _noise(50)
    features.flags.writeable = False
    before = features.copy()
    for spherical in (False, True):
        kmeans(features, 3, spherical=spherical, backend=backend)
    np.testing.assert_array_equal(features, before)


def test_a_large_common_offset_changes_nothing(backend):
    features, labels = _blobs()
    found = kmeans(features + 5000, 5, backend=backend)
    assert adjusted_rand_score(labels, found.assignment) == 1
    centres = np.array([features[found.assignment == c].mean(0) for c in range(5)])
    np.testing.assert_allclose(found.centroids, centres + 5000, rtol=1e-6)


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_float_types(backend, kind):
    features, labels = _blobs()
    assert adjusted_rand_score(labels, kmeans(features.astype(kind), 5, backend=backend).assignment) == 1


@pytest.mark.parametrize("spherical", [False, True])
def test_as_many_clusters_as_points_and_one_point(backend, spherical):
    features = _noise(12)
    found = kmeans(features, 12, spherical=spherical, backend=backend)
    assert sorted(found.assignment) == list(range(12))
    assert found.objective == pytest.approx(0, abs=1e-5)
    alone = kmeans(features[:1], 1, spherical=spherical, backend=backend)
    assert alone.assignment.tolist() == [0]
    np.testing.assert_allclose(alone.centroids, _unit(features[:1]) if spherical else features[:1], rtol=1e-5)


@pytest.mark.parametrize("spherical", [False, True])
@pytest.mark.filterwarnings("error")
def test_fewer_different_points_than_clusters(backend, spherical):
    features = np.repeat(np.eye(3, 5, dtype=np.float32), 10, axis=0)
    found = kmeans(features, 7, spherical=spherical, backend=backend)
    assert found.empty == 7 - len(np.unique(found.assignment))
    assert found.empty >= 7 - 3
    assert np.isfinite(found.centroids).all()
    same = kmeans(np.ones((30, 4)), 5, spherical=spherical, backend=backend)
    assert same.empty == 4


@pytest.mark.filterwarnings("error")
def test_rows_of_zeros_have_no_direction(backend):
    features, labels = _blobs()
    features[::50] = 0
    found = kmeans(features, 5, spherical=True, backend=backend)
    assert np.isfinite(found.objective)
    directed = np.arange(300) % 50 > 0
    assert adjusted_rand_score(labels[directed], found.assignment[directed]) == 1
    kmeans(np.zeros((8, 3)), 2, spherical=True, backend=backend)


def test_impossible_numbers():
    features = _noise(9)
    with pytest.raises(ConfigError, match="10 clusters of 9 points"):
        kmeans(features, 10)
    with pytest.raises(ConfigError, match="0 clusters of 9 points"):
        kmeans(features, 0)
    with pytest.raises(ConfigError, match="restarts"):
        kmeans(features, 2, restarts=0)
    with pytest.raises(ConfigError, match="iterations"):
        kmeans(features, 2, iterations=0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_row_is_named(backend, value):
    features = _noise(9)
    features[[4, 7], 2] = value
    for spherical in (False, True):
        with pytest.raises(DataError, match="row 4 "):
            kmeans(features, 2, spherical=spherical, backend=backend)


def test_features_whose_distances_overflow_are_named(backend):
    features = _noise(9)
    features[3] = 1e25
    with pytest.raises(DataError, match="row 3 are too large"):
        kmeans(features, 2, backend=backend)
    assert np.isfinite(kmeans(_noise(9) * np.float32(1e15), 2, backend=backend).objective)


def test_without_faiss(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert chosen_backend("auto") == "sklearn"
    features, labels = _blobs()
    for spherical in (False, True):
        found = kmeans(features, 5, spherical=spherical)
        assert found.backend == "sklearn"
        assert adjusted_rand_score(labels, found.assignment) == 1
    with pytest.raises(MissingExtra, match="not installed"):
        kmeans(features, 5, backend="faiss")


def test_with_faiss():
    pytest.importorskip("faiss")
    assert [chosen_backend(b) for b in ("auto", "faiss", "sklearn")] == ["faiss", "faiss", "sklearn"]


def _on_a_rank() -> list[list[object]]:
    distributed.init("cpu")
    results = []
    for restarts, spherical, seed in itertools.product((1, 4), (False, True), range(3)):
        found = kmeans(_noise(150), 12, restarts=restarts, spherical=spherical, iterations=5, seed=seed)
        results.append([found.assignment.tolist(), found.objective, found.centroids.tolist(), found.iterations])
    return results


def test_ranks_share_the_restarts_and_change_nothing():
    alone = run_ranks(1, _on_a_rank)[0]
    assert run_ranks(2, _on_a_rank) == [alone, alone]
