"""Filling a network with tensors, and refusing anything less than all of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.blueprint import Tensors

MAY_BE_LEFT_OVER = {
    "masked embedding of pre-training": r"(^|\.)(masked_embed|mask_token)$",
    "projection or classification head": r"(^|\.)(head|heads|head_dist|dino_head|ibot_head|lm_head|cls_pt_layers"
    r"|cls_head|linear_head|classifier|classifiers|fc|linear|pooler|pre_logits|prototypes)\.",
    "projection or prediction network": r"(^|\.)(predictor|projector|projectors|projection_head)\.",
    "decoder of pre-training": r"(^|\.)decoder(_\w+)?(\.|$)",
    "norm that is not used": r"(^|\.)(fc_norm|local_cls_norm)\.",
    "buffer that is computed": r"(^|\.)(relative_position_index|relative_coords_table|attn_mask|num_batches_tracked"
    r"|bias_mask|periods)$",
}
"""What may stay unused without a remark: name of the kind -> pattern of tensor names."""

INNER = re.compile(r"^(blocks|layers|layer\d|patch_embed|rel_pos_bias)\w*\.")
"""Names inside a backbone's own layers, where nothing but masks and computed buffers may be left over."""
OUTER = re.compile(r"^(conv\d|bn\d|stem|norm|cls_norm|rope)\w*\.|^\w*(pos_embed|_tokens?)$")
"""Other names that belong to a backbone."""
INNER_KINDS = ("masked embedding of pre-training", "buffer that is computed")

NOT_NEEDED = "num_batches_tracked"
"""A counter that old files lack; it takes no part in evaluation."""


@dataclass
class Match:
    """How the tensors of a file and the parameters of a network met."""

    matched: int = 0
    parameters: int = 0
    """Numbers in the matched tensors."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @classmethod
    def whole(cls, tensors: Tensors) -> Match:
        """Of a network that has all its tensors already."""
        return cls(len(tensors), sum(tensor.numel() for tensor in tensors.values()))


def fill(net: nn.Module, tensors: Tensors) -> Match:
    """Gives ``net`` (on any device, the meta device included) copies of the tensors, as float32 on the CPU.

    Raises:
        CheckpointError: a parameter or statistic of the network has no tensor, a tensor has another shape or is
            quantised, one holds NaN or infinity, or tensors of the backbone are left over. Others are only reported.
    """
    own = net.state_dict()
    needed = {name: tensor for name, tensor in own.items() if not name.endswith(NOT_NEEDED)}
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise CheckpointError(
            f"only {len(needed) - len(missing)} of the backbone's {len(needed)} tensors are in the checkpoint",
            where=f"missing: {_first(missing)}",
            todo="use the whole file, another --key, or say what network it is with --arch",
        )
    used = {name: tensors[name] for name in own if name in tensors}
    for name, tensor in used.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint and {tuple(own[name].shape)} in the network",
                todo="check --arch, --patch-size and --heads, or leave them out",
            )
        if own[name].is_floating_point() and not tensor.is_floating_point():
            raise CheckpointError(
                f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}: the checkpoint is quantised",
                todo="use the checkpoint in float32, float16 or bfloat16",
            )
    left = [name for name in tensors if name not in own]
    foreign = [name for name in left if is_foreign(name)]
    if foreign:
        plural = "tensor" if len(foreign) == 1 else "tensors"
        # Without them the network would compute something else than the one that was trained.
        raise CheckpointError(
            f"the backbone holds {len(foreign)} unknown {plural}: it is another network than its other names "
            "suggest, or not all blocks are alike",
            where=_first(foreign),
            todo="say what network it is with --arch (a timm name), or evaluate it from Python with "
            "ibot_eval.models.wrap(module)",
        )
    check_finite(used)
    # Copies: the originals may be mapped from the file, which can change under a long run.
    copies = {name: _copy(tensor) for name, tensor in used.items()}
    net.load_state_dict(copies, strict=False, assign=True)
    _materialise(net)
    return Match(
        len(used),
        sum(tensor.numel() for tensor in used.values()),
        [],
        [name for name in left if not may_be_left_over(name)],
        [name for name in left if may_be_left_over(name)],
    )


def may_be_left_over(name: str) -> bool:
    """Whether the allow-list names this tensor."""
    return any(re.search(pattern, name) for pattern in MAY_BE_LEFT_OVER.values())


def is_foreign(name: str) -> bool:
    """Whether a left-over tensor of this name would be part of the backbone's computation."""
    if INNER.search(name):
        return not any(re.search(MAY_BE_LEFT_OVER[kind], name) for kind in INNER_KINDS)
    return bool(OUTER.search(name)) and not may_be_left_over(name)


def check_finite(tensors: Tensors) -> None:
    """Raises CheckpointError naming the first tensor with NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"{name} holds {bad} values that are NaN or infinite, of {tensor.numel()}",
                todo="use an earlier checkpoint of the same run: this one has diverged or is damaged",
            )


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.to(torch.float32, copy=True).contiguous()


def _materialise(net: nn.Module) -> None:
    """Buffers that no checkpoint holds, off the meta device and computed."""
    for module in net.modules():
        pending = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in pending:
            persistent = name not in module._non_persistent_buffers_set
            empty = torch.zeros_like(module.get_buffer(name), device="cpu")
            module.register_buffer(name, empty, persistent=persistent)
        compute = getattr(module, "init_non_persistent_buffers", None)
        if pending and compute is not None:
            compute()


def _first(names: Iterable[str], count: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
