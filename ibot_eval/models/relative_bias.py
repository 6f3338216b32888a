"""BEiT's geometric interpolation of relative position bias tables."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ibot_eval.models.positions import Grid

CLS_ENTRIES = 3
"""Rows of a table that belong to [CLS]: [CLS] to patch, patch to [CLS], [CLS] to itself."""

RATIOS = (1.01, 1.5)
"""Range of the geometric ratio in BEiT's code; shrinking and slight growth end at its lower end."""


def resize_bias_table(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """A table of relative position biases at another grid.

    BEiT's fine-tuning code (run_class_finetuning.py) lays the stored distances out at 0, 1, 1 + q, 1 + q + q^2 … with q
    such that they span the new range, since near distances matter most, and reads the new, unit-spaced distances off a
    bicubic spline through them.

    Args:
        table: ((2H - 1)(2W - 1) + 3, heads); rows run over vertical, then horizontal distances, [CLS] entries last.
        old: rows H and columns W of the grid that the table is for.
        new: rows and columns wanted.

    Returns:
        ((2h - 1)(2w - 1) + 3, heads), same dtype and device; ``table`` itself for the same grid.
    """
    # Imported where needed: scipy takes 0.4 s to import, and most networks have no such table.
    from scipy.interpolate import RectBivariateSpline

    if old == new:
        return table
    if min(old) < 2:
        raise ValueError(f"a grid of {old} is too small to interpolate from")
    before, after = (tuple(2 * side - 1 for side in grid) for grid in (old, new))
    down, across = (_geometric(source, target) for source, target in zip(before, after, strict=True))
    rows, columns = (np.arange(target) - target // 2 for target in after)
    values = table.detach()[:-CLS_ENTRIES].double().cpu().numpy().reshape(*before, -1)
    orders = {"kx": min(3, before[0] - 1), "ky": min(3, before[1] - 1)}
    planes = [
        RectBivariateSpline(down, across, values[..., head], s=0, **orders)(rows, columns, grid=True)
        for head in range(values.shape[-1])
    ]
    resized = torch.from_numpy(np.stack(planes, axis=-1).reshape(-1, values.shape[-1]))
    return torch.cat([resized.to(table), table[-CLS_ENTRIES:]])


def _geometric(source: int, target: int) -> np.ndarray:
    """(source,) positions of the stored distances, symmetric about 0, in units of the new distances."""
    from scipy.optimize import root_scalar

    steps, reach = source // 2, target // 2

    def overshoot(ratio: float) -> float:
        return float(np.sum(ratio ** np.arange(steps))) - reach

    low, high = RATIOS
    if overshoot(low) >= 0:
        ratio = low
    elif overshoot(high) <= 0:
        ratio = high
    else:
        ratio = float(root_scalar(overshoot, bracket=RATIOS, xtol=1e-9).root)
    positive = np.cumsum(ratio ** np.arange(steps))
    return np.concatenate([-positive[::-1], [0.0], positive])
