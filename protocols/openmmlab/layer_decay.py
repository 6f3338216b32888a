"""Layer-wise learning rates for detectors and segmentors over a checkpoint's backbone."""

from __future__ import annotations

from typing import Any

from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.layer_decay import is_decayed
from protocols.openmmlab.backbone import CheckpointBackbone, layer_in


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Groups parameters by their layer and by whether weight decay applies.

    Rates follow :mod:`ibot_eval.finetuning.layer_decay`: with D blocks, decay^(D + 1) for embedding, tokens and
    positions, decay^(D - i) for block i from 0, and 1 for all else: last norm, deconvolutions, neck and heads. Biases,
    vectors, tokens, positions and tables of relative positions are not decayed. Parameters without gradient are left
    out.

    ``paramwise_cfg`` is ``{"layer_decay": factor}``; 1 gives one rate to all.
    """

    def add_params(self, params: list[dict[str, Any]], module: nn.Module, **kwargs: Any) -> None:
        """Appends the groups of ``module`` to ``params``: "params", "param_names", "lr", "lr_scale", "weight_decay".

        Raises:
            ConfigError: nothing is trained, or ``layer_decay`` is not above 0 and at most 1.
        """
        decay = float(self.paramwise_cfg.get("layer_decay", 1.0))
        if not 0 < decay <= 1:
            raise ConfigError(f"a layer decay of {decay} is not above 0 and at most 1", todo="--layer-decay 1 for none")
        scales = layer_scales(module, decay)
        groups: dict[tuple[float, bool], dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            decayed = is_decayed(name, parameter)
            scale = scales[name]
            group = groups.setdefault(
                (scale, decayed),
                {
                    "params": [],
                    "param_names": [],
                    "lr": self.base_lr * scale,
                    "lr_scale": scale,
                    "weight_decay": (self.base_wd or 0.0) if decayed else 0.0,
                },
            )
            group["params"].append(parameter)
            group["param_names"].append(name)
        if not groups:
            raise ConfigError("there is nothing to train", todo="freeze less")
        params.extend(groups.values())


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Name of each parameter of ``model`` -> what its learning rate is multiplied with.

    The model may hold any number of :class:`CheckpointBackbone`; parameters outside of them have 1.
    """
    scales = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    for place, part in model.named_modules():
        if isinstance(part, CheckpointBackbone):
            body: Backbone = part.body
            for name, _ in body.named_parameters():
                whole = ".".join(filter(None, (place, "body", name)))
                scales[whole] = decay ** (body.depth + 1 - layer_in(body, name))
    return scales
