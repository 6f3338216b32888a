"""The published sweep of the linear probe: which heads are trained."""

from __future__ import annotations

from typing import Literal

from ibot_eval.probes.sweep import HeadSetting

Grid = Literal["rates", "full"]

REFERENCE_BATCH = 256
"""Images per step that published learning rates are for; they grow in proportion to the batch."""


def published_rates(batch: int) -> tuple[float, ...]:
    """The 45 learning rates n x 10^k, n = 1 … 9 and k = -4 … 0, times ``batch / 256``; ascending."""
    return tuple(float(f"{n}e{k}") * batch / REFERENCE_BATCH for k in range(-4, 1) for n in range(1, 10))


def grid(kind: Grid, batch: int) -> tuple[HeadSetting, ...]:
    """The heads of a sweep.

    Args:
        kind: "rates" is the 45 rates with SGD and no weight decay; "full" those x weight decay {0, 1e-6} x
            {SGD, LARS}, 180 heads.
        batch: images per step.
    """
    rates = published_rates(batch)
    if kind == "rates":
        return tuple(HeadSetting(lr) for lr in rates)
    return tuple(
        HeadSetting(lr, decay, optimizer) for optimizer in ("sgd", "lars") for decay in (0.0, 1e-6) for lr in rates
    )
