"""Layer-wise learning rates, and which parameters are decayed, as in BEiT's fine-tuning code (optim_factory.py)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.models import SwinBackbone

if TYPE_CHECKING:
    from ibot_eval.finetuning.network import Classifier

NET = "backbone.net."
"""Stands before timm's name of a parameter."""

EMBEDDING = re.compile(r"(cls_token|reg_token|dist_token|mask_token|pos_embed)$|(patch_embed|norm_pre)\.")
"""Tokens, positions and the patch embedding: what comes before the first block."""
OF_ALL_BLOCKS = re.compile(r"(rel_pos_bias|rope)\.")
"""Positions that every block reads."""
NOT_DECAYED = re.compile(r"(^|\.)(cls_token|reg_token|dist_token|mask_token|pos_embed|relative_position_bias_table)$")
"""Tokens and positions; biases and vectors (norms, LayerScale) are told by their names and shapes."""


def layer_scales(classifier: Classifier, decay: float) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied with: decay^(depth + 1 - layer).

    Layer 0 is the embedding (see :data:`EMBEDDING`), block i from 0 is layer i + 1, and all else (last norm, projection
    layers, head, a relative position bias that all blocks share) is layer depth + 1, as in BEiT's code. A Swin's blocks
    are counted through all stages, and merging of patches belongs to the block before it (iBOT's and SimMIM's code).

    Args:
        classifier: whose parameters are meant; those that need no gradient have a scale too.
        decay: above 0 and at most 1.

    Returns:
        Name of the parameter, as in the published files (timm's names for the backbone: ``blocks.0.norm1.weight``; the
        head's are ``head.weight`` and ``head.bias``) -> scale.

    Raises:
        ConfigError: ``decay`` is not in that range.
    """
    _check_decay(decay)
    last = classifier.backbone.depth + 1
    return {
        name.removeprefix(NET): decay ** (last - layer_of(classifier.backbone, name))
        for name, _ in classifier.named_parameters()
    }


def optimiser_groups(classifier: Classifier, decay: float, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters, grouped by layer and by whether weight decay applies.

    Biases, vectors (norms, LayerScale), tokens, absolute positions and tables of relative positions are not decayed.
    BEiT's and iBOT's code decay those tables unless a flag says otherwise; Swin's never does. iBOT's copy of DeiT's
    script (transfer, semi-supervised) decays tokens and positions too; DeiT's own does not.

    Args:
        classifier: parameters that need no gradient are left out.
        decay: of :func:`layer_scales`; 1 for one learning rate.
        weight_decay: of decayed groups; may be 0.

    Returns:
        Groups for ``torch.optim``, none of them empty: {"params": tensors, "names": their names in the classifier,
        "lr_scale": factor of the learning rate, "decayed": whether weight decay is meant for it, "weight_decay": the
        value or 0.0}. Equal networks give equal groups in equal order.

    Raises:
        ConfigError: a decay outside its range, or nothing to train.
    """
    _check_decay(decay)
    if weight_decay < 0:
        raise ConfigError(f"a weight decay of {weight_decay} is negative", todo="--weight-decay 0 switches it off")
    scales = layer_scales(classifier, decay)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in classifier.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed = is_decayed(name, parameter)
        key = (layer_of(classifier.backbone, name) if decay < 1 else 0, decayed)
        if key not in groups:
            groups[key] = {
                "params": [],
                "names": [],
                "lr_scale": scales[name.removeprefix(NET)],
                "decayed": decayed,
                "weight_decay": weight_decay if decayed else 0.0,
            }
        groups[key]["params"].append(parameter)
        groups[key]["names"].append(name)
    return list(groups.values())


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter of this name and shape."""
    return parameter.ndim > 1 and not name.endswith(".bias") and not NOT_DECAYED.search(name)


def layer_of(backbone: Backbone, name: str) -> int:
    """The layer of a parameter, from 0 to depth + 1; see :func:`layer_scales`.

    Args:
        backbone: of the classifier.
        name: of the parameter in the classifier; what stands before timm's name may be missing.
    """
    name = name.removeprefix(NET)
    if EMBEDDING.match(name):
        return 0
    block = re.match(r"blocks\.(\d+)\.", name)
    if block:
        return int(block[1]) + 1
    stage = re.match(r"layers\.(\d+)\.(?:blocks\.(\d+)|downsample)\.", name)
    if stage and isinstance(backbone, SwinBackbone):
        before = sum(backbone.depths[: int(stage[1])])
        # timm opens a stage with the merging that closes the one before it in the published code.
        return before if stage[2] is None else before + int(stage[2]) + 1
    return backbone.depth + 1


def _check_decay(decay: float) -> None:
    if not 0 < decay <= 1:
        raise ConfigError(f"a layer decay of {decay} is not above 0 and at most 1", todo="--layer-decay 1 for none")
