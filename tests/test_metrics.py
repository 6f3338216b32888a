"""ibot_eval.metrics: accuracies and intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import recall_score, top_k_accuracy_score

from ibot_eval.metrics.accuracy import NEVER, per_class_accuracy, target_ranks, topk_accuracy
from ibot_eval.metrics.intervals import wilson


@pytest.mark.parametrize(("correct", "n"), [(0, 7), (7, 7), (3, 7), (544, 800), (1, 50_000)])
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_wilson_solves_its_quadratic(correct, n, level):
    # The bounds are where |p - correct / n| is z standard errors at p (Wilson 1927).
    z = {0.95: 1.959963984540054, 0.8: 1.2815515655446004}[level]
    share = correct / n
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    centre = share + z * z / (2 * n)
    expected = tuple(100 * (centre + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    assert wilson(correct, n, level) == pytest.approx(expected, abs=1e-9)


def test_wilson_of_nothing_and_of_nonsense():
    assert wilson(0, 0) is None
    for correct, n in ((3, 2), (-1, 2), (1, 0)):
        with pytest.raises(ValueError):
            wilson(correct, n)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(2, 8), st.integers(0, 2**32 - 1), st.booleans())
def test_ranks_are_those_of_a_stable_sort(n, classes, seed, ties):
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, 3, (n, classes)).astype(float) if ties else generator.normal(size=(n, classes))
    targets = generator.integers(-1, classes, n)
    order = np.argsort(-scores, axis=1, kind="stable")
    expected = [list(row).index(t) if t >= 0 else NEVER for row, t in zip(order, targets, strict=True)]
    assert target_ranks(torch.from_numpy(scores), torch.from_numpy(targets)).tolist() == expected


def test_topk_accuracy_agrees_with_scikit_learn():
    generator = np.random.default_rng(0)
    scores, targets = generator.normal(size=(60, 9)), generator.integers(0, 9, 60)
    for k in (1, 2, 5, 9):
        expected = 100 * top_k_accuracy_score(targets, scores, k=k, labels=range(9)) if k < 9 else 100.0
        assert topk_accuracy(torch.from_numpy(scores), torch.from_numpy(targets), k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no samples"):
        topk_accuracy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))


def test_scores_that_are_not_numbers_are_never_right():
    scores = torch.tensor([[torch.nan] * 3, [0.1, torch.nan, 0.2]])
    assert target_ranks(scores, torch.tensor([0, 2])).tolist() == [NEVER, 0]
    assert target_ranks(scores, torch.tensor([2, 1])).tolist() == [NEVER, NEVER]
    assert topk_accuracy(scores, torch.tensor([0, 7]), k=99) == 0


def test_equal_scores_gain_nothing():
    assert topk_accuracy(torch.zeros(4, 4), torch.arange(4)) == 25.0


def test_per_class_accuracy_is_the_recall():
    generator = np.random.default_rng(1)
    labels, predictions = generator.choice([3, 17, 90], 50), generator.choice([3, 17, 91], 50)
    classes, accuracy, counts = per_class_accuracy(predictions, labels)
    assert classes.tolist() == [3, 17, 90]
    assert counts.sum() == 50
    np.testing.assert_allclose(accuracy, 100 * recall_score(labels, predictions, labels=classes, average=None))
