"""Which image belongs to which batch: against a plain second loop, and the published sampler of repeated views."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ibot_eval.data.epochs import EpochOrder, Key, steps_per_epoch
from ibot_eval.errors import ConfigError


def keys(
    images: int, batch_size: int, epochs: int, world: int = 1, start: int = 0, repeats: int = 1
) -> list[list[Key]]:
    """Of all ranks together, in the order of batches."""
    steps = steps_per_epoch(images, batch_size, world)
    orders = [
        EpochOrder(images, steps, batch_size, 3, range(start, epochs * steps), rank, world, repeats)
        for rank in range(world)
    ]
    assert {len(order) for order in orders} == {epochs * steps - start}
    return [[key for part in batch for key in part] for batch in zip(*orders, strict=True)]


def test_batches_are_the_epochs_permutation_cut_up() -> None:
    expected = []
    for epoch in range(3):
        order = np.random.default_rng((0, 3, epoch)).permutation(11)
        expected += [[(epoch, int(i)) for i in order[start : start + 4]] for start in (0, 4)]
    assert keys(11, 4, 3) == expected
    assert keys(11, 2, 3, world=2) == expected
    assert keys(11, 4, 3, start=3) == expected[3:]


def published_repeats(order: np.ndarray, world: int, repeats: int) -> list[int]:
    """DeiT's sampler: every image several times in a row, ranks take turns, and the rest of the epoch is cut off."""
    indices = [int(i) for i in order for _ in range(repeats)]
    whole = math.ceil(len(order) * repeats / world) * world
    indices += indices[: whole - len(indices)]
    selected = len(order) // world
    return sorted(i for rank in range(world) for i in indices[rank:whole:world][:selected])


@pytest.mark.parametrize("world", [1, 2])
def test_repeated_views_are_those_of_the_published_sampler(world: int) -> None:
    batches = keys(24, 4 // world, 2, world, repeats=3)
    assert len(batches) == 12
    for epoch in (0, 1):
        seen = [key for batch in batches[6 * epoch : 6 * epoch + 6] for key in batch]
        assert len(set(seen)) == 24  # never the same view twice
        assert {view for view, _ in seen} == {3 * epoch, 3 * epoch + 1, 3 * epoch + 2}
        order = np.random.default_rng((0, 3, epoch)).permutation(24)
        assert sorted(index for _, index in seen) == published_repeats(order, world, 3)
    assert keys(24, 4 // world, 2, world, start=5, repeats=3) == batches[5:]


def test_steps_per_epoch() -> None:
    assert steps_per_epoch(10, 4, 1) == 2
    assert steps_per_epoch(10, 2, 2) == 2
    assert steps_per_epoch(10, 5, 2) == 1
    with pytest.raises(
        ConfigError, match=r"(?s)10 images, fewer than one batch of 11 images\n.*--batch-size 10 or less"
    ):
        steps_per_epoch(10, 11, 1)
    with pytest.raises(ConfigError, match=r"(?s)on each of 3 processes.*--batch-size 3 or less"):
        steps_per_epoch(10, 4, 3)
    with pytest.raises(ConfigError, match="fewer processes"):
        steps_per_epoch(2, 1, 4)
