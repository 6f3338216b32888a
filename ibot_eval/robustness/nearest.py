"""The nearest rows of a gallery that stays on the device, batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

GALLERY_ROWS = 1 << 16
"""Train images that a batch is compared with at a time."""


def nearest(queries: Tensor, gallery: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities and indices, (B, k) each, of the most similar rows of (n, D), most similar first; of equally similar
    ones the first."""
    best, where = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0, dtype=torch.int64)
    for start in range(0, len(gallery), GALLERY_ROWS):
        tile = queries @ gallery[start : start + GALLERY_ROWS].T
        size = min(k, tile.shape[1])
        values, indices = tile.topk(size, dim=1)
        # Which of equal ones topk takes is not said.
        cut = (tile >= values[:, -1:]).sum(1) > size
        if cut.any():
            ordered, places = tile[cut].sort(dim=1, descending=True, stable=True)
            values[cut], indices[cut] = ordered[:, :size], places[:, :size]
        best, where = torch.cat([best, values], 1), torch.cat([where, indices + start], 1)
        by_index = where.argsort(1)
        best, where = best.gather(1, by_index), where.gather(1, by_index)
        best, order = best.sort(dim=1, descending=True, stable=True)
        best, where = best[:, :k], where.gather(1, order)[:, :k]
    return best, where
