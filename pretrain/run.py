"""A pre-training run from its settings to its record: folder, data, resumption, record."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ibot_eval import distributed, provenance
from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import Data
from ibot_eval.data.transforms import eval_transform
from ibot_eval.errors import ConfigError, UserError
from ibot_eval.record import EvalRecord
from ibot_eval.run_folder import new_run_folder
from ibot_eval.settings import CheckpointSettings, OutputSettings, RunSettings
from ibot_eval.training.resuming import compare_settings
from pretrain import setup
from pretrain.config import MAY_CHANGE, PretrainSettings
from pretrain.consistency import check
from pretrain.networks import Network
from pretrain.probe import labelled_splits, teacher_knn
from pretrain.train import CHECKPOINTS, Outcome, train

VERSION = 1
"""Of pre-training as records know it; raised whenever the same settings may give other weights."""

UNITS: dict[str, tuple[str, bool | None]] = {
    "knn_top1": ("%", True),
    "nmi": ("%", True),
    "ari": ("%", True),
    "fmi": ("%", True),
    "agreement": ("%", True),
    "cls_loss": ("1", False),
    "patch_loss": ("1", False),
    "patch_loss_per_token": ("1", False),
    "teacher_entropy": ("1", None),
    "kl": ("1", None),
    "images_per_second": ("images/s", True),
    "mfu": ("%", True),
    "peak_memory_gb": ("GB", False),
    "effective_epochs": ("1", None),
}
"""What of the log goes into the record, with its unit and whether more is better. Losses, entropies and the KL are in
nats, which like epochs count as 1 in a record."""


def run(settings: PretrainSettings, command: list[str] | None = None) -> EvalRecord:
    """Pre-trains, and keeps a record whatever the outcome. Every rank calls it.

    Raises:
        UserError: a mistake in the settings or the data, a run that cannot be resumed, a loss that is not finite.
    """
    check(settings)
    if not 0 <= settings.engine.seed < 1 << 63:
        raise ConfigError(f"--seed {settings.engine.seed} is out of range", todo="use 0 to 2^63 - 1")
    device = distributed.init(settings.engine.device)
    precision = setup.precision_of(settings, device)
    settings, resume = distributed.from_main(lambda: _resumed(settings))
    watch = provenance.Stopwatch()
    with watch.phase("data"):
        data = _open(settings)
    evaluate = _evaluation(settings, data, device, precision)
    folder = settings.output.output / settings.output.name if resume and settings.output.name else None
    folder = folder or Path(distributed.from_main(lambda: str(_new_folder(settings))))
    record = EvalRecord(
        run=folder.name,
        protocol="pretrain",
        protocol_version=VERSION,
        primary="knn_top1" if settings.output.knn_every else "cls_loss",
        config=settings.flat(),
        environment=provenance.environment(
            device, precision=precision, world_size=distributed.world_size(), seed=settings.engine.seed
        ),
        timing={"started": watch.started},
        command=command if command is not None else provenance.command_line(),
    )
    record.data = _described(data, settings)
    record.warnings += data.warnings
    if resume:
        distributed.from_main(lambda: _refuse_other_images(record, folder))
    _save(record, folder)
    try:
        with watch.phase("training"):
            outcome = train(settings, data, folder, device, resume=resume, say=_teller(record), evaluate=evaluate)
        _fill(record, outcome, folder)
    except BaseException as error:
        record.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        record.error = {"kind": type(error).__name__, "message": str(error) or record.status}
        if not isinstance(error, (UserError, KeyboardInterrupt)):
            record.error["traceback"] = "".join(traceback.format_exception(error))
        raise
    finally:
        record.timing = watch.as_dict(device)
        # Failing to write the record must not hide why the run failed.
        with suppress(OSError) if record.status != "success" else nullcontext():
            _save(record, folder)
    return record


def _resumed(settings: PretrainSettings) -> tuple[PretrainSettings, bool]:
    """The settings with the folder of the run to resume filled in, and whether there is one."""
    output = settings.output
    if output.resume == "never":
        return settings, False
    if output.resume == "auto":
        if output.name is None:
            raise ConfigError("--resume auto needs the --name of the run", todo="--name NAME, or --resume runs/NAME")
        folder = output.output / output.name
        if not folder.exists():
            return settings, False
    else:
        folder = Path(output.resume)
        if not folder.is_dir():
            raise ConfigError(f"there is no run to resume at {output.resume}", todo="--resume auto, or a run's folder")
        settings = replace(settings, output=replace(output, output=folder.parent, name=folder.name))
    saved = list((folder / CHECKPOINTS).glob("step_*.pt"))
    if (folder / "record.json").exists():
        earlier = EvalRecord.load(folder)
        if earlier.protocol != "pretrain":
            raise ConfigError(f"{folder} is not a pre-training run", todo="choose another --name")
        if saved:
            # Here as well as beside the checkpoint, since the record is about to be written anew.
            before = earlier.config | {"processes": earlier.environment.get("world_size")}
            compare_settings(before, settings.flat() | {"processes": distributed.world_size()}, MAY_CHANGE)
    if not saved and output.resume != "auto":
        raise ConfigError(
            f"the run {folder} has no checkpoint to resume from", todo="start it anew under another --name"
        )
    return settings, True


def _refuse_other_images(record: EvalRecord, folder: Path) -> None:
    """Before the record of the run is written anew; the checkpoint knows the images' names as well."""
    if not (folder / "record.json").exists() or not list((folder / CHECKPOINTS).glob("step_*.pt")):
        return
    splits = EvalRecord.load(folder).data.get("splits") or {}
    before, now = ((of.get("train") or {}).get("images") for of in (splits, record.data["splits"]))
    if before not in (None, now):
        raise ConfigError(
            f"the run to resume was started on {before:,} images, and there are {now:,} now",
            where=str(record.data["reference"]),
            todo="give the data it was started with, or start a new run",
        )


def _new_folder(settings: PretrainSettings) -> Path:
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


def _open(settings: PretrainSettings) -> Data:
    if settings.data.data is None:
        raise ConfigError(
            "no data to train on",
            todo="--data FOLDER (with train/ inside, or --train-split .), or --recipe pretrain/digits for a first try",
        )
    roles = ("train", "test") if settings.output.knn_every else ("train",)
    return open_data(settings.data, roles=roles, labelled=False)


def _evaluation(
    settings: PretrainSettings, data: Data, device: torch.device, precision: str
) -> Callable[[Network], dict[str, float]] | None:
    """k-NN of the teacher, its settings checked now rather than after the first epochs."""
    if not settings.output.knn_every:
        return None
    labelled_splits(data, settings.output.knn_per_class)
    side = settings.crops.global_size
    # Unless asked otherwise, what 256 is to 224.
    images = replace(
        settings.data,
        crop=settings.data.crop or side,
        resize=settings.data.resize or (side if settings.data.data == "demo" else round(side * 256 / 224)),
    )

    def evaluate(teacher: Network) -> dict[str, float]:
        return teacher_knn(
            teacher.backbone,
            data,
            device=device,
            transform=eval_transform(images, teacher.backbone),
            batch_size=settings.optimiser.batch_size,
            workers=setup.workers_of(settings, device),
            per_class=settings.output.knn_per_class,
            autocast=torch.bfloat16 if precision == "bf16" else None,
        )

    return evaluate


def _described(data: Data, settings: PretrainSettings) -> dict[str, Any]:
    splits = {
        role: {"name": data.split_names.get(role, role), "images": len(split), "fingerprint": split.fingerprint}
        for role, split in data.splits.items()
    }
    return {
        "reference": settings.data.data,
        "fingerprint": data.fingerprint,
        "splits": splits,
        "classes": len(data.class_names),
        "skipped_images": {},
    }


def _fill(record: EvalRecord, outcome: Outcome, folder: Path) -> None:
    record.status = "success" if outcome.finished else "interrupted"
    if not outcome.finished:
        kind = "Interrupted" if outcome.stopped else "Stopped"
        record.error = {"kind": kind, "message": f"stopped after step {outcome.steps}; --resume {folder} goes on"}
    found = {name: outcome.last[name] for name in UNITS if outcome.last.get(name) is not None}
    for name, value in {**found, "hours": outcome.seconds / 3600}.items():
        unit, more_is_better = UNITS.get(name, ("h", False))
        record.metrics.append(
            {
                "name": name,
                "value": value,
                "unit": unit,
                **({} if more_is_better is None else {"higher_is_better": more_is_better}),
                "params": {"step": outcome.steps},
                "n": None,
                "interval": None,
                "published": None,
            }
        )
    for name in ("teacher.safetensors", "student.safetensors"):
        if (folder / name).exists():
            record.artifacts.append({"path": name, "kind": "checkpoint"})
    record.artifacts.append({"path": "log.jsonl", "kind": "log"})


def _teller(record: EvalRecord) -> Callable[[str], None]:
    def say(text: str) -> None:
        record.warnings.append(text)
        if distributed.is_main():
            print(f"\n{text}" if text.startswith("alarm") else text, file=sys.stderr)

    return say


def _save(record: EvalRecord, folder: Path) -> None:
    if distributed.is_main():
        record.save(folder)
