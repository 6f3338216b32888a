"""The Python interface: the same protocols without the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sized
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from ibot_eval import registry, runner
from ibot_eval.backbone import Backbone
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.data.splits import Data
from ibot_eval.errors import ConfigError, suggest
from ibot_eval.own_network import from_module
from ibot_eval.record import EvalRecord
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings


def load_backbone(ckpt: str | Path, **overrides: Any) -> Backbone:
    """The backbone of a checkpoint, in evaluation mode on the CPU.

    Args:
        ckpt: what ``--ckpt`` takes.
        overrides: fields of :class:`ibot_eval.settings.CheckpointSettings` (``key="student"``, ``heads=6`` …).

    Raises:
        CheckpointError: the file cannot be read or does not hold all of a backbone.
    """
    return load_checkpoint(CheckpointSettings(ckpt=str(ckpt), **overrides)).backbone


def evaluate(
    backbone: str | Path | nn.Module | LoadedCheckpoint,
    protocol: str,
    data: str | Path | Data | tuple[Sized, Sized],
    **settings: Any,
) -> EvalRecord:
    """Runs a protocol and returns its saved record.

    Args:
        backbone: what ``--ckpt`` takes, or a module: a Backbone, a timm model, or any ``nn.Module`` that maps images
            (B, 3, H, W) to features (B, D). Features of a module are not kept in the cache, since no hash covers
            its code.
        protocol: registered name, such as ``"knn"``.
        data: what ``--data`` takes, a :class:`ibot_eval.data.splits.Data`, or a pair (train, test) of map-style data
            sets that give (PIL image or path, label).
        settings: settings of the protocol and any of the flags, underscores for dashes (``k=(10, 20)``,
            ``crop=112``, ``batch_size=256``, ``output="runs"``).

    Raises:
        UserError: what the command line would print before exiting with code 2.
    """
    kind = registry.load_protocol(protocol)
    groups, own = split_settings(settings, kind.config_type)
    if isinstance(backbone, (str, Path)):
        loaded, reference = None, str(backbone)
    else:
        size = settings.get("crop")
        if isinstance(backbone, LoadedCheckpoint):
            # It may have been changed since it was loaded, which its hash would not tell.
            loaded = replace(backbone, cacheable=False)
        else:
            loaded = from_module(backbone, image_size=size)
        reference = loaded.report.reference
        tensor = next(loaded.backbone.parameters(), None)
        if tensor is not None:
            # Somebody's own network stays where it is unless a device is asked for.
            groups[EngineSettings].setdefault("device", str(tensor.device))
    if isinstance(data, tuple):
        data = Data.from_datasets(*data)
    images = data if isinstance(data, Data) else None
    for name in ("output", "cache", "data_root", "test_labels"):
        for group in groups.values():
            if isinstance(group.get(name), str):
                group[name] = Path(group[name])
    run_settings = RunSettings(
        checkpoint=replace(CheckpointSettings(**groups[CheckpointSettings]), ckpt=reference),
        data=replace(DataSettings(**groups[DataSettings]), data=images.reference if images else str(data)),
        engine=EngineSettings(**groups[EngineSettings]),
        output=OutputSettings(**groups[OutputSettings]),
    )
    return runner.run(
        protocol,
        kind(kind.config_type(**own)),
        run_settings,
        asked=own,
        command=[Path(sys.argv[0]).name, f"ibot_eval.evaluate({reference!r}, {protocol!r})"],
        loaded=loaded,
        data=images,
    )


def split_settings(values: Mapping[str, Any], config_type: type) -> tuple[dict[type, dict[str, Any]], dict[str, Any]]:
    """Flat settings by name -> (those of each shared group, those of the protocol). Unknown names are errors."""
    kinds = (CheckpointSettings, DataSettings, EngineSettings, OutputSettings)
    own = {f.name for f in fields(config_type)}
    shared = {f.name: kind for kind in kinds for f in fields(kind)}
    groups: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
    mine: dict[str, Any] = {}
    for name, value in values.items():
        if name in own:
            mine[name] = value
        elif name in shared:
            groups[shared[name]][name] = value
        else:
            raise ConfigError(f"unknown setting {name!r}", todo=suggest(name, own | shared.keys()))
    return groups, mine
