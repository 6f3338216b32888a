"""The folder of a pre-training run: made, or found again and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.record import EvalRecord
from ibot_eval.run_folder import new_run_folder
from ibot_eval.settings import CheckpointSettings, OutputSettings, RunSettings
from ibot_eval.training.resuming import compare_settings
from pretrain.config import MAY_CHANGE, PretrainSettings
from pretrain.train import CHECKPOINTS

EFFECTIVE = "effective"
"""What the settings came to, in the record's config: learning rate, images per step, steps."""


def resumed(settings: PretrainSettings) -> tuple[PretrainSettings, EvalRecord | None]:
    """The settings with the folder of the run to resume filled in, and its record, where there is one to resume."""
    output = settings.output
    if output.resume == "never":
        return settings, None
    if output.resume == "auto":
        if output.name is None:
            raise ConfigError("--resume auto needs the --name of the run", todo="--name NAME, or --resume runs/NAME")
        folder = output.output / output.name
        if not folder.exists():
            return settings, None  # the first start of a job that is put back into its queue each time
    else:
        folder = Path(output.resume)
        if not folder.is_dir():
            raise ConfigError(f"there is no run to resume at {output.resume}", todo="--resume auto, or a run's folder")
        settings = replace(settings, output=replace(output, output=folder.parent, name=folder.name))
    saved = list((folder / CHECKPOINTS).glob("step_*.pt"))
    earlier = EvalRecord.load(folder) if (folder / "record.json").exists() else None
    if earlier is None and saved:
        return settings, EvalRecord(folder.name, "pretrain", 0)  # the record was lost; the checkpoint tells as much
    if earlier is None or earlier.protocol != "pretrain":
        raise ConfigError(f"{folder} is not a pre-training run", todo="choose another --name")
    if saved:
        # Here as well as beside the checkpoint, before anything is read or written.
        before = earlier.config | {"processes": earlier.environment.get("world_size")}
        now = settings.flat() | {"processes": distributed.world_size()}
        compare_settings(before, now, MAY_CHANGE | {EFFECTIVE})
    if not saved and output.resume != "auto":
        raise ConfigError(
            f"the run {folder} has no checkpoint to resume from", todo="start it anew under another --name"
        )
    return settings, earlier


def refuse_other_images(record: EvalRecord, earlier: EvalRecord) -> None:
    """Early and in plain words; the checkpoint knows the images' names as well."""
    splits = earlier.data.get("splits") or {}
    before, now = ((of.get("train") or {}).get("images") for of in (splits, record.data["splits"]))
    if before not in (None, now):
        raise ConfigError(
            f"the run to resume was started on {before:,} images, and there are {now:,} now",
            where=str(record.data["reference"]),
            todo="give the data it was started with, or start a new run",
        )


def new_folder(settings: PretrainSettings) -> Path:
    named = RunSettings(
        checkpoint=CheckpointSettings(ckpt=settings.network.arch),
        data=settings.data,
        output=OutputSettings(output=settings.output.output, name=settings.output.name),
    )
    try:
        return new_run_folder("pretrain", named)
    except ConfigError as error:
        if settings.output.name and (settings.output.output / settings.output.name / CHECKPOINTS).exists():
            raise ConfigError(error.what, todo="--resume auto continues it; or choose another --name") from None
        raise
