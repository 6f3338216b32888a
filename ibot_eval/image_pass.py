"""One pass over the images of a split: decoded, run through the network, reduced, and stored as shards."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.atoms import Atom, atomic_outputs
from ibot_eval.bank_writer import BankWriter, Shard
from ibot_eval.data.loading import explain_worker_death, image_loader
from ibot_eval.errors import DataError

if TYPE_CHECKING:
    from ibot_eval.checkpoint import LoadedCheckpoint
    from ibot_eval.data.splits import ImageSplit
    from ibot_eval.data.transforms import EvalTransform

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Engine:
    """How to compute."""

    loaded: LoadedCheckpoint
    transform: EvalTransform
    device: torch.device
    precision: Precision
    batch_size: int
    workers: int
    bad_images: Literal["stop", "skip"]
    progress: bool


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context of a forward pass in ``precision``."""
    return torch.autocast(device.type, _DTYPES.get(precision), enabled=precision != "fp32")


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Modules in evaluation mode; afterwards every part of them is in its own mode again."""
    training = [m for module in modules for m in module.modules() if m.training]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module in training:
            module.training = True


def make_shards(
    todo: Sequence[tuple[Shard, list[str]]],
    writers: Mapping[str, BankWriter],
    split: ImageSplit,
    engine: Engine,
    signal: Path,
) -> int:
    """Makes and stores this rank's shards; returns the number of images forwarded."""
    rank, world = distributed.rank(), distributed.world_size()
    mine = todo[rank::world]
    size = engine.batch_size
    batches = [
        (list(range(start, min(start + size, shard.stop))), keys)
        for shard, keys in mine
        for start in range(shard.start, shard.stop, size)
    ]
    if not batches:
        return 0
    atoms = {key: Atom(**writer.source["atom"]) for key, writer in writers.items()}
    done = len(split) - sum(shard.stop - shard.start for shard, _ in todo)
    count = 0
    with ExitStack() as stack:
        stack.enter_context(_raised_signal(signal))
        stack.enter_context(explain_worker_death())
        results = stack.enter_context(closing(_results(batches, atoms, split, engine)))
        bar = stack.enter_context(_bar(len(split), done, split.name, engine.progress and rank == 0))
        for shard, keys in mine:
            if signal.exists():
                break
            rows: dict[str, list[np.ndarray]] = {key: [] for key in keys}
            skipped: list[tuple[int, str]] = []
            for start in range(shard.start, shard.stop, size):
                batch = next(results)
                _check_finite(batch, atoms, split, engine.precision)
                skipped += batch.bad
                count += len(batch.indices)
                for key, values in batch.rows.items():
                    rows[key].append(values)
                # Rank 0 speaks for all: the other ranks' shares are as large as its own.
                bar.update(min((min(start + size, shard.stop) - start) * world, len(split) - bar.n))
            for key in keys:
                writers[key].put(shard, np.concatenate(rows[key]) if rows[key] else np.empty(0), skipped)
    return count


@contextmanager
def _raised_signal(signal: Path) -> Iterator[None]:
    """Leaves a file when this rank fails; the others look for it between shards, not to work for hours in vain."""
    try:
        yield
    except BaseException:
        if distributed.world_size() > 1:
            with suppress(OSError):
                signal.touch()
        raise


@dataclass(frozen=True)
class _Batch:
    """Rows of one batch, on the host."""

    indices: list[int]
    bad: list[tuple[int, str]]
    rows: dict[str, np.ndarray]


def _results(
    batches: Sequence[tuple[list[int], list[str]]], atoms: Mapping[str, Atom], split: ImageSplit, engine: Engine
) -> Generator[_Batch, None, None]:
    """The batches one after the other; on CUDA the next pass is under way while a batch is handed out."""
    device, loaded = engine.device, engine.loaded
    cuda = device.type == "cuda"
    loader = image_loader(
        split,
        engine.transform,
        [indices for indices, _ in batches],
        engine.workers,
        bad_images=engine.bad_images,
        pin_memory=cuda,
    )
    waiting = None
    modules = [m for m in (loaded.backbone, loaded.projection_head) if m is not None]
    for module in modules:
        module.to(device)
    with evaluating(*modules):
        for batch, (_, keys) in zip(loader, batches, strict=True):
            outputs: dict[str, Tensor] = {}
            if len(batch.indices):
                # Entered per batch: a generator would leave its caller in these modes.
                with torch.inference_mode(), autocast(device, engine.precision):
                    images = engine.transform.normalize(batch.images.to(device, non_blocking=True))
                    values = atomic_outputs(
                        loaded.backbone,
                        loaded.projection_head,
                        images,
                        [atoms[key] for key in keys],
                        batch.indices.tolist(),
                    )
                    outputs = {key: _to_host(values[atoms[key]], cuda) for key in keys}
            event = torch.cuda.Event() if cuda else None
            if event is not None:
                event.record()
            ready = (batch.indices.tolist(), list(batch.bad), outputs, event)
            if cuda:
                ready, waiting = waiting, ready
            if ready is not None:
                yield _received(*ready)
    if waiting is not None:
        yield _received(*waiting)


def _to_host(values: Tensor, cuda: bool) -> Tensor:
    if not cuda:
        # A copy in any case: a view of [CLS] would keep all tokens of the batch alive.
        return values.cpu().clone(memory_format=torch.contiguous_format)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _received(
    indices: list[int], bad: list[tuple[int, str]], outputs: Mapping[str, Tensor], event: torch.cuda.Event | None
) -> _Batch:
    if event is not None:
        event.synchronize()
    return _Batch(indices, bad, {key: values.numpy() for key, values in outputs.items()})


def _check_finite(batch: _Batch, atoms: Mapping[str, Atom], split: ImageSplit, precision: Precision) -> None:
    for key, rows in batch.rows.items():
        # head_argmax marks what it could not rank with -1.
        fine = rows >= 0 if rows.dtype.kind == "i" else np.isfinite(rows)
        if fine.all():
            continue
        bad = np.flatnonzero(~fine.reshape(len(rows), -1).all(axis=1))
        names = [split.image_ids[batch.indices[i]] for i in bad]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        atom = atoms[key]
        raise DataError(
            f"features of block {atom.block} ({atom.reducer}) are NaN or infinite for {shown}",
            where=f"split {split.name!r}, norm {atom.norm!r}, precision {precision}",
            todo="use --precision fp32"
            if precision == "fp16"
            else "check the checkpoint's weights (`ibot-eval inspect`); patches are stored as float16, up to 65504",
        )


def _bar(total: int, done: int, name: str, shown: bool) -> tqdm[Any]:
    return tqdm(
        total=total,
        initial=done,
        desc=f"features of {name}",
        unit="image",
        file=sys.stderr,
        disable=not shown,
        # A log file gets a line now and then instead of a redrawn bar.
        mininterval=0.2 if sys.stderr.isatty() else 30,
        smoothing=0.05,
        dynamic_ncols=True,
    )
