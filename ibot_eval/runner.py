"""From a protocol, a checkpoint and data to a saved record."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibot_eval import distributed, provenance, published, registry
from ibot_eval.atoms import resolve
from ibot_eval.cache import BankCache
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.data.splits import Data, ImageSplit
from ibot_eval.data.transforms import EvalTransform, eval_transform
from ibot_eval.errors import ConfigError, DataError, UserError
from ibot_eval.extraction import ExtractionStats, extract_banks
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.interruption import Interrupted, terminated_as_exception
from ibot_eval.own_network import from_module
from ibot_eval.protocol import EvalProtocol, FrozenProtocol, Session
from ibot_eval.record import EvalRecord
from ibot_eval.recording import add_published, collect, describe_data, note_skipped, say
from ibot_eval.run_folder import new_run_folder
from ibot_eval.settings import CheckpointSettings, RunSettings


@dataclass
class _AtHand:
    """What a run may have been given, instead of making it from its settings."""

    loaded: LoadedCheckpoint | None
    data: Data | None
    cache: BankCache
    told: set[str] | None
    """Remarks about the checkpoint and the data that were printed before and need not be again."""


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
    cache: BankCache | None = None,
    told: set[str] | None = None,
    title: str | None = None,
) -> EvalRecord:
    """Runs ``protocol`` and saves its record, whatever the outcome.

    Args:
        name: the protocol's registered name.
        asked: names of protocol settings that the user gave by hand.
        command: what the user typed, for the record.
        loaded, data, cache: a network, images and feature banks that are already at hand, instead of those that
            ``settings`` names.
        told: remarks about the checkpoint and the data that were printed before and are not repeated; added to.
        title: what the record calls the run; by default the name of its folder.

    Raises:
        UserError, KeyboardInterrupt, Interrupted or any fault of the protocol, after the record has been saved with
        status "error" or "interrupted".
    """
    if not 0 <= settings.engine.seed < 1 << 63:
        raise ConfigError(f"the seed {settings.engine.seed} is out of range", where="--seed", todo="use 0 to 2^63 - 1")
    device = distributed.init(settings.engine.device)
    torch.manual_seed(settings.engine.seed)
    watch = provenance.Stopwatch()
    folder = Path(distributed.from_main(lambda: str(new_run_folder(name, settings, protocol.resumable))))
    record = EvalRecord(
        run=title or folder.name,
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
        with suppress(OSError):
            folder.rmdir()
        raise ConfigError(f"cannot write into {folder}: {error.strerror}", todo="choose another --output") from None
    stats: list[ExtractionStats] = []
    try:
        with terminated_as_exception():
            at_hand = _AtHand(loaded, data, cache or BankCache(settings.engine.cache), told)
            _fill(record, protocol, settings, folder, device, watch, frozenset(asked), at_hand, stats)
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
    at_hand: _AtHand,
    stats: list[ExtractionStats],
) -> None:
    cache = at_hand.cache
    with watch.phase("load"):
        loaded = at_hand.loaded or distributed.everywhere(
            lambda: load_any(settings.checkpoint, cache, settings.engine.seed)
        )
        loaded.backbone.to(device)
    record.checkpoint = loaded.report.as_dict()
    say(loaded.report.notes, at_hand.told)
    transform = eval_transform(settings.data, loaded.backbone)
    protocol = protocol.for_network(loaded.backbone, transform, asked)
    record.config.update(asdict(protocol.config))
    with watch.phase("data"):
        data = at_hand.data or distributed.everywhere(lambda: protocol.open(settings.data))
    record.data = describe_data(data, settings, transform)
    record.warnings += data.warnings
    say([f"warning: {w}" for w in data.warnings], at_hand.told)
    session = Session(
        device=device,
        output=folder,
        class_names=data.class_names,
        seed=settings.engine.seed,
        data=data,
        progress=distributed.is_main(),
        asked=asked,
        checkpoint=record.checkpoint,
        transform=transform,
        engine=settings.engine,
        data_settings=settings.data,
        loaded=loaded,
    )
    if isinstance(protocol, FrozenProtocol):
        protocol.check({role: len(split) for role, split in data.splits.items()}, session)
        requests, session.unavailable = available(protocol.features(), loaded)
        with watch.phase("extract"):
            banks, done = extract(requests, loaded, data, transform, cache, settings, device)
        stats.append(done)
        say([f"warning: {w}" for w in note_skipped(record, done.skipped)], at_hand.told)
        _check_labels(banks, data)
        events = protocol.score(banks, session)
    else:
        events = protocol.run(loaded.backbone, session)
    method = settings.output.method or published.FAMILY_METHODS.get(loaded.backbone.family)
    data_name = settings.output.data_name or data.data_name
    as_published = protocol.as_published() and loaded.report.key != "student"
    record.config.update(method=method, data_name=data_name)
    with watch.phase("score"):
        collect(record, events, folder)
    if as_published:
        add_published(record, protocol, data_name, method, loaded.backbone.architecture)


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
    return extract_union(requests, loaded, data.splits, transform, cache, settings, device)


def extract_union(
    requests: Sequence[FeatureRequest],
    loaded: LoadedCheckpoint,
    splits: Mapping[str, ImageSplit],
    transform: EvalTransform,
    cache: BankCache,
    settings: RunSettings,
    device: torch.device,
) -> tuple[dict[FeatureRequest, FeatureBank], ExtractionStats]:
    """As :func:`extract`, for requests of several protocols: these may well call one block by two names."""
    return extract_banks(
        requests,
        loaded,
        splits,
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


def available(
    requests: Iterable[FeatureRequest], loaded: LoadedCheckpoint
) -> tuple[list[FeatureRequest], dict[FeatureRequest, str]]:
    """The requests that the network can serve, and those optional ones that it cannot, with the reason.

    Raises:
        ConfigError: a request that is not optional and cannot be served.
    """
    usable, missing = [], {}
    for request in requests:
        try:
            resolve(request, loaded.backbone, loaded.projection_head)
        except ConfigError as error:
            if not request.optional:
                raise
            missing[request] = error.what
        else:
            usable.append(request)
    return usable, missing


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
