"""Networks asked for by name: timm's, with or without weights, and the demonstration."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm.models.beit import Beit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ibot_eval.errors import CheckpointError, suggest
from ibot_eval.layouts.blueprint import HALF, HALF_NOTE, Blueprint, Hints, Tensors, in_beits_layout
from ibot_eval.layouts.families import HEADS, MARKED, vit_family
from ibot_eval.layouts.swin import norm_eps
from ibot_eval.layouts.unwrapping import Network
from ibot_eval.layouts.vit import measure, resize_of_file
from ibot_eval.models.vit import small_random_vit

RANDOM_NOTE = (
    "the weights are random: nothing was learnt, so numbers show only that the pipeline works, and what chance "
    "features reach"
)
DEMO_SIZE = 64
"""Side in pixels that the random demonstration network is built for."""
DEMO_FILE = Path(__file__).parent.parent / "demo.safetensors"
"""The trained demonstration network, of a teacher's file; where it is missing, ``demo`` has random weights."""
DEMO_NOTE = "the demonstration network: pre-trained on scikit-learn's digits, for a first look at the program only"


def random_network(name: str, seed: int, **arguments: Any) -> nn.Module:
    """A timm network, without classifier, with random weights that depend on ``seed`` alone.

    torch's own generator is left as it was.

    Raises:
        CheckpointError: timm has no such network; suggests near names.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return small_random_vit(DEMO_SIZE) if name == "demo" else create(name, num_classes=0, **arguments)


def pretrained_network(name: str) -> nn.Module:
    """A timm network with its published weights; ``name`` may carry timm's ``hf-hub:`` or ``local-dir:``.

    Raises:
        CheckpointError: unknown, or its weights cannot be fetched; says what timm said.
    """
    return create(name, pretrained=True)


def create(name: str, **arguments: Any) -> nn.Module:
    """``timm.create_model`` with errors that a user can act on."""
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        raise CheckpointError(f"timm has no network {name!r}", todo=suggest(name.split(".")[0], timm.list_models()))
    try:
        return timm.create_model(name, **arguments)
    except Exception as error:
        # timm, huggingface_hub and their transports raise dozens of types here; all mean that this network is not to
        # be had, and the message says why.
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        fetching = arguments.get("pretrained", False)
        raise CheckpointError(
            f"timm could not {'fetch' if fetching else 'build'} {name!r}",
            where=f"{type(error).__name__}: {reason}",
            todo="check the name and the connection, or download the file and give its path to --ckpt"
            if fetching
            else "check --arch, --heads and --patch-size",
        ) from error


def family_of_name(name: str) -> str:
    """Whose published habits the weights of a timm name call for."""
    lowered = name.lower()
    for mark, family in (
        ("dinov3", "dinov3"),
        ("dinov2", "dinov2"),
        (".dino", "dino"),
        (".mae", "mae"),
        ("mocov3", "mocov3"),
        ("beit", "beit"),
        ("deit", "deit"),
        ("swin", "swin"),
        ("resne", "resnet"),
    ):
        if mark in lowered:
            return family
    return "timm"


def read_as(arch: str, network: Network, hints: Hints) -> Blueprint:
    """The network of a file as the timm network that the user names, its names converted by timm's own filter.

    The network is built for the stored grid of positions, so that timm resizes none. What the file's layout tells of
    its family holds here as well: mean and deviation, eps, and how positions are resized.

    Raises:
        CheckpointError: unknown name, or a patch embedding, a window, a grid or heads other than the file's.
    """
    arguments = {"num_heads": hints.heads, "patch_size": hints.patch_size}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    net = create(arch, num_classes=0, **arguments)
    tensors, family, grid, notes = dict(network.trunk), family_of_name(arch), None, []
    resize, eps = None, hints.eps
    if isinstance(net, VisionTransformer):
        found = measure(network, hints)
        tensors, grid, notes = found.tensors, found.grid, found.notes
        family = hints.family or vit_family(network, tensors, found.fixed)
        if family == "vit" and not isinstance(net.norm_pre, nn.Identity):
            family = "timm"  # CLIP's kind: none of the families that share iBOT's habits.
        resize = resize_of_file(family, network, found, hints)
        _check_heads(arch, net, family, hints)
        if getattr(net, "dist_token", None) is not None and "reg_token" in tensors:
            tensors["dist_token"], notes = tensors.pop("reg_token"), []
    if isinstance(net, SwinTransformer) and hints.arch is None:
        eps = eps or norm_eps(network)
    weight, own = tensors.get("patch_embed.proj.weight"), getattr(getattr(net, "patch_embed", None), "proj", None)
    if weight is not None and isinstance(own, nn.Conv2d) and weight.shape != own.weight.shape:
        raise CheckpointError(
            f"patch_embed.proj.weight has shape {tuple(weight.shape)} in the checkpoint and "
            f"{tuple(own.weight.shape)} in {arch}",
            todo="choose an --arch of the same width and patch size",
        )
    if weight is not None and grid is not None and getattr(net, "pos_embed", None) is not None:
        size = (grid[0] * weight.shape[-2], grid[1] * weight.shape[-1])
        net = create(arch, num_classes=0, img_size=size, **arguments)
    _check_sizes(arch, net, tensors)
    convert = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        tensors = convert(tensors, net)
    trained = getattr(getattr(net, "patch_embed", None), "grid_size", None)
    for module in net.modules():
        if eps is not None and isinstance(module, nn.LayerNorm):
            module.eps = eps
    mean, std = hints.mean, hints.std
    if isinstance(net, (Beit, VisionTransformer)) and in_beits_layout(network.trunk):
        family = "beit"
        if mean is None:
            mean, std = HALF, std or HALF
            notes.append(HALF_NOTE)
    return Blueprint(net, tensors, hints.family or family, trained, mean, std, notes, resize)


def _check_heads(arch: str, net: VisionTransformer, family: str, hints: Hints) -> None:
    heads, key = cast(Any, net.blocks[0]).attn.num_heads, (net.embed_dim, len(net.blocks))
    known = HEADS[family].get(key) if family in MARKED else None
    if hints.heads is None and known not in (None, heads):
        raise CheckpointError(
            f"{arch} has {heads} heads, and {family}'s network of width {key[0]} has {known}",
            todo=f"leave --arch out, or add --heads {known} (or --heads {heads}, if you know better)",
        )


def _check_sizes(arch: str, net: nn.Module, tensors: Tensors) -> None:
    """Refuses position tables of another size, which timm's filters would resize without a word."""
    own = net.state_dict()
    for name, tensor in tensors.items():
        table = name == "pos_embed" or name.endswith("relative_position_bias_table")
        if table and name in own and own[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint and {tuple(own[name].shape)} in {arch}: "
                "the grid, the window or the heads differ",
                todo="choose an --arch of the file's image and window size, or leave it out",
            )


def tensors_sha256(tensors: dict[str, Tensor]) -> str:
    """Hash of names, shapes, types and values, for networks that come from no file."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else str(tensor.item()).encode())
    return digest.hexdigest()
