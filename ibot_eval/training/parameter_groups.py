"""Which parameters an optimiser decays."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters of ``module`` as two optimiser groups: decayed, and not.

    Biases and vectors (norm layers, LayerScale) are not decayed; everything else is, class token, position embeddings
    and masked embedding included (the rule of DINO's and iBOT's code). Parameters that need no gradient are left out,
    and one that has several names comes once, under the first.

    Returns:
        [decayed, plain], each {"params": tensors, "names": their names in the same order, "decayed": whether the
        schedule's weight decay is meant for it, "weight_decay": 0.0}. A group may be empty.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "names": [], "decayed": decayed, "weight_decay": 0.0} for decayed in (True, False)
    ]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            group = groups[1 if parameter.ndim == 1 or name.endswith(".bias") else 0]
            group["params"].append(parameter)
            group["names"].append(name)
    return groups
