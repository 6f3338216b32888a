"""From a protocol, a checkpoint and data to a saved record."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibot_eval import distributed, provenance, published, registry
from ibot_eval.cache import BankCache
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import Data
from ibot_eval.data.transforms import EvalTransform, eval_transform
from ibot_eval.errors import ConfigError, DataError, UserError
from ibot_eval.extraction import ExtractionStats, extract_banks
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.own_network import from_module
from ibot_eval.protocol import Artifact, EvalProtocol, Event, FrozenProtocol, Metric, Predictions, Session, Warning
from ibot_eval.record import EvalRecord, save_predictions
from ibot_eval.run_folder import new_run_folder
from ibot_eval.settings import CheckpointSettings, RunSettings


class Interrupted(BaseException):
    """The process was asked to end (SIGTERM)."""


def with_defaults(settings: RunSettings) -> RunSettings:
    """Neither ``--ckpt`` nor ``--data``: the embedded demonstration. Only one of them is an error."""
    ckpt, data = settings.checkpoint.ckpt, settings.data.data
    if ckpt is None and data is None:
        return replace(
            settings,
            checkpoint=replace(settings.checkpoint, ckpt="demo"),
            data=replace(settings.data, data="demo"),
        )
    if ckpt is None:
        raise ConfigError("--data is given, but no --ckpt", todo="name a checkpoint, or `--ckpt demo`")
    if data is None:
        raise ConfigError("--ckpt is given, but no --data", todo="name a data set, or `--data demo`")
    return settings


def load_any(settings: CheckpointSettings, cache: BankCache, seed: int) -> LoadedCheckpoint:
    """The checkpoint that ``--ckpt`` names, plug-in backbones (``NAME:REST``) included."""
    reference = settings.ckpt or ""
    prefix, _, rest = reference.partition(":")
    if rest and prefix in registry.entries("backbones"):
        return from_module(registry.load("backbones", prefix)(rest), reference)
    return load_checkpoint(settings, sha256=cache.remembered_sha256, seed=seed)


def run(
    name: str,
    protocol: EvalProtocol[Any],
    settings: RunSettings,
    *,
    asked: Iterable[str] = (),
    command: list[str] | None = None,
    loaded: LoadedCheckpoint | None = None,
    data: Data | None = None,
) -> EvalRecord:
    """Runs ``protocol`` and saves its record, whatever the outcome.

    Args:
        name: the protocol's registered name.
        asked: names of protocol settings that the user gave by hand.
        command: what the user typed, for the record.
        loaded, data: a network and images that are already at hand, instead of those that ``settings`` names.

    Raises:
        UserError, KeyboardInterrupt, Interrupted or any fault of the protocol, after the record has been saved with
        status "error" or "interrupted".
    """
    if not 0 <= settings.engine.seed < 1 << 63:
        raise ConfigError(f"the seed {settings.engine.seed} is out of range", where="--seed", todo="use 0 to 2^63 - 1")
    device = distributed.init(settings.engine.device)
    torch.manual_seed(settings.engine.seed)
    watch = provenance.Stopwatch()
    folder = new_run_folder(name, settings) if distributed.is_main() else None
    folder = Path(distributed.broadcast_object(str(folder)))
    record = EvalRecord(
        run=folder.name,
        protocol=name,
        protocol_version=protocol.version,
        primary=protocol.primary,
        config={
            **{k: v for group in settings.groups() for k, v in asdict(group).items()},
            **asdict(protocol.config),
        },
        environment=provenance.environment(
            device,
            precision=settings.engine.precision,
            world_size=distributed.world_size(),
            seed=settings.engine.seed,
        ),
        timing={"started": watch.started},
        command=command if command is not None else provenance.command_line(),
    )
    record.checkpoint["reference"], record.data["reference"] = settings.checkpoint.ckpt, settings.data.data
    try:
        _save(record, folder)
    except OSError as error:
        folder.rmdir()
        raise ConfigError(f"cannot write into {folder}: {error.strerror}", todo="choose another --output") from None
    stats: list[ExtractionStats] = []
    try:
        with _terminated_as_exception():
            _fill(record, protocol, settings, folder, device, watch, frozenset(asked), loaded, data, stats)
        record.status = "success"
    except BaseException as error:
        record.status = "interrupted" if isinstance(error, (KeyboardInterrupt, Interrupted)) else "error"
        record.error = {"kind": type(error).__name__, "message": str(error) or record.status}
        if not isinstance(error, (UserError, KeyboardInterrupt, Interrupted)):
            record.error["traceback"] = "".join(traceback.format_exception(error))
        raise
    finally:
        record.timing = watch.as_dict(device, stats[0].images_per_second if stats else None)
        # Failing to write the record must not hide why the run failed.
        with suppress(OSError) if record.status != "success" else nullcontext():
            _save(record, folder)
    return record


def _save(record: EvalRecord, folder: Path) -> None:
    if distributed.is_main():
        record.save(folder)


def _fill(
    record: EvalRecord,
    protocol: EvalProtocol[Any],
    settings: RunSettings,
    folder: Path,
    device: torch.device,
    watch: provenance.Stopwatch,
    asked: frozenset[str],
    loaded: LoadedCheckpoint | None,
    data: Data | None,
    stats: list[ExtractionStats],
) -> None:
    cache = BankCache(settings.engine.cache)
    with watch.phase("load"):
        loaded = loaded or load_any(settings.checkpoint, cache, settings.engine.seed)
        loaded.backbone.to(device)
    record.checkpoint = loaded.report.as_dict()
    say(loaded.report.notes)
    roles = _roles(protocol)
    with watch.phase("data"):
        data = data or open_data(settings.data, roles=roles)
    transform = eval_transform(settings.data, loaded.backbone)
    record.data = describe_data(data, settings, transform)
    record.warnings += data.warnings
    say(f"warning: {w}" for w in data.warnings)
    session = Session(
        device=device,
        output=folder,
        class_names=data.class_names,
        seed=settings.engine.seed,
        data=data,
        progress=distributed.is_main(),
        asked=asked,
    )
    if isinstance(protocol, FrozenProtocol):
        protocol.check({role: len(split) for role, split in data.splits.items()}, session)
        requests = list(protocol.features())
        with watch.phase("extract"):
            banks, done = extract(requests, loaded, data, transform, cache, settings, device)
        stats.append(done)
        for role, skipped in done.skipped.items():
            if skipped:
                record.data["skipped_images"][role] = sorted(skipped)
                record.data["splits"][role]["images"] -= len(skipped)
                named = ", ".join(sorted(skipped)[:3]) + (", …" if len(skipped) > 3 else "")
                record.warnings.append(f"unreadable images of {role}, left out: {len(skipped)} ({named})")
                say([f"warning: {record.warnings[-1]}"])
        _check_labels(banks, data)
        events = protocol.score(banks, session)
    else:
        events = protocol.run(loaded.backbone, session)
    method = settings.output.method or published.FAMILY_METHODS.get(loaded.backbone.family)
    data_name = settings.output.data_name or data.data_name
    as_published = protocol.as_published() and loaded.report.key != "student"
    record.config.update(method=method, data_name=data_name)
    with watch.phase("score"):
        _collect(record, events, folder)
    if as_published:
        _add_published(record, protocol, data_name, method, loaded.backbone.architecture)


def extract(
    requests: list[FeatureRequest],
    loaded: LoadedCheckpoint,
    data: Data,
    transform: EvalTransform,
    cache: BankCache,
    settings: RunSettings,
    device: torch.device,
) -> tuple[dict[FeatureRequest, FeatureBank], ExtractionStats]:
    """The banks that ``requests`` name, from the cache or from one pass over the images.

    Raises:
        ConfigError: one block asked for under two names (11 and -1 of 12 blocks).
    """
    backbone = loaded.backbone
    blocks = {(r.split, r.reducer, backbone.resolve_block(r.block), r.norm) for r in requests}
    if len(blocks) < len(requests):
        raise ConfigError(
            f"--blocks names a block twice: {sorted({r.block for r in requests})} of {backbone.depth}",
            todo="name each block once; -1 is the last",
        )
    return extract_banks(
        requests,
        loaded,
        data.splits,
        transform,
        cache,
        device=device,
        precision=settings.engine.precision,
        batch_size=settings.engine.batch_size,
        workers=settings.engine.workers,
        bad_images=settings.data.bad_images,
        progress=distributed.is_main(),
        cacheable=loaded.cacheable,
    )


def describe_data(data: Data, settings: RunSettings, transform: EvalTransform) -> dict[str, Any]:
    """The record's ``data``."""
    return {
        "reference": settings.data.data or data.reference,
        "fingerprint": data.fingerprint,
        "splits": {
            role: {"name": data.split_names.get(role, role), "images": len(split), "fingerprint": split.fingerprint}
            for role, split in data.splits.items()
        },
        "classes": len(data.class_names),
        "class_to_idx": data.class_to_idx,
        "transform": transform.describe(),
        "skipped_images": {},
    }


def _collect(record: EvalRecord, events: Iterator[Event], folder: Path) -> None:
    for event in events:
        if isinstance(event, Metric):
            record.metrics.append({**asdict(event), "params": dict(event.params), "published": None})
        elif isinstance(event, Predictions):
            path = folder / "predictions.npz"
            if distributed.is_main():
                save_predictions(path, list(event.image_ids), event.values)
            record.artifacts.append({"path": path.name, "kind": "predictions"})
        elif isinstance(event, Artifact):
            inside = event.path.is_relative_to(folder)
            path = event.path.relative_to(folder) if inside else event.path
            record.artifacts.append({"path": path.as_posix(), "kind": event.kind})
        elif isinstance(event, Warning):
            record.warnings.append(event.message)
            say([f"warning: {event.message}"])
        else:
            raise TypeError(f"a protocol yields Metric, Predictions, Artifact or Warning, not {type(event).__name__}")


def _add_published(
    record: EvalRecord, protocol: EvalProtocol[Any], data: str | None, method: str | None, arch: str
) -> None:
    headline = protocol.headline(record.metrics)
    for metric in record.metrics:
        metric["published"] = published.lookup(
            record.protocol,
            metric["name"],
            data=data,
            method=method,
            arch=arch,
            params=metric["params"],
            headline=metric is headline or metric["name"] != protocol.primary,
        )


def _roles(protocol: EvalProtocol[Any]) -> tuple[str, ...]:
    if isinstance(protocol, FrozenProtocol):
        return tuple(sorted({request.split for request in protocol.features()}, reverse=True))
    return ("train", "test")


def _check_labels(banks: Mapping[FeatureRequest, FeatureBank], data: Data) -> None:
    for request, bank in banks.items():
        if not len(bank):
            raise DataError(
                f"no image of the {request.split} split ({data.split_names.get(request.split)}) can be used",
                where=data.reference,
            )
        if np.any(bank.labels < 0):
            raise DataError(
                f"the {request.split} split ({data.split_names.get(request.split)}) has images without a label",
                where=data.reference,
                todo="put images into a folder per class, or give --test-labels",
            )


def say(lines: Iterable[str]) -> None:
    if distributed.is_main():
        for line in lines:
            print(line, file=sys.stderr)


@contextmanager
def _terminated_as_exception() -> Iterator[None]:
    """SIGTERM as an exception, so that a run that is asked to end leaves a record. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: object) -> None:
        raise Interrupted(f"ended by signal {signal.Signals(number).name}")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
