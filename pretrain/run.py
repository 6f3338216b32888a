"""A pre-training run from its settings to its record: folder, data, resumption, record."""

from __future__ import annotations

import signal
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
from ibot_eval.errors import ConfigError, DataError, UserError
from ibot_eval.record import EvalRecord
from ibot_eval.training.holding import hold
from pretrain import setup
from pretrain.config import PretrainSettings
from pretrain.consistency import check
from pretrain.folder import EFFECTIVE, new_folder, refuse_other_images, resumed
from pretrain.networks import Network
from pretrain.probe import labelled_splits, teacher_knn
from pretrain.train import REPLACED, Outcome, train
from pretrain.views import rank_error

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
    setup.augmentation_of(settings)
    setup.masking_of(settings)
    settings, earlier = distributed.from_main(lambda: resumed(settings))
    watch = provenance.Stopwatch()
    with watch.phase("data"):
        data = _open(settings)
    evaluate = _evaluation(settings, data, device, precision)
    resume = earlier is not None
    folder = settings.output.output / settings.output.name if resume and settings.output.name else None
    folder = folder or Path(distributed.from_main(lambda: str(new_folder(settings))))
    lock = hold(folder)
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
    started = False

    def ready(effective: dict[str, Any]) -> None:
        # Only now, so that a run that cannot be resumed keeps the record that it has.
        nonlocal started
        started = True
        record.config |= {EFFECTIVE: effective}
        _save(record, folder)

    if earlier is None:
        _save(record, folder)
    else:
        refuse_other_images(record, earlier)
        # The images that were replaced are counted over the whole run, and told at its end.
        kept = [text for text in earlier.warnings if REPLACED not in text]
        record.warnings = list(dict.fromkeys(kept + record.warnings))
    try:
        with watch.phase("training"):
            say = _teller(record)
            outcome = train(settings, data, folder, device, resume=resume, say=say, evaluate=evaluate, ready=ready)
        _fill(record, outcome, folder)
    except BaseException as caught:
        error = _first_error(caught, folder)
        record.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        record.error = {"kind": type(error).__name__, "message": str(error) or record.status}
        if not isinstance(error, (UserError, KeyboardInterrupt)):
            record.error["traceback"] = "".join(traceback.format_exception(error))
        if error is not caught:
            raise error from caught
        raise
    finally:
        speed = next((metric["value"] for metric in record.metrics if metric["name"] == "images_per_second"), None)
        record.timing = watch.as_dict(device, speed)
        # Failing to write the record must not hide why the run failed.
        with suppress(OSError) if record.status != "success" else nullcontext():
            if started or not resume:
                _save(record, folder)
        lock.release()
    return record


def _first_error(error: BaseException, folder: Path) -> BaseException:
    """What ended the run: ``error``, unless it only says that another rank has gone, and that rank left a word."""
    if isinstance(error, UserError):
        return error
    for rank in range(1, distributed.world_size()):
        path = rank_error(folder, rank)
        if path.exists():
            text = path.read_text(encoding="utf-8")
            path.unlink()
            return DataError(f"rank {rank}: {text}")
    return error


def _open(settings: PretrainSettings) -> Data:
    if settings.data.data is None:
        raise ConfigError(
            "no data to train on",
            todo="--data FOLDER (with train/ inside, or --train-split .), or --recipe pretrain/digits for a first try",
        )
    if not settings.output.knn_every:
        return open_data(settings.data, roles=("train",), labelled=False)
    try:
        return open_data(settings.data, labelled=False)
    except DataError as error:
        todo = f"{error.todo}; or leave out the k-NN evaluation, which needs a test split (--knn-every 0)"
        raise DataError(error.what, where=error.where, todo=todo.removeprefix("None; or ")) from error


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
        kind = "Stopped" if outcome.signal is None else signal.Signals(outcome.signal).name
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


def _teller(record: EvalRecord) -> Callable[..., None]:
    def say(text: str, *, warning: bool = False) -> None:
        if warning:
            record.warnings.append(text)
        if distributed.is_main():
            print(f"\n{text}" if text.startswith("alarm") else text, file=sys.stderr)

    return say


def _save(record: EvalRecord, folder: Path) -> None:
    if distributed.is_main():
        record.save(folder)
