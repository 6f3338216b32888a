"""Plain ViTs in the layouts of DINO, iBOT, DINOv2, MAE, MoCo v3, DeiT and timm, as timm's VisionTransformer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial

import torch
from timm.layers.mlp import SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.blueprint import (
    HALF,
    HALF_NOTE,
    Blueprint,
    Hints,
    Tensors,
    factor_pairs,
    in_beits_layout,
    mlp_ratio,
    need,
    number_of,
    square,
)
from ibot_eval.layouts.families import Order, number_of_heads, recognise_sincos, sincos_positions, vit_family
from ibot_eval.layouts.unwrapping import Network
from ibot_eval.models.positions import Grid, ResizeRule

EPS = 1e-6
"""Of the LayerNorms of all these families."""


@dataclass
class Renamed:
    """A plain ViT's tensors under timm's names, and what their shapes tell."""

    tensors: Tensors
    patch: int
    registers: int
    prefix: int = 0
    """Prefix tokens with a stored position."""
    grid: Grid | None = None
    """Of the stored positions; None where there are none."""
    fixed: Order | None = None
    """Whose sine-cosine positions they are."""
    notes: list[str] = field(default_factory=list)


def read_vit(network: Network, hints: Hints) -> Blueprint:
    """A plain ViT, its shape inferred from the tensors.

    Files that fine-tuning with iBOT's code writes have BEiT's names but plain absolute positions; they are read here
    and keep ImageNet's mean and deviation, which that fine-tuning used. A BEiT without relative positions in BEiT's own
    layout (separate ``q_bias`` and ``v_bias``) is normalised with 0.5 / 0.5, as by ``read_beit``.

    Raises:
        CheckpointError: XCiT, networks of the CLIP and EVA-02 kinds, a number of heads or a grid that cannot be
            inferred, or flags that contradict the tensors.
    """
    found = measure(network, hints)
    tensors, notes = found.tensors, found.notes
    if any(".attn.temperature" in name or name.startswith("cls_attn_blocks.") for name in tensors):
        raise CheckpointError("the checkpoint is an XCiT, which is not supported", todo="choose a ViT, Swin or ResNet")
    width, depth = tensors["patch_embed.proj.weight"].shape[0], number_of(tensors, "blocks.")
    if not depth:
        raise CheckpointError("the network has no blocks", where=", ".join(sorted(tensors)[:5]))
    beits = in_beits_layout(network.trunk)
    _refuse_untold(tensors, beits)
    family = hints.family or ("beit" if beits else vit_family(network, tensors, found.fixed))
    grid, prefix = found.grid, found.prefix
    if grid is None:
        if family not in ("mae", "mocov3"):
            raise CheckpointError(
                "the checkpoint has no position embeddings (pos_embed)",
                todo="they are fixed in MAE and MoCo v3 only; use the whole file, or name a network without: --arch",
            )
        grid, prefix = hints.grid or (224 // found.patch, 224 // found.patch), int("cls_token" in tensors)
        fixed = sincos_positions(grid, width, "mae" if family == "mae" else "mocov3")
        tensors["pos_embed"] = torch.cat([torch.zeros(1, prefix, width), fixed], dim=1)
        notes.append(f"no position embeddings in the file: {family}'s fixed sine-cosine ones were computed")
    fc_norm = "fc_norm.weight" in tensors and "norm.weight" not in tensors
    if fc_norm:
        notes.append("the last norm comes after the mean of the patches (fc_norm): a network fine-tuned on that mean")
    if beits and hints.mean is None:
        notes.append(HALF_NOTE)
    resize = resize_of_file(family, network, found, hints)
    net = build(
        tensors,
        patch=found.patch,
        grid=grid,
        depth=depth,
        heads=number_of_heads(family, width, depth, hints.heads),
        registers=found.registers,
        prefix=prefix,
        fc_norm=fc_norm,
        eps=hints.eps or EPS,
    )
    mean, std = (HALF, HALF) if beits else (None, None)
    return Blueprint(net, tensors, family, grid, hints.mean or mean, hints.std or std, notes, resize)


def _refuse_untold(tensors: Tensors, beits: bool) -> None:
    """Networks whose tensors are named as a ViT's, but which compute something that no tensor tells."""
    if "norm_pre.weight" in tensors:
        raise CheckpointError(
            "the network has a norm before its blocks (norm_pre), as CLIP's: whether its activation is GELU or "
            "quick-GELU is not in the tensors",
            todo="name it with --arch, e.g. vit_base_patch32_clip_224 or vit_base_patch32_clip_quickgelu_224",
        )
    if beits and _gated(tensors):
        raise CheckpointError(
            "the network has BEiT's biases and a gated MLP, as EVA-02, whose rotary positions are not in the tensors",
            todo="name it with --arch, e.g. eva02_tiny_patch14_224",
        )


def resize_of_file(family: str, network: Network, found: Renamed, hints: Hints) -> ResizeRule | None:
    """How positions are resized, where the file tells more than its family; adds a note to ``found``."""
    if family != "dinov2" or hints.family or found.registers or "mask_token" in network.trunk:
        return None
    # DINOv2's own files have a mask token and timm's have none, and the two resize positions differently.
    found.notes.append(
        "DINOv2's layout without its mask token, as timm writes it: position embeddings are resized as timm does "
        "(DINOv2's own way: --pos-embed-resize scale)"
    )
    return "size-antialias"


def measure(network: Network, hints: Hints) -> Renamed:
    """Names, patch size, registers and positions of a plain ViT.

    Raises:
        CheckpointError: a patch embedding or positions that cannot be, or that contradict the hints.
    """
    tensors = rename(network.trunk)
    found = Renamed(tensors, patch_size(tensors, hints.patch_size), 0)
    if "dist_token" in tensors:
        tensors["reg_token"] = tensors.pop("dist_token")
        found.notes.append("the distillation token is kept as a register token")
    found.registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    if "pos_embed" not in tensors:
        return found
    has_cls = "cls_token" in tensors
    found.prefix, found.grid, found.fixed = split_positions(tensors, has_cls, found.registers, hints.grid)
    if found.prefix == 1 and found.registers and has_cls:
        # DINOv2 with registers: [CLS] has a position, registers have none. timm has it for all or for patches only.
        tensors["cls_token"] = tensors["cls_token"].float() + tensors["pos_embed"][:, :1].float()
        tensors["pos_embed"], found.prefix = tensors["pos_embed"][:, 1:], 0
    return found


def rename(trunk: Tensors) -> Tensors:
    """Published names -> timm's."""
    renamed: Tensors = {}
    for name, tensor in trunk.items():
        # FSDP-ready DINOv2 files cut the blocks into chunks: blocks.CHUNK.BLOCK.…
        name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
        name = re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name)
        name = name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
        renamed["reg_token" if name == "register_tokens" else name] = tensor
    for name in [name for name in renamed if name.endswith(".attn.q_bias")]:
        stem = name.removesuffix("q_bias")
        query, value = renamed.pop(name), need(renamed, f"{stem}v_bias")
        del renamed[f"{stem}v_bias"]
        renamed[f"{stem}qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
    weight = renamed.get("patch_embed.proj.weight")
    if weight is not None and weight.ndim == 2:
        side = round((weight.shape[1] / 3) ** 0.5)
        renamed["patch_embed.proj.weight"] = weight.reshape(len(weight), 3, side, side)
    return renamed


def patch_size(tensors: Tensors, asked: int | None) -> int:
    """Patch size in pixels, from the shape of the patch embedding.

    Raises:
        CheckpointError: not square, not of three channels, or another than asked for.
    """
    shape = tuple(tensors["patch_embed.proj.weight"].shape)
    if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
        raise CheckpointError(f"patch_embed.proj.weight has shape {shape}; (D, 3, P, P) is needed")
    if asked is not None and asked != shape[-1]:
        raise CheckpointError(
            f"the patch size is {shape[-1]}, not {asked}",
            where=f"patch_embed.proj.weight has shape {shape}",
            todo="leave --patch-size out",
        )
    return shape[-1]


def split_positions(
    tensors: Tensors, has_cls: bool, registers: int, asked: Grid | None
) -> tuple[int, Grid, Order | None]:
    """How the stored position embeddings are laid out.

    Returns:
        How many belong to prefix tokens, the grid of the others, and whose fixed embeddings they are, if they are.

    Raises:
        CheckpointError: the grid asked for does not fit, or none was and the embeddings are neither fixed nor a square.
    """
    stored = tensors["pos_embed"]
    length = stored.shape[1]
    options = [prefix for prefix in dict.fromkeys((int(has_cls) + registers, int(has_cls), 0)) if prefix < length]
    for prefix in options:
        recognised = recognise_sincos(stored[:, prefix:])
        if recognised is not None:
            return prefix, recognised[1], recognised[0]
    for prefix in options:
        grid = asked or square(length - prefix)
        if grid is not None and grid[0] * grid[1] == length - prefix:
            return prefix, grid, None
    if asked is not None:
        raise CheckpointError(
            f"a grid of {asked[0]}x{asked[1]} patches does not fit the {length} stored position embeddings",
            todo="correct --grid (rows columns)",
        )
    pairs = ", ".join(f"{rows} {columns}" for rows, columns in factor_pairs(length - has_cls) if min(rows, columns) > 1)
    raise CheckpointError(
        f"the {length - has_cls} stored position embeddings of patches are no square grid",
        where="pos_embed",
        todo=f"give rows and columns with --grid: {pairs or f'1 {length - has_cls}'}",
    )


def build(
    tensors: Tensors,
    *,
    patch: int,
    grid: Grid,
    depth: int,
    heads: int,
    registers: int,
    prefix: int,
    fc_norm: bool,
    eps: float,
) -> VisionTransformer:
    """timm's network on the meta device; what is not an argument is read from ``tensors`` (timm's names)."""
    width = tensors["patch_embed.proj.weight"].shape[0]
    hidden = _rows(tensors, "blocks.0.mlp.fc1.weight", 4 * width)
    has_cls = "cls_token" in tensors
    return VisionTransformer(
        img_size=(grid[0] * patch, grid[1] * patch),
        patch_size=patch,
        num_classes=0,
        global_pool="token" if has_cls and not fc_norm else "avg",
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_ratio(hidden, width),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        qk_norm="blocks.0.attn.q_norm.weight" in tensors,
        init_values=1e-5 if "blocks.0.ls1.gamma" in tensors else None,
        class_token=has_cls,
        no_embed_class=prefix == 0,
        reg_tokens=registers,
        fc_norm=fc_norm,
        norm_layer=partial(nn.LayerNorm, eps=eps),  # pyright: ignore[reportArgumentType]
        weight_init="skip",
        device="meta",
        **({"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU} if _gated(tensors) else {}),  # pyright: ignore[reportArgumentType]
    )


def _gated(tensors: Tensors) -> bool:
    first, second = (tensors.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    return first is not None and second is not None and first.shape[0] == 2 * second.shape[1]


def _rows(tensors: Tensors, name: str, default: int) -> int:
    return tensors[name].shape[0] if name in tensors else default
