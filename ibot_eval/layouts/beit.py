"""BEiT and what descends from its code: ViTs with a relative position bias, as timm's Beit."""

from __future__ import annotations

from functools import partial

from timm.models.beit import Beit
from torch import nn

from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.blueprint import (
    HALF,
    HALF_NOTE,
    Blueprint,
    Hints,
    Tensors,
    in_beits_layout,
    mlp_ratio,
    number_of,
    square,
)
from ibot_eval.layouts.unwrapping import Network
from ibot_eval.layouts.vit import EPS, patch_size
from ibot_eval.models.positions import Grid
from ibot_eval.models.relative_bias import CLS_ENTRIES

SHARED = "rel_pos_bias.relative_position_bias_table"
PER_BLOCK = "blocks.0.attn.relative_position_bias_table"


def has_relative_bias(network: Network) -> bool:
    """Whether a network carries BEiT's relative position bias."""
    return SHARED in network.trunk or PER_BLOCK in network.trunk


def read_beit(network: Network, hints: Hints) -> Blueprint:
    """A BEiT, its shape and its heads inferred from the bias tables.

    Inputs are normalised with 0.5 / 0.5 in BEiT's own layout (separate ``q_bias`` and ``v_bias``) and with ImageNet's
    values where one ``qkv.bias`` shows that iBOT's fine-tuning code wrote the file. BEiT v2 keeps v1's layout with
    ImageNet's values; a note says so.

    Raises:
        CheckpointError: a grid that cannot be inferred, or flags that contradict the tensors.
    """
    tensors, notes = dict(network.trunk), []
    table = tensors[SHARED if SHARED in tensors else PER_BLOCK]
    heads, width = table.shape[1], tensors["patch_embed.proj.weight"].shape[0]
    if hints.heads not in (None, heads):
        raise CheckpointError(f"the network has {heads} heads, not {hints.heads}", todo="leave --heads out")
    patch = patch_size(tensors, hints.patch_size)
    grid = _grid(table.shape[0], tensors, hints.grid)
    own_layout = in_beits_layout(tensors)
    for name in [name for name in tensors if name.endswith(".attn.qkv.bias")]:
        # The key's part shifts all scores of a query alike, so the softmax does not see it.
        query, _, value = tensors.pop(name).chunk(3)
        stem = name.removesuffix("qkv.bias")
        tensors[f"{stem}q_bias"], tensors[f"{stem}v_bias"] = query, value
    fc_norm = "fc_norm.weight" in tensors and "norm.weight" not in tensors
    if fc_norm:
        notes.append("the last norm comes after the mean of the patches (fc_norm): a network fine-tuned on that mean")
    if own_layout and hints.mean is None:
        notes.append(HALF_NOTE)
    hidden = tensors["blocks.0.mlp.fc1.weight"].shape[0] if "blocks.0.mlp.fc1.weight" in tensors else 4 * width
    net = Beit(
        img_size=(grid[0] * patch, grid[1] * patch),
        patch_size=patch,
        num_classes=0,
        global_pool="avg" if fc_norm else "token",
        use_fc_norm=fc_norm,
        embed_dim=width,
        depth=number_of(tensors, "blocks."),
        num_heads=heads,
        qkv_bias="blocks.0.attn.q_bias" in tensors,
        mlp_ratio=mlp_ratio(hidden, width),
        init_values=0.1 if "blocks.0.gamma_1" in tensors else None,
        use_abs_pos_emb="pos_embed" in tensors,
        use_rel_pos_bias=PER_BLOCK in tensors,
        use_shared_rel_pos_bias=SHARED in tensors,
        norm_layer=partial(nn.LayerNorm, eps=hints.eps or EPS),  # pyright: ignore[reportArgumentType]
        device="meta",
    )
    mean, std = (HALF, HALF) if own_layout else (None, None)
    return Blueprint(net, tensors, "beit", grid, hints.mean or mean, hints.std or std, notes)


def _grid(rows: int, tensors: Tensors, asked: Grid | None) -> Grid:
    """The grid whose table has ``rows`` rows: (2h - 1)(2w - 1) distances and three entries of [CLS]."""
    distances, grid = square(rows - CLS_ENTRIES), asked
    if grid is None and distances is not None:
        grid = ((distances[0] + 1) // 2, (distances[1] + 1) // 2)
    if grid is None and "pos_embed" in tensors:
        grid = square(tensors["pos_embed"].shape[1] - 1)
    if grid is None or (2 * grid[0] - 1) * (2 * grid[1] - 1) != rows - CLS_ENTRIES:
        raise CheckpointError(
            f"the grid of patches cannot be told from a relative position table of {rows} rows",
            todo="give its rows and columns with --grid",
        )
    return grid
