"""The weighted vote of nearest neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Votes below this (as exponents) are as small as float64 allows, but never nothing: a class that got a vote ranks
# before one that got none at any temperature.
LEAST_EXPONENT = -700.0


def cumulative_votes(
    similarities: Tensor, neighbours: Tensor, ks: Sequence[int], temperature: float, classes: int
) -> Iterator[Tensor]:
    """Votes per class of the first k neighbours, for each k.

    A neighbour's vote is exp(similarity / temperature), here relative to that of the most similar one, which changes
    no ranking and no share: the plain exponential overflows float32 below a temperature of about 0.011.

    Args:
        similarities: (n, K) float32, largest first.
        neighbours: (n, K) class index of each neighbour, 0 … classes - 1.
        ks: ascending, none above K.
        temperature: positive.
        classes: number of classes.

    Yields:
        (n, classes) float64 for each of ``ks``, positive where a class got a vote and 0 elsewhere. It is the same
        tensor each time, with more votes in it.
    """
    exponents = (similarities.double() - similarities[:, :1].double()) / temperature
    weights = exponents.clamp_(min=LEAST_EXPONENT).exp_()
    votes = torch.zeros(len(similarities), classes, dtype=torch.float64)
    counted = 0
    for k in ks:
        # In one process, scatter_add_ adds in order, so a k gives the same votes whatever other k are asked for.
        votes.scatter_add_(1, neighbours[:, counted:k], weights[:, counted:k])
        counted = k
        yield votes
