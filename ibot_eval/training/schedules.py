"""Values that change during training, worked out for every step beforehand.

A run looks its value up by step, so a resumed run cannot be anywhere else in the schedule than the step says.
"""

from __future__ import annotations

import numpy as np

from ibot_eval.errors import ConfigError


def cosine(start: float, end: float, steps: int, *, warmup_steps: int = 0, warmup_start: float = 0.0) -> np.ndarray:
    """Linear warm-up, then half a cosine: the schedule of learning rate, weight decay and EMA momentum.

    The warm-up runs from ``warmup_start`` to ``start``, both included, so ``start`` comes twice: as its last value and
    as the first of the cosine. The cosine stops one step short of ``end``. Both as in the published scheduler (DINO,
    iBOT), whose values these are to the last bit.

    Returns:
        (steps,) float64: ``end + (start - end) / 2 * (1 + cos(pi * i / n))`` for step i of the n after the warm-up
        (SGDR, Loshchilov and Hutter 2017, equation 5).

    Raises:
        ConfigError: no step at all, or a warm-up that is longer than the run.
    """
    _check(steps, warmup_steps)
    warmup = np.linspace(warmup_start, start, warmup_steps)
    count = steps - warmup_steps
    return np.concatenate([warmup, end + 0.5 * (start - end) * (1 + np.cos(np.pi * np.arange(count) / count))])


def warmup_then_constant(start: float, end: float, steps: int, warmup: int) -> np.ndarray:
    """Linear from ``start`` to ``end``, both included, then ``end``: the teacher temperature (DINO, iBOT).

    Args:
        steps: number of values; the published code has one per epoch.
        warmup: how many of them belong to the ramp; 0 gives ``end`` throughout.

    Returns:
        (steps,) float64.

    Raises:
        ConfigError: no step at all, or a warm-up that is longer than the run.
    """
    _check(steps, warmup)
    return np.concatenate([np.linspace(start, end, warmup), np.full(steps - warmup, float(end))])


def _check(steps: int, warmup: int) -> None:
    if steps < 1:
        raise ConfigError(f"a schedule of {steps} steps", todo="train for at least one step")
    if not 0 <= warmup <= steps:
        raise ConfigError(
            f"a warm-up of {warmup} does not fit into a run of {steps}", todo="train longer or shorten the warm-up"
        )
