"""Atomic outputs of a batch: which there are, whether a network has them, and one pass that computes several."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ibot_eval import reducers
from ibot_eval.backbone import Backbone, BlockOutput, Norm
from ibot_eval.errors import ConfigError
from ibot_eval.features import FeatureRequest, parse_reducer

BY_ATTENTION = ("topk", "norm_topk", "norm_bottomk")
"""Reducers that rank patches by the attention of [CLS]."""
NORM_AFTER_MEAN = ("norm_patch_mean", "norm_topk", "norm_bottomk", "norm_randomk")
"""Reducers that take raw tokens and apply the network's last norm to their mean."""


@dataclass(frozen=True)
class Atom:
    """One atomic output of one network, whatever the split."""

    block: int
    """Index from 0."""
    norm: Norm
    reducer: str


def resolve(request: FeatureRequest, backbone: Backbone, projection_head: nn.Module | None) -> Atom:
    """What ``request`` means for this network.

    Raises:
        ConfigError: a block that does not exist, or a reducer that needs what the network does not have.
    """
    block = backbone.resolve_block(request.block)
    kind, _ = parse_reducer(request.reducer)
    name = backbone.architecture
    if kind in BY_ATTENTION and not (backbone.has_cls and backbone.num_heads):
        raise ConfigError(
            f"{request.reducer} ranks patches by the attention of [CLS], which {name} does not have",
            todo="use a plain ViT with a [CLS] token, or the mean of all patches",
        )
    if kind == "head_argmax" and projection_head is None:
        raise ConfigError(
            "head_argmax needs a projection head, and this checkpoint has none",
            todo="use a full pre-training checkpoint (backbone and head), not the backbone alone",
        )
    if kind in (*NORM_AFTER_MEAN, "head_argmax") and backbone.dims[block] != backbone.dims[-1]:
        raise ConfigError(
            f"{kind} of block {block}: it is {backbone.dims[block]} wide, the end of {name} {backbone.dims[-1]}",
            todo="use a block as wide as the last one",
        )
    # The norm after the mean is the reducer's own; naming one must not make another bank.
    return Atom(block, "none" if kind in NORM_AFTER_MEAN else request.norm, request.reducer)


def row_bytes(atom: Atom, backbone: Backbone, side: int) -> int:
    """Bytes that the output takes for an image of side x side pixels; for patches of a pyramid an estimate."""
    width = backbone.dims[atom.block]
    kind, _ = parse_reducer(atom.reducer)
    if kind == "head_argmax":
        return 8
    if kind != "patches":
        return 4 * width
    # Swin and ResNet double their width where they halve their resolution.
    grid = side / backbone.patch_size * backbone.dims[-1] / width
    return int(2 * width * grid**2)


def atomic_outputs(
    backbone: Backbone,
    projection_head: nn.Module | None,
    images: Tensor,
    atoms: Sequence[Atom],
    indices: Sequence[int] | None = None,
) -> dict[Atom, Tensor]:
    """All ``atoms`` of a batch from one pass (blocks, norms and attention merged).

    Args:
        images: (B, 3, H, W) normalised, on the backbone's device.
        atoms: as :func:`resolve` gives them. Attention is that of the last block, whatever the atom's block, as in
            published part-wise probes.
        indices: (B,) of the images in their split; only ``norm_randomk`` needs them.

    Returns:
        Per atom (B, …), dtype and shape as ``features.REDUCERS`` says.

    Raises:
        ConfigError: more patches asked for than there are, or patches of a network that gives none.
        ValueError: ``norm_randomk`` without indices.
    """
    last = backbone.depth - 1
    attends = any(parse_reducer(atom.reducer)[0] in BY_ATTENTION for atom in atoms)
    tokens, attention = _tokens(backbone, images, {(a.block, a.norm) for a in atoms}, last if attends else None)
    orders: dict[tuple[bool, int], Tensor] = {}
    result = {}
    for atom in atoms:
        kind, parameter = parse_reducer(atom.reducer)
        cls, _, patches = tokens[atom.block, atom.norm]
        if kind not in ("cls", "head_argmax") and not patches.numel():
            raise ConfigError(f"{backbone.architecture} gives no patch tokens", todo="use the reducer cls")
        match kind, parameter:
            case "cls", _:
                value = cls.float()
            case "patch_mean", _:
                value = reducers.patch_mean(patches)
            case "norm_patch_mean", _:
                value = reducers.norm_patch_mean(patches, backbone.final_norm)
            case "gem", float(power):
                value = reducers.gem(patches, power)
            case "topk" | "norm_topk" | "norm_bottomk" | "norm_randomk", float(k):
                count = patches.shape[1] * patches.shape[2]
                ranked = kind in BY_ATTENTION
                if (ranked, count) not in orders:
                    made = _ranked(attention, count) if ranked else _drawn(indices, count, images.device)
                    orders[ranked, count] = made
                order = orders[ranked, count]
                value = reducers.leading_mean(patches, order.flip(1) if kind == "norm_bottomk" else order, int(k))
                if kind in NORM_AFTER_MEAN:
                    value = backbone.final_norm(value).float()
            case "head_argmax", _:
                assert projection_head is not None
                value = reducers.head_argmax(_logits(projection_head, cls))
            case "patches", _:
                value = patches.to(torch.float16)
            case _:
                raise NotImplementedError(atom.reducer)
        result[atom] = value
    return result


def _ranked(attention: Tensor | None, num_patches: int) -> Tensor:
    assert attention is not None
    return reducers.by_weight(reducers.cls_attention_on_patches(attention, num_patches))


def _drawn(indices: Sequence[int] | None, num_patches: int, device: torch.device) -> Tensor:
    if indices is None:
        raise ValueError("norm_randomk draws by the image's index in its split, and no indices are given")
    return reducers.drawn(indices, num_patches, device)


def _tokens(
    backbone: Backbone, images: Tensor, wanted: Set[tuple[int, Norm]], attention_block: int | None
) -> tuple[dict[tuple[int, Norm], BlockOutput], Tensor | None]:
    norms: set[Norm] = {norm for _, norm in wanted}
    if len(norms) == 1:
        norm: Norm = norms.pop()
        blocks = sorted(block for block, _ in wanted)
        outputs = backbone.outputs(images, blocks, norm, attention_block)
        return {(b, norm): tokens for b, tokens in zip(blocks, outputs.blocks, strict=True)}, outputs.attention
    blocks = sorted({block for block, _ in wanted})
    outputs = backbone.outputs(images, blocks, "none", attention_block)
    raw = dict(zip(blocks, outputs.blocks, strict=True))
    return {(b, norm): backbone.apply_norm(raw[b], b, norm) for b, norm in wanted}, outputs.attention


def _logits(head: nn.Module, cls: Tensor) -> Tensor:
    """(B, D) -> (B, K) of a ProjectionHead, or of any module that maps [CLS] tokens to logits."""
    return getattr(head, "forward_cls", head)(cls).float()
