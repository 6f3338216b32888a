"""Writing networks: our safetensors files, the published iBOT layout, and timm's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ibot_eval.backbone import Backbone
from ibot_eval.errors import CheckpointError
from ibot_eval.files import atomic_open, atomic_write_bytes, canonical_json
from ibot_eval.heads import ProjectionHead
from ibot_eval.layouts.blueprint import Tensors
from ibot_eval.layouts.matching import check_finite
from ibot_eval.models import SwinBackbone

VIT_NAME = re.compile(
    r"(cls_token|pos_embed|(patch_embed\.proj|norm|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12]))\.(weight|bias))"
)
"""Tensors that the published code's ViT has."""


class Exported(NamedTuple):
    """What is written of one network."""

    backbone: Backbone
    head: ProjectionHead | None = None
    masked_embed: Tensor | None = None
    """(1, D of the embedded patches), what stands in for a masked patch."""


def write_network(
    path: Path | str,
    *,
    backbone: Backbone,
    head: ProjectionHead | None = None,
    masked_embed: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Writes a network as safetensors, whole or not at all, for ``load_checkpoint`` to read back bit for bit.

    Tensors have the published names (``backbone.blocks.0…``, ``backbone.masked_embed``, ``head.mlp.0.weight``,
    ``head.last_layer.weight_g`` …). Equal networks and metadata give equal bytes.

    Args:
        path: of a file called .safetensors; a run folder's are teacher.safetensors and student.safetensors.
        backbone: a plain ViT with [CLS], or a Swin; on any device.
        head: its projection head, of any sharing.
        masked_embed: (1, D).
        metadata: JSON-ready; is kept beside what :func:`described` tells of the backbone, and wins over it.
        dtype: of the floating-point tensors in the file; their own where it is None.

    Returns:
        How many tensors were written.

    Raises:
        CheckpointError: another kind of network, or a value that is NaN, infinite, or beyond the range of ``dtype``.
        OSError: the file cannot be written; what was there before is left as it was.
    """
    tensors = _stored(published_tensors(Exported(backbone, head, masked_embed)), dtype)
    # One key only: safetensors writes several in an order that changes from run to run.
    about = {"ibot_eval": canonical_json(described(backbone) | dict(metadata or {}))}
    atomic_write_bytes(path, save(tensors, about))
    return len(tensors)


def own_metadata(path: Path | str | None) -> dict[str, Any]:
    """What a file of :func:`write_network` says about itself (recipe, step, role …); {} for any other file."""
    if path is None or Path(path).suffix != ".safetensors":
        return {}
    with safe_open(str(path), "pt") as file:
        return json.loads((file.metadata() or {}).get("ibot_eval", "{}"))


def write_published(path: Path | str, networks: Mapping[str, Exported], dtype: torch.dtype | None = None) -> int:
    """Writes a file that the published iBOT code reads: ``{"student": {…}, "teacher": {…}}``, by ``torch.save``.

    As that code saves them, the student's names stand under ``module.`` (its data-parallel wrapper), the teacher's do
    not, and a shared last layer is there under both of its names, ``last_layer`` and ``last_layer2``.

    Args:
        path: of the file.
        networks: "student" or "teacher" or both.
        dtype: as in :func:`write_network`.

    Returns:
        How many tensors were written.

    Raises:
        CheckpointError, OSError: as :func:`write_network`.
    """
    contents: dict[str, Tensors] = {}
    for role, network in networks.items():
        tensors = _stored(published_tensors(network), dtype)
        if network.head is not None and network.head.sharing == "shared":
            for part in ("weight_g", "weight_v"):
                tensors[f"head.last_layer2.{part}"] = tensors[f"head.last_layer.{part}"]
        prefix = "module." if role == "student" else ""
        contents[role] = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    _save_torch(path, contents)
    return sum(map(len, contents.values()))


def write_timm(path: Path | str, backbone: Backbone, dtype: torch.dtype | None = None) -> int:
    """Writes a backbone under timm's own names, which ``load_state_dict`` of a timm network without classifier takes.

    Args:
        path: a name in .safetensors gives that format, with what :func:`described` tells as metadata; any other
            ``torch.save``.
        backbone: an adapter over a timm network.
        dtype: as in :func:`write_network`.

    Returns:
        How many tensors were written.

    Raises:
        CheckpointError: no timm network, or as :func:`write_network`.
        OSError: as :func:`write_network`.
    """
    net = getattr(backbone, "net", None)
    if not isinstance(net, nn.Module):
        raise CheckpointError(f"{backbone.architecture} is no network that this program knows in timm's layout")
    tensors = _stored(net.state_dict(), dtype)
    if Path(path).suffix == ".safetensors":
        atomic_write_bytes(path, save(tensors, {"ibot_eval": canonical_json(described(backbone))}))
    else:
        _save_torch(path, tensors)
    return len(tensors)


def described(backbone: Backbone) -> dict[str, Any]:
    """What the tensors of a backbone do not tell and a reader needs: the fields of ``layouts.blueprint.Hints``.

    Returns:
        JSON-ready: family, eps of the LayerNorms, grid (rows and columns of embedded patches it was trained with),
        patch_size in pixels, mean and std of the inputs, and heads, except of a Swin, whose tables tell them.

    Raises:
        CheckpointError: the LayerNorms differ in eps.
    """
    eps = {module.eps for module in backbone.modules() if isinstance(module, nn.LayerNorm)}
    if len(eps) > 1:
        raise CheckpointError(f"the LayerNorms of {backbone.architecture} differ in eps: {sorted(eps)}")
    about: dict[str, Any] = {
        "family": backbone.family,
        "eps": next(iter(eps), None),
        "heads": None if isinstance(backbone, SwinBackbone) else backbone.num_heads or None,
        "grid": list(getattr(backbone, "trained_grid", None) or ()) or None,
        "patch_size": getattr(backbone, "embed_patch_size", backbone.patch_size),
        "mean": list(backbone.mean),
        "std": list(backbone.std),
    }
    return {name: value for name, value in about.items() if value is not None}


def published_tensors(network: Exported) -> Tensors:
    """The tensors of a network under the names of the published iBOT code, ``backbone.…`` and ``head.…``; no copies.

    Raises:
        CheckpointError: a network that the published code does not have.
    """
    net: Any = getattr(network.backbone, "net", None)
    if isinstance(net, SwinTransformer):
        trunk = {_merged_before(name): tensor for name, tensor in net.state_dict().items()}
    elif isinstance(net, VisionTransformer):
        trunk = dict(net.state_dict())
        _refuse_other_vits(network.backbone, trunk)
    else:
        raise _unpublished(network.backbone, "it is neither a plain ViT nor a Swin")
    if network.masked_embed is not None:
        trunk["masked_embed"] = network.masked_embed
    tensors = {f"backbone.{name}": tensor for name, tensor in trunk.items()}
    if network.head is not None:
        tensors |= {f"head.{name}": tensor for name, tensor in network.head.state_dict().items()}
    return tensors


def _merged_before(name: str) -> str:
    """Merging of patches closes a stage in the published Swin, and opens the next one in timm's."""
    return re.sub(r"^layers\.(\d+)\.downsample\.", lambda stage: f"layers.{int(stage[1]) - 1}.downsample.", name)


def _refuse_other_vits(backbone: Backbone, trunk: Tensors) -> None:
    foreign = [name for name in trunk if not VIT_NAME.fullmatch(name)]
    if foreign:
        raise _unpublished(backbone, f"it holds {len(foreign)} tensors that no ViT of that code has", foreign[0])
    grid: Any = getattr(backbone, "trained_grid", None)
    if "cls_token" not in trunk or trunk["pos_embed"].shape[1] != 1 + grid[0] * grid[1]:
        raise _unpublished(backbone, "[CLS] is missing, or has no position embedding")
    hidden, width = trunk["blocks.0.mlp.fc1.weight"], trunk["blocks.0.mlp.fc2.weight"]
    if hidden.shape[0] != width.shape[1]:
        raise _unpublished(backbone, "its MLP is gated")


def _unpublished(backbone: Backbone, reason: str, where: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"the published iBOT layout has no place for {backbone.architecture}: {reason}",
        where=where,
        todo="timm's layout takes it: --layout timm",
    )


def _stored(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensors:
    """The tensors as they go into a file: on the CPU, contiguous, in ``dtype``."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    check_finite(stored)
    for name, tensor in stored.items():
        if dtype is None or not tensor.is_floating_point():
            continue
        stored[name] = tensor.to(dtype)
        if not torch.isfinite(stored[name]).all():
            raise CheckpointError(
                f"{name} holds {tensor.abs().max().item():.4g}, which {str(dtype).removeprefix('torch.')} cannot hold",
                todo="write the file in float32 (without --half)",
            )
    return stored


def _save_torch(path: Path | str, contents: Mapping[str, Any]) -> None:
    try:
        with atomic_open(path) as file:
            torch.save(contents, file)
    except RuntimeError as error:
        # After a failed write torch.save complains about the size of what it wrote, which hides the reason.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
