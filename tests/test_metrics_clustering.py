"""ibot_eval.metrics.clustering: golden numbers, counting pairs by hand, and collapsed clusters."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ibot_eval.metrics.clustering import ari, clustering_accuracy, fmi, nmi

GOLDEN = json.loads((Path(__file__).parent / "golden" / "clustering.json").read_text())
ALL = (nmi, ari, fmi, clustering_accuracy)


@pytest.mark.parametrize("case", ["equal_k", "more_clusters", "fewer_clusters", "one_cluster"])
def test_golden_numbers(case):
    rows = GOLDEN[case]
    arguments = np.array(rows["labels"]), np.array(rows["predictions"])
    for name, function in (("nmi", nmi), ("ari", ari), ("fmi", fmi), ("accuracy", clustering_accuracy)):
        assert function(*arguments) == pytest.approx(100 * rows[name], abs=1e-9), name


partitions = st.integers(2, 9).flatmap(
    lambda n: st.tuples(*(st.lists(st.integers(0, 3), min_size=n, max_size=n) for _ in range(2)))
)


@settings(max_examples=60, deadline=None)
@given(partitions)
def test_pairs_and_assignments_counted_one_by_one(pair):
    labels, clusters = (np.array(values) for values in pair)
    pairs = list(itertools.combinations(range(len(labels)), 2))
    same_class = np.array([labels[i] == labels[j] for i, j in pairs])
    same_cluster = np.array([clusters[i] == clusters[j] for i, j in pairs])
    both, classes, together = (same_class & same_cluster).sum(), same_class.sum(), same_cluster.sum()
    expected = both / math.sqrt(classes * together) if both else 0.0
    assert fmi(labels, clusters) == pytest.approx(100 * expected)
    chance, most = classes * together / len(pairs), (classes + together) / 2
    expected = (both - chance) / (most - chance) if most != chance else 1.0
    assert ari(labels, clusters) == pytest.approx(100 * expected)
    counts = Counter(zip(clusters.tolist(), labels.tolist(), strict=True))
    names = set(clusters.tolist())
    # A cluster may be given no class.
    ways = itertools.permutations([*set(labels.tolist()), *[-1] * len(names)], len(names))
    best = max(sum(counts[given] for given in zip(names, way, strict=True)) for way in ways)
    assert clustering_accuracy(labels, clusters) == pytest.approx(100 * best / len(labels))


@settings(max_examples=60, deadline=None)
@given(partitions)
def test_mutual_information_from_its_definition(pair):
    labels, clusters = (np.array(values) for values in pair)

    def entropy(*columns):
        _, counts = np.unique(np.stack(columns), axis=1, return_counts=True)
        shares = counts / counts.sum()
        return -(shares * np.log(shares)).sum()

    apart = entropy(labels), entropy(clusters)
    expected = (sum(apart) - entropy(labels, clusters)) / (sum(apart) / 2) if sum(apart) else 1.0
    assert nmi(labels, clusters) == pytest.approx(100 * expected, abs=1e-9)


def test_names_of_clusters_do_not_matter():
    labels = np.array([3, 3, 90, 90, 5])
    assert [function(labels, np.array([8191, 8191, 0, 0, 17])) for function in ALL] == pytest.approx([100] * 4)


def test_one_cluster_for_everything_is_no_clustering():
    labels, clusters = np.arange(40) % 10, np.full(40, 7)
    assert nmi(labels, clusters) == pytest.approx(0, abs=1e-9)
    assert ari(labels, clusters) == pytest.approx(0, abs=1e-9)
    assert clustering_accuracy(labels, clusters) == 10


@pytest.mark.filterwarnings("error")
def test_as_many_clusters_as_samples():
    labels, clusters = np.arange(400) % 10, np.arange(400)
    assert clustering_accuracy(labels, clusters) == 2.5
    assert ari(labels, clusters) == pytest.approx(0, abs=1e-9)
    assert 0 < nmi(labels, clusters) < 60


@pytest.mark.parametrize("function", ALL)
def test_what_cannot_be_compared_is_refused(function):
    with pytest.raises(ValueError, match="no samples"):
        function(np.zeros(0, int), np.zeros(0, int))
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        function(np.zeros(3, int), np.zeros(2, int))
    with pytest.raises(ValueError, match="integers"):
        function(np.zeros(3, int), np.zeros(3))
