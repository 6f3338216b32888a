"""Global generators for a while started from numbers of one's own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ibot_eval.training.random_states import drawing_from, seed_generators


def draws() -> list[float]:
    # Gaussians leave the second of a pair behind, which is part of the state.
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(()))]


def drawn_from(*numbers: int) -> list[float]:
    with drawing_from(*numbers):
        return draws()


def test_draws_depend_on_the_numbers_alone() -> None:
    wanted = drawn_from(1, 2, 3)
    draws()
    assert drawn_from(1, 2, 3) == wanted
    for others in ((1, 2, 4), (1, 2), (3, 2, 1), (1, 2, 3, 1)):
        assert not set(drawn_from(*others)) & set(wanted)


def test_the_words_are_those_of_numpys_seed_sequence() -> None:
    words = np.random.SeedSequence((7, 0)).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))
    expected = draws()
    assert drawn_from(7, 0) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_generators_are_put_back(fails: bool) -> None:
    def disturbed() -> None:
        with drawing_from(5):
            draws()
            if fails:
                raise ValueError

    seed_generators(3)
    draws()
    expected = draws()
    seed_generators(3)
    draws()
    if fails:
        with pytest.raises(ValueError):
            disturbed()
    else:
        disturbed()
    assert draws() == expected


def test_neighbours_are_unrelated() -> None:
    values = np.array([drawn_from(0, i) for i in range(400)])
    assert np.abs([np.corrcoef(v[1:], v[:-1])[0, 1] for v in values.T]).max() < 0.2
