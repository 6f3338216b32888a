"""From requests to feature banks: what the cache holds is reused, the rest takes one pass over the images.

The images of a split are cut into shards that do not depend on the number of ranks. Each rank makes its share and
stores it, so the banks are in index order, exact and the same for any number of ranks; after a kill the finished
shards are still there.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ibot_eval import distributed, provenance
from ibot_eval.atoms import Atom, resolve, row_bytes
from ibot_eval.bank_writer import Shard, shards
from ibot_eval.cache import BankCache, bank_key, temporary_folder
from ibot_eval.errors import CacheError, ConfigError, DataError
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.image_pass import Engine, Precision, make_shards

if TYPE_CHECKING:
    import tempfile

    from ibot_eval.checkpoint import LoadedCheckpoint
    from ibot_eval.data.splits import ImageSplit
    from ibot_eval.data.transforms import EvalTransform

EXTRACTOR_VERSION = 2
"""Raised whenever features may come out differently."""


@dataclass
class ExtractionStats:
    """What an extraction did, over all ranks."""

    images: int = 0
    """Images that went through the backbone."""
    seconds: float = 0.0
    """Wall time of everything, waiting for other processes included."""
    images_per_second: float | None = None
    """Over the passes alone; None when there was nothing to do."""
    reused: int = 0
    """Banks that were in the cache, or that another process made while this one waited for it."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Split -> ids of the images that could not be decoded and are left out of its banks."""
    peak_memory: float = 0.0
    """GB, of the rank that took most (see ``provenance.peak_memory``)."""


def check_loading(batch_size: int, workers: int | None) -> None:
    """Raises ConfigError for batches of no images, or fewer than no loading processes."""
    if batch_size < 1 or (workers is not None and workers < 0):
        given = f"--batch-size {batch_size}" if batch_size < 1 else f"--workers {workers}"
        raise ConfigError(f"{given}: at least 1 image a batch and 0 workers are needed")


def default_workers(device: torch.device) -> int:
    """Data-loading processes per process: the cores that are this process's share, at most 8; 1 on the CPU.

    On the CPU the network wants the cores itself, and one loading process keeps it fed
    (tests/benchmarks/bench_extraction.py).
    """
    if device.type == "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // distributed.local_world_size()))


def extract_banks(
    requests: Sequence[FeatureRequest],
    loaded: LoadedCheckpoint,
    splits: Mapping[str, ImageSplit],
    transform: EvalTransform,
    cache: BankCache,
    *,
    device: torch.device,
    precision: Precision = "fp32",
    batch_size: int = 64,
    workers: int | None = None,
    bad_images: Literal["stop", "skip"] = "stop",
    progress: bool = True,
    cacheable: bool = True,
) -> tuple[dict[FeatureRequest, FeatureBank], ExtractionStats]:
    """The banks that ``requests`` name. A collective: every rank calls it and gets the same memory-mapped banks.

    Args:
        requests: of any number of protocols; the same output asked for twice is computed once.
        loaded: the checkpoint; its backbone and projection head are moved to ``device``.
        splits: by the names that requests use.
        transform: of all images.
        batch_size: images per pass and process.
        workers: data-loading processes per process, 0 for none; see :func:`default_workers`.
        bad_images: whether an image that cannot be decoded stops the extraction or is left out.
        progress: whether to show a bar on stderr.
        cacheable: False for a network whose code no hash covers (a module of the user's own): its banks live in a
            temporary folder and are gone when they are no longer used.

    Raises:
        ConfigError: a request that the network or the data cannot serve, or ranks that were given different things.
        DataError: an unreadable image with bad_images "stop" (BadImage), or features that are not finite.
        CacheError: a full disk, or a bank that does not match its manifest.
    """
    check_loading(batch_size, workers)
    begin = time.perf_counter()
    workers = default_workers(device) if workers is None else workers
    engine = Engine(loaded, transform, device, precision, batch_size, workers, bad_images, progress)
    wanted = distributed.everywhere(lambda: {request: _source(request, engine, splits) for request in requests})
    _check_same(list(wanted.values()))
    stats = ExtractionStats()
    banks: dict[FeatureRequest, FeatureBank] = {}
    passes = 0.0
    with ExitStack() as stack:
        if not cacheable:
            # On POSIX systems a mapped file lives on without its name until the last bank that maps it is gone.
            cache = BankCache(stack.enter_context(shared_temporary_folder()))
        for name in dict.fromkeys(request.split for request in requests):
            sources = {bank_key(s): s for r, s in wanted.items() if r.split == name}
            found, count, seconds = _complete(sources, splits[name], cache, engine)
            stats.reused += found
            stats.images += count
            passes += seconds
            # Every rank has mapped its banks when this returns; only then may a temporary folder go.
            opened = distributed.everywhere(
                lambda name=name, sources=sources: {key: _open(key, cache, splits[name], bad_images) for key in sources}
            )
            stats.skipped[name] = _skipped(name, list(opened.values()))
            banks |= {r: opened[bank_key(s)] for r, s in wanted.items() if r.split == name}
    stats.seconds = time.perf_counter() - begin
    stats.images_per_second = stats.images / passes if stats.images else None
    stats.peak_memory = max(distributed.gather_objects(provenance.peak_memory(device)))
    return banks, stats


def _source(request: FeatureRequest, engine: Engine, splits: Mapping[str, ImageSplit]) -> dict[str, Any]:
    """Everything that the numbers of a bank depend on; its hash is the bank's key."""
    if request.split not in splits:
        raise ConfigError(
            f"features of split {request.split!r} are asked for, and the data has {', '.join(splits) or 'none'}",
            todo="choose data with that split, or name it with --train-split or --test-split",
        )
    loaded, split = engine.loaded, splits[request.split]
    atom = resolve(request, loaded.backbone, loaded.projection_head)
    return {
        "checkpoint": {
            "sha256": loaded.report.sha256,
            "key": loaded.report.key,
            "overrides": dict(loaded.report.overrides),
            "identity": getattr(loaded.report, "identity", {}),
            "pos_embed_resize": str(getattr(loaded.backbone, "resize", None)),
        },
        "atom": {"block": atom.block, "norm": atom.norm, "reducer": atom.reducer},
        "transform": engine.transform.describe(),
        "fingerprint": split.fingerprint,
        "split": split.name,
        "precision": engine.precision,
        "extractor": EXTRACTOR_VERSION,
    }


def _check_same(sources: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError on every rank unless all ranks have the same sources: each makes a part of every bank."""
    views = distributed.gather_objects(sources)
    for other, view in enumerate(views):
        if view != views[0]:
            pairs = zip(views[0], view, strict=False)
            parts = sorted({part for a, b in pairs for part in a.keys() | b.keys() if a.get(part) != b.get(part)})
            raise ConfigError(
                f"rank {other} differs from rank 0 in {', '.join(parts) or 'requests'}, so their features cannot be "
                "one bank",
                todo="give all ranks the same settings and files; where each machine has its own copy of the images, "
                "use --fingerprint content, which does not look at the files' times",
            )


def _complete(
    sources: Mapping[str, Mapping[str, Any]], split: ImageSplit, cache: BankCache, engine: Engine
) -> tuple[int, int, float]:
    """Sees to it that the banks ``sources`` are in the cache: (banks found, images forwarded, seconds of the pass)."""

    def absent(keys: Sequence[str]) -> list[str]:
        return [key for key in keys if cache.open(key) is None]

    missing = distributed.from_main(lambda: absent(list(sources)))
    if not missing:
        return len(sources), 0, 0.0
    about = {
        "checkpoint": str(getattr(engine.loaded.report, "reference", None) or ""),
        "data": split.source or split.name,
    }
    writers = {key: cache.writer(key, sources[key], about) for key in missing}
    atoms = [Atom(**source["atom"]) for source in sources.values()]
    size = sum(row_bytes(atom, engine.loaded.backbone, engine.transform.crop) for atom in atoms)
    parts = shards(len(split), engine.batch_size, size)
    with ExitStack() as held:

        def plan() -> tuple[list[str], list[tuple[Shard, list[str]]], str]:
            held.enter_context(cache.lock(missing))
            # Whoever held the lock before may have made them.
            still = absent(missing)
            for key in still:
                writers[key].begin()
            lacking = {
                part: [k for k in still if not writers[k].has(part, allow_skipped=engine.bad_images == "skip")]
                for part in parts
            }
            return still, [(part, keys) for part, keys in lacking.items() if keys], secrets.token_hex(8)

        still, todo, token = distributed.from_main(plan)
        if not still:
            return len(sources), 0, 0.0
        begin = time.perf_counter()
        signal = writers[still[0]].partial / f"failed-{token}"
        count = distributed.everywhere(lambda: make_shards(todo, writers, split, engine, signal))
        seconds = time.perf_counter() - begin

        def finish() -> None:
            for key in still:
                writers[key].finish(parts, split.labels, split.image_ids)

        distributed.from_main(finish)
    return len(sources) - len(still), sum(distributed.gather_objects(count)), seconds


def _open(key: str, cache: BankCache, split: ImageSplit, bad_images: Literal["stop", "skip"]) -> FeatureBank:
    bank = cache.open(key)
    if bank is None and distributed.is_main():
        raise CacheError(
            f"feature bank {key[:12]} was removed while this run was about to read it",
            where=str(cache.root),
            todo="run again, without `ibot-eval cache rm` at the same time",
        )
    if bank is None:
        raise CacheError(
            f"feature bank {key[:12]} is not there on rank {distributed.rank()}",
            where=str(cache.root),
            todo="all ranks must see the same cache folder: choose one on a shared disk with --cache; if "
            "`ibot-eval cache rm` ran just now, run again",
        )
    skipped = [name for name, _ in bank.manifest["skipped"]]
    if len(bank) + len(skipped) != len(split):
        raise CacheError(
            f"feature bank {key[:12]} holds {len(bank)} images, and the split {len(split)}",
            where=str(cache.root),
            todo=f"remove it with {cache.removal(key)}; the next run extracts it again",
        )
    if skipped and bad_images == "stop":
        shown = ", ".join(skipped[:5]) + (f" and {len(skipped) - 5} more" if len(skipped) > 5 else "")
        raise DataError(
            f"{len(skipped)} images of split {split.name!r} cannot be decoded: {shown}",
            where=f"{bank.manifest['skipped'][0][1]} (noted in the cached bank {key[:12]})",
            todo="repair or remove them, or leave them out with --bad-images skip",
        )
    return bank


def _skipped(name: str, banks: Sequence[FeatureBank]) -> list[str]:
    """What the banks of a split leave out, which must be the same for all of them."""
    lists = {tuple(image for image, _ in bank.manifest["skipped"]): bank for bank in banks}
    if len(lists) > 1:
        keys = " ".join(bank.manifest["key"][:12] for bank in lists.values())
        raise CacheError(
            f"cached feature banks of {name} leave out different images, so they cannot be used together",
            todo=f"remove them with `ibot-eval cache rm {keys}`; the next run extracts them again",
        )
    return list(next(iter(lists)))


@contextmanager
def shared_temporary_folder() -> Iterator[Path]:
    """A temporary folder that all ranks see, for banks that must not be kept. A collective at its beginning."""
    made: list[tempfile.TemporaryDirectory[str]] = []

    def make() -> str:
        made.append(temporary_folder())
        return made[0].name

    path = distributed.from_main(make)
    try:
        yield Path(path)
    finally:
        for folder in made:
            folder.cleanup()
