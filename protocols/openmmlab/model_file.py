"""Trained models as files in mmengine's layout, and their weights in models."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from torch import Tensor, nn

from ibot_eval.errors import CheckpointError
from ibot_eval.files import atomic_open


def save_model(path: Path, model: nn.Module, cfg: Config, about: Mapping[str, Any]) -> None:
    """Writes RUN/model.pth: the weights, the classes and the configuration; plain values, whole or not at all.

    Args:
        about: the data set's ``metainfo``.

    Raises:
        CheckpointError: the file cannot be written.
    """
    state = {
        "state_dict": {name: tensor.cpu() for name, tensor in model.state_dict().items()},
        "meta": {
            "dataset_meta": {name: _plain(about[name]) for name in ("classes", "palette") if about.get(name)},
            "cfg": cfg.pretty_text,
            "ibot_eval_version": version("ibot-eval"),
        },
    }
    try:
        with atomic_open(path) as file:
            torch.save(state, file)
    except OSError as error:
        raise CheckpointError(f"the trained model cannot be written: {error.strerror}", where=str(path)) from error


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Puts ``weights`` into ``model``.

    Args:
        where: whose they are, for the error.

    Raises:
        CheckpointError: they are those of another model, or not finite; says how many, and the first of them.
    """
    own = model.state_dict()
    wrong = [
        *(f"{name} is missing" for name in own.keys() - weights.keys()),
        *(f"{name} is not part of this model" for name in weights.keys() - own.keys()),
        *(
            f"{name} has shape {tuple(weights[name].shape)}, and this model's {tuple(own[name].shape)}"
            for name in own.keys() & weights.keys()
            if own[name].shape != weights[name].shape
        ),
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors do not fit this model: {'; '.join(sorted(wrong)[:3])}",
            where=where,
            todo="give the settings, classes and checkpoint that it was trained with",
        )
    broken = [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{len(broken)} tensors hold NaN or infinity, such as {broken[0]}",
            where=where,
            todo="nothing can be measured with it: take an earlier state of the training",
        )
    model.load_state_dict(weights)
