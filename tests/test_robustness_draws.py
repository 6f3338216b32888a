"""robustness.draws: against the published generator, and as random as they should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from ibot_eval.robustness import draws

M = (1 << 64) - 1


def splitmix64(state: int, number: int) -> int:
    """One step of SplitMix64 from ``state`` + ``number`` steps, in Python's unbounded integers."""
    x = (state + (number + 1) * 0x9E3779B97F4A7C15) & M
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


def test_the_first_outputs_of_seed_zero_are_the_known_ones():
    # Printed by Vigna's splitmix64.c and by Java's SplittableRandom for the state 0.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix64(0, n) for n in range(3)] == known


def test_bits_are_those_of_plain_integers():
    found = draws.bits(torch.tensor([0, 7, 123_456]), 5, 3, (1 << 63) - 1)
    for row, index in zip(found.tolist(), (0, 7, 123_456), strict=True):
        key = 0
        for seed in (3, (1 << 63) - 1, index):
            key = splitmix64(key, seed)
        assert [value & M for value in row] == [splitmix64(key, n) for n in range(5)]


def test_an_image_gets_the_same_alone_and_among_others():
    whole = draws.permutations(torch.arange(64), 49, 5, 0)
    assert torch.equal(draws.permutations(torch.tensor([17]), 49, 5, 0)[0], whole[17])
    assert torch.equal(draws.normal(torch.tensor([3, 1]), 9, 2), draws.normal(torch.arange(4), 9, 2)[[3, 1]])


def test_permutations_hold_each_number_once_and_differ():
    orders = draws.permutations(torch.arange(100), 49, 0, 0)
    assert (orders.sort(1).values == torch.arange(49)).all()
    assert len(orders.unique(dim=0)) == 100
    for other in ((0, 1), (1, 0), (0,)):
        assert not (draws.permutations(torch.arange(100), 49, *other) == orders).all(1).any()


def test_every_place_is_equally_likely():
    orders = draws.permutations(torch.arange(4000), 10, 1)
    counts = np.stack([np.bincount(orders[:, place].numpy(), minlength=10) for place in range(10)])
    assert stats.chisquare(counts, axis=1).pvalue.min() > 1e-4


@pytest.mark.parametrize(
    ("values", "law"), [(draws.uniform, stats.uniform()), (draws.normal, stats.norm())], ids=["uniform", "normal"]
)
def test_numbers_follow_their_law(values, law):
    found = values(torch.arange(50), 2000, 4, 2)
    assert found.dtype == torch.float32
    assert stats.kstest(found.flatten().numpy(), law.cdf).pvalue > 1e-3
    # Images and neighbours have nothing to do with each other.
    assert np.corrcoef(found.numpy())[np.triu_indices(50, 1)] == pytest.approx(0, abs=0.12)


def test_the_largest_uniform_number_is_below_one():
    u = (torch.tensor(float((1 << 23) - 1)) + 0.5) / (1 << 23)
    assert u < 1
    assert (u * 16).long() == 15
