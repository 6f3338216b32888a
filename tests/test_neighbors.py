"""ibot_eval.neighbors: exactness, order, bad input, tiling, ranks and memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from ibot_eval import distributed, neighbors
from ibot_eval.errors import ConfigError, DataError, MissingExtra
from ibot_eval.neighbors import search

BACKENDS = ["torch", "faiss"]


@pytest.fixture(autouse=True)
def one_thread():
    """Inputs this small gain nothing from threads, and lose much where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _features(n, width, seed=0):
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


def _integers(n, width, seed):
    """Small integers: their dot products are exact in float32, so that ties are ties whatever the order of adding."""
    return np.random.default_rng(seed).integers(-2, 3, (n, width)).astype(np.float32)


def _expected(queries, gallery, k, exclude_self=False):
    """By sorting everything: dot products, largest first, ties by index."""
    products = queries.astype(np.float64) @ gallery.astype(np.float64).T
    if exclude_self:
        np.fill_diagonal(products, -np.inf)
    indices = np.argsort(-products, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(products, indices, 1), indices


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles of every kind from little data."""
    monkeypatch.setattr(neighbors, "QUERY_TILE", 23)
    monkeypatch.setattr(neighbors, "GALLERY_TILE", 150)
    monkeypatch.setattr(neighbors, "PRODUCT_COLUMNS", 64)
    monkeypatch.setattr(neighbors, "SELECTION_VALUES", 3000)
    monkeypatch.setattr(neighbors, "QUERY_BYTES", 3 * 23 * (8 * 5 + 4 * 6))


@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_with_scikit_learn(backend):
    pytest.importorskip("faiss")
    queries, gallery = _features(90, 16, 1), _features(2500, 16, 2) * 3
    similarities, indices = search(queries, gallery, 20, backend=backend)
    reference = NearestNeighbors(n_neighbors=20, metric="cosine", algorithm="brute").fit(gallery.astype(np.float64))
    distances, expected = reference.kneighbors(queries.astype(np.float64))
    assert (similarities.dtype, indices.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_allclose(similarities, 1 - distances, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_gives_what_sorting_gives(data):
    n = data.draw(st.integers(1, 700), "gallery")
    k = data.draw(st.sampled_from([1, n, max(1, n // 2), min(n, 5), min(n, 20)]), "k")
    q, width, seed = (data.draw(st.integers(1, high)) for high in (12, 9, 10**6))
    queries, gallery = _integers(q, width, seed), _integers(n, width, seed + 1)
    similarities, indices = search(queries, gallery, k, metric="dot", backend="torch")
    expected_similarities, expected_indices = _expected(queries, gallery, k)
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_array_equal(similarities, expected_similarities)


@pytest.mark.parametrize(("k", "n"), [(1, 640), (5, 640), (5, 143), (30, 431), (431, 431)])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_tiles_change_nothing(small_tiles, k, n, exclude_self):
    gallery = _integers(n, 6, 3)
    queries = gallery if exclude_self else _integers(50, 6, 4)
    k -= exclude_self and k == n
    similarities, indices = search(queries, gallery, k, metric="dot", exclude_self=exclude_self)
    expected_similarities, expected_indices = _expected(queries, gallery, k, exclude_self)
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_array_equal(similarities, expected_similarities)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [3, 299])
def test_leaves_each_item_out_of_its_own_neighbours(small_tiles, backend, k):
    pytest.importorskip("faiss")
    gallery = _features(300, 6)
    gallery[1:7] = gallery[0]
    similarities, indices = search(gallery, gallery, k, exclude_self=True, backend=backend)
    assert not (indices == np.arange(300)[:, None]).any()
    assert np.isfinite(similarities).all()
    assert all(len(set(row)) == k for row in indices)
    assert set(indices[2, :3]) <= {0, 1, 3, 4, 5, 6}


def test_backends_agree_where_there_are_ties(small_tiles):
    pytest.importorskip("faiss")
    queries, gallery = _integers(40, 4, 0), _integers(400, 4, 1)
    ours, ours_at = search(queries, gallery, 25, metric="dot", backend="torch")
    theirs, theirs_at = search(queries, gallery, 25, metric="dot", backend="faiss")
    np.testing.assert_array_equal(ours, theirs)
    # All but the group of equals that the end of the list cuts through must be the same items.
    for mine, other, values in zip(ours_at, theirs_at, ours, strict=True):
        sure = values > values[-1]
        np.testing.assert_array_equal(mine[sure], other[sure])


def test_equal_items_come_in_gallery_order():
    gallery = np.repeat(_features(1, 8), 500, axis=0)
    similarities, indices = search(gallery[:3], gallery, 40)
    np.testing.assert_array_equal(indices, np.tile(np.arange(40), (3, 1)))
    np.testing.assert_allclose(similarities, 1, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_zeros_are_similar_to_nothing(backend):
    pytest.importorskip("faiss")
    queries, gallery = _features(3, 5), _features(50, 5, 1)
    queries[1], gallery[7] = 0, 0
    similarities, indices = search(queries, gallery, 50, backend=backend)
    assert (similarities[1] == 0).all()
    assert (similarities[indices == 7] == 0).all()


def test_the_scale_of_features_does_not_matter():
    queries, gallery = _features(5, 8), _features(60, 8, 1)
    similarities, indices = search(queries, gallery, 10)
    for scale in (1e-30, 1e30):
        scaled, scaled_indices = search(queries * np.float32(scale), gallery * np.float32(scale), 10)
        np.testing.assert_array_equal(scaled_indices, indices)
        np.testing.assert_allclose(scaled, similarities, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_features_that_are_not_numbers_are_named(small_tiles, backend, value, metric):
    pytest.importorskip("faiss")
    good, bad = _features(500, 6), _features(500, 6)
    bad[321, 2] = value
    with pytest.raises(DataError, match="gallery item 321 "):
        search(good, bad, 3, backend=backend, metric=metric)
    with pytest.raises(DataError, match=r"query dog/321\.jpg "):
        search(bad, good, 3, backend=backend, metric=metric, query_ids=[f"dog/{i}.jpg" for i in range(500)])


def test_impossible_requests():
    a = _features(4, 3)
    for k in (0, -1, 5):
        with pytest.raises(ConfigError, match=f"{k} neighbours of a gallery of 4"):
            search(a, a, k)
    with pytest.raises(ConfigError, match="4 neighbours of a gallery of 3"):
        search(a, a, 4, exclude_self=True)
    with pytest.raises(DataError, match="empty"):
        search(a, a[:0], 1)
    with pytest.raises(DataError, match="one item"):
        search(a[:1], a[:1], 1, exclude_self=True)
    with pytest.raises(DataError, match="3 features and the gallery 2"):
        search(a, a[:, :2], 1)
    with pytest.raises(ValueError, match="same items"):
        search(a, a[:3], 1, exclude_self=True)


def test_no_queries_give_no_rows():
    similarities, indices = search(np.empty((0, 3), np.float32), _features(9, 3), 2)
    assert similarities.shape == indices.shape == (0, 2)


def test_faiss_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtra, match="faiss"):
        search(_features(2, 3), _features(2, 3), 1, backend="faiss")


def test_memory_maps_half_floats_and_joined_parts(tmp_path):
    gallery = _features(400, 12).astype(np.float16)
    np.save(tmp_path / "gallery.npy", gallery)
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    expected = search(gallery[:20].astype(np.float32), gallery.astype(np.float32), 5)
    for queries, whole in ((mapped[:20], mapped), ([mapped[:20, :5], mapped[:20, 5:]], [mapped[:, :5], mapped[:, 5:]])):
        for found, wanted in zip(search(queries, whole, 5), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_ranks_share_the_tiles_and_change_no_bit(small_tiles, monkeypatch):
    queries, gallery = _features(100, 6, 1), _features(400, 6, 2)
    whole = {t.start: (s, i) for t, s, i in neighbors.search_tiles(queries, gallery, 5)}
    assert len(whole) == 5
    for world in (2, 3, 8):
        monkeypatch.setattr(distributed, "world_size", lambda world=world: world)
        seen = []
        for rank in range(world):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            for tile, similarities, indices in neighbors.search_tiles(queries, gallery, 5):
                np.testing.assert_array_equal(similarities, whole[tile.start][0])
                np.testing.assert_array_equal(indices, whole[tile.start][1])
                seen.append(tile.start)
        assert sorted(seen) == sorted(whole)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_gallery(tmp_path):
    script = textwrap.dedent("""
        import sys
        import numpy as np, torch
        from ibot_eval import neighbors
        torch.set_num_threads(1)
        def peak():
            return int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM"))) / 1024
        neighbors.GALLERY_TILE, neighbors.QUERY_TILE, n = 8192, 64, int(sys.argv[1])
        queries = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        gallery = np.lib.stride_tricks.as_strided(  # rows that overlap in memory: a gallery that takes none itself
            np.random.default_rng(1).normal(size=n + 64).astype(np.float32), (n, 64), (4, 4))
        neighbors.search(queries, gallery[:8192], 50)
        before = peak()
        neighbors.search(queries, gallery, 50)
        print(peak() - before)
    """)
    grown = subprocess.run([sys.executable, "-c", script, "200000"], capture_output=True, text=True, check=True).stdout
    # A normalised copy of this gallery would take 49 MB, all its products as much again.
    assert float(grown) < 15


def test_a_gallery_that_stays_gives_what_search_gives(monkeypatch):
    rng = np.random.default_rng(3)
    items, queries = rng.normal(size=(300, 5)).astype(np.float32), rng.normal(size=(7, 5)).astype(np.float32)
    items[40] = 0
    queries[2] = 0
    monkeypatch.setattr(neighbors, "GALLERY_TILE", 64)
    expected = neighbors.search(queries, items, 9)
    similarities, indices = neighbors.Gallery(items, 9).nearest(torch.from_numpy(queries))
    np.testing.assert_array_equal(indices.numpy(), expected[1])
    np.testing.assert_allclose(similarities.numpy(), expected[0], rtol=1e-6)
    queries[1, 3], queries[4, 0] = np.nan, np.inf
    similarities, indices = neighbors.Gallery(items, 9).nearest(torch.from_numpy(queries))
    assert torch.isnan(similarities).all(1).tolist() == [False, True, False, False, True, False, False]
    assert int(indices.min()) >= 0
    assert int(indices.max()) < 300


def test_a_gallery_refuses_what_search_refuses():
    with pytest.raises(ConfigError, match="4 neighbours of a gallery of 3 items"):
        neighbors.Gallery(np.eye(3), 4)
    with pytest.raises(DataError, match="features of gallery item b are NaN"):
        neighbors.Gallery(np.array([[1.0, 0], [np.nan, 1]]), 1, ids=["a", "b"])
