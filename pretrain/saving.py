"""The networks of a run as files that every protocol reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ibot_eval.export import write_network
from pretrain.config import MAY_CHANGE, PretrainSettings
from pretrain.networks import Network


def export_networks(folder: Path, student: Network, teacher: Network, settings: PretrainSettings, step: int) -> None:
    """Writes teacher.safetensors and student.safetensors, each whole or not at all."""
    for role, network in (("teacher", teacher), ("student", student)):
        write_network(
            folder / f"{role}.safetensors",
            backbone=network.backbone,
            head=network.head,
            masked_embed=network.trunk.masked_embed.detach() if role == "student" else None,
            metadata=metadata(settings, role, step),
        )


def metadata(settings: PretrainSettings, role: str, step: int) -> dict[str, Any]:
    """What the file says about itself besides its architecture."""
    # What touches no weight would only make the files of equal runs differ.
    recipe = {name: value for name, value in settings.flat().items() if name not in MAY_CHANGE or name == "data"}
    about: dict[str, Any] = {"role": role, "step": step, "recipe": recipe, "torch": torch.__version__}
    data = settings.data
    if data.mean is not None and data.std is not None:
        about |= {"mean": list(data.mean), "std": list(data.std)}
    return about
