"""BEiT family: timm's Beit, whose attention carries a relative position bias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.models.beit import Beit, gen_relative_position_index
from torch import Tensor

from ibot_eval.models.positions import Grid, ResizeRule, SizeCache
from ibot_eval.models.relative_bias import resize_bias_table
from ibot_eval.models.transformer import TransformerBackbone


class BeitBackbone(TransformerBackbone):
    """Adapter over ``Beit``, with one bias per block or one for all of them.

    At other sizes the bias tables are resized by BEiT's geometric interpolation, which is for evaluation: no gradient
    reaches the tables through it. The network's own tables are never changed, so visiting a size leaves no trace.
    """

    def __init__(self, net: Beit, *, family: str = "beit", resize: ResizeRule | None = None) -> None:
        super().__init__(net, family=family, resize=resize)
        self.architecture = self.architecture.replace("vit-", "beit-")
        self._tables = [SizeCache() for _ in range(self.depth)]
        self._lookup: tuple[Grid, Tensor] | None = None

    def _tokens(self, patches: Tensor, grid: Grid) -> Tensor:
        return self.net.pos_drop(self._prefixed(patches, (self.net.cls_token,), grid))

    def _arguments(self, grid: Grid) -> list[dict[str, Any]]:
        shared = self.net.rel_pos_bias
        if shared is None:
            return [{}] * self.depth
        bias = shared() if grid == self.trained_grid else self._bias(shared.relative_position_bias_table, grid, 0)
        return [{"shared_rel_pos_bias": bias}] * self.depth

    @contextmanager
    def _at_size(self, grid: Grid) -> Iterator[None]:
        """Blocks ask themselves for their bias; for one pass they are answered at the size of the pass."""
        attentions = [block.attn for block in self.net.blocks]
        replaced = []
        try:
            if grid != self.trained_grid:
                for index, attention in enumerate(attentions):
                    if attention.relative_position_bias_table is not None:
                        bias = self._bias(attention.relative_position_bias_table, grid, index)
                        attention._get_rel_pos_bias = lambda bias=bias: bias
                        replaced.append(attention)
            yield
        finally:
            for attention in replaced:
                del attention._get_rel_pos_bias

    def _bias(self, table: Tensor, grid: Grid, index: int) -> Tensor:
        """(1, heads, 1 + h*w, 1 + h*w) bias at another grid."""
        # Kept are the tables and one lookup, not the biases, which would take hundreds of megabytes per size.
        resized = self._tables[index].get(table, grid, lambda: resize_bias_table(table, self.trained_grid, grid))
        if self._lookup is None or self._lookup[0] != grid or self._lookup[1].device != table.device:
            with torch.inference_mode(False):
                self._lookup = (grid, gen_relative_position_index(grid, device=table.device))
        return resized[self._lookup[1]].permute(2, 0, 1).unsqueeze(0).contiguous()
