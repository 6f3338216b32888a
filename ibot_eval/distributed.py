"""One process or many: the same code, with exact collectives that do nothing in one process.

Every function but :func:`init` is a collective when several processes run: all ranks call it, in the same order.
Collectives work on the CPU (gloo) unless the tensor lies on a CUDA device.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ibot_eval.errors import ConfigError

T = TypeVar("T")

# A rank may wait for hours at a barrier, e.g. while another command extracts the same features. Ranks that die are
# noticed through their closed connections, not through this limit.
_TIMEOUT = timedelta(days=7)


def init(device: str = "auto") -> torch.device:
    """Joins the other processes that torchrun (or anything that sets its variables) started, and picks the device.

    Plain ``python`` works as well: one process, nothing to join. Calling it again only picks the device.

    Args:
        device: auto (CUDA if there is one, else MPS, else CPU), cpu, cuda, cuda:N or mps. Each process of a machine
            takes its own CUDA device.

    Raises:
        ConfigError: a device that does not exist or is not there, fewer GPUs than processes, or an incomplete
            environment.
    """
    world, local = _environment()
    chosen = _device(device, world, local)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not dist.is_initialized():
        # The CPU group is there in any case: objects, errors and banks go through it.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
    return chosen


def shutdown() -> None:
    """Leaves the group; harmless when there is none."""
    if _joined():
        dist.destroy_process_group()


def rank() -> int:
    """Index of this process, 0 in one process."""
    return dist.get_rank() if _joined() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if _joined() else 1


def local_world_size() -> int:
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) if _joined() else 1


def is_main() -> bool:
    """Whether this is the process that prints and writes."""
    return rank() == 0


def barrier() -> None:
    """Returns once every rank is here."""
    gather_objects(None)


def gather_objects(value: T) -> list[T]:
    """Every rank's (picklable) value, by rank, on every rank."""
    if not _joined():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's (picklable) value, on every rank."""
    if not _joined():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def agree(error: BaseException | None) -> None:
    """Ends a step that may fail on some ranks: if any rank brings an error, every rank raises the first by rank.

    Without it the others would wait for ever at their next collective.
    """
    errors = gather_objects(_portable(error) if _joined() else error)
    first = next((r for r, e in enumerate(errors) if e is not None), None)
    if first is None:
        return
    # The rank that it happened on raises the original, which still has its traceback.
    raised = error if first == rank() else errors[first]
    assert raised is not None
    raise raised


def from_main(function: Callable[[], T]) -> T:
    """Rank 0 calls ``function``; every rank gets its result, or raises its error."""
    result, error = None, None
    if is_main():
        try:
            result = function()
        except BaseException as caught:  # noqa: BLE001 - raised again by agree, on every rank
            error = caught
    agree(error)
    return broadcast_object(result)  # type: ignore[return-value]


def everywhere(function: Callable[[], T]) -> T:
    """Every rank calls ``function`` and gets its own result; if it fails on any rank, all raise the first error."""
    result, error = None, None
    try:
        result = function()
    except BaseException as caught:  # noqa: BLE001 - raised again by agree, on every rank
        error = caught
    agree(error)
    return result  # type: ignore[return-value]


@contextmanager
def main_first() -> Iterator[None]:
    """Rank 0 runs the block, then the others do (downloads, for example). An error of any rank reaches all."""
    if not is_main():
        agree(None)
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:  # noqa: BLE001 - raised again by agree, on every rank
        error = caught
    if is_main():
        agree(error)
        error = None
    agree(error)


def gather_rows(rows: Tensor, indices: Tensor, total: int) -> Tensor:
    """Rows that ranks computed in any order, as one tensor in index order: nothing padded, nothing counted twice.

    Args:
        rows: (m, …) this rank's rows; m may be 0 and may differ between ranks (dtype and trailing shape of an empty
            contribution do not matter).
        indices: (m,) integer position of each row in the result.
        total: number of rows of the result.

    Returns:
        (total, …) on every rank, on the device of ``rows``, bit for bit what the ranks gave.

    Raises:
        ValueError: on every rank, when the indices are not 0 … total - 1 with each exactly once, or when ranks
            disagree about dtype or shape.
    """
    mine = (len(rows), rows.dtype, tuple(rows.shape[1:]), len(indices))
    layout = gather_objects(mine)
    for r, (m, _, _, k) in enumerate(layout):
        if m != k:
            raise ValueError(f"rank {r} gave {m} rows with {k} indices")
    kinds = {(dtype, shape) for m, dtype, shape, _ in layout if m}
    if len(kinds) > 1:
        raise ValueError(f"ranks gave rows of different kinds: {sorted(map(str, kinds))}")
    dtype, shape = kinds.pop() if kinds else layout[0][1:3]
    counts = [m for m, *_ in layout]

    where = torch.cat(_gather_uneven(indices.to(rows.device, torch.int64), counts))
    outside = where[(where < 0) | (where >= total)]
    if len(outside):
        raise ValueError(f"index {int(outside[0])} is outside of 0 … {total - 1}")
    seen = torch.bincount(where.cpu(), minlength=total)
    wrong = torch.nonzero(seen != 1).flatten()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"{len(wrong)} of {total} rows are missing or double; the first is {i}, given {seen[i]} times")

    result = torch.empty((total, *shape), dtype=dtype, device=rows.device)
    # As bytes, so that the dtype cannot matter to the backend and the copy is exact.
    width = result[:1].numel() * result.element_size() if total else 0
    if width == 0:
        return result
    own = rows.detach().to(dtype).reshape(len(rows), *shape).contiguous()
    parts = _gather_uneven(own.view(-1).view(torch.uint8).view(len(rows), width), counts)
    result.view(-1).view(torch.uint8).view(total, width)[where] = torch.cat(parts)
    return result


def _gather_uneven(rows: Tensor, counts: list[int]) -> list[Tensor]:
    """(m, …) of every rank, m = counts[rank]. Backends gather equal sizes only, so rows travel padded."""
    if not _joined():
        return [rows]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _portable(error: BaseException | None) -> BaseException | None:
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # noqa: BLE001 - an exception class may refuse in any way
        return RuntimeError(f"{type(error).__name__}: {error}")


def _environment() -> tuple[int, int]:
    """(number of processes, index of this one on its machine), from the variables that torchrun sets."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    # Schedulers and other tools leave single ones of these behind; a rank in a world is what counts.
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 1, 0
    try:
        index, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", 0 if world == 1 else ""))
    except ValueError as error:
        found = ", ".join(f"{n}={os.environ[n]}" for n in names if n in os.environ)
        raise ConfigError(
            "the variables that tell this process its rank are incomplete",
            where=found,
            todo="start with torchrun or --launch local:N, or unset RANK and WORLD_SIZE for one process",
        ) from error
    missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if not 0 <= index < world or (world > 1 and missing):
        raise ConfigError(
            f"rank {index} of {world} processes" + (f", without {' and '.join(missing)}" if missing else ""),
            where="environment variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
            todo="start with torchrun or --launch local:N, or unset RANK and WORLD_SIZE for one process",
        )
    return world, local


def _device(name: str, world: int, local: int) -> torch.device:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ConfigError(f"unknown device {name!r}", todo="use --device auto, cpu, cuda, cuda:N or mps")
    if (kind == "cuda" and not cuda) or (kind == "mps" and not mps):
        raise ConfigError(
            f"--device {name} was asked for, but torch {torch.__version__} sees no such device here",
            todo="use --device auto or cpu; `ibot-eval doctor` shows what is installed",
        )
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if index and world > 1:
        raise ConfigError(
            f"--device {name} would put {world} processes on one GPU", todo="use --device cuda: each takes its own"
        )
    chosen = int(index) if index else local
    if chosen >= count:
        raise ConfigError(
            f"there is no GPU {chosen} on this machine: it has {count}",
            todo=f"start at most {count} processes per machine, or use --device cpu"
            if world > 1
            else f"use --device cuda:0 to cuda:{count - 1}",
        )
    return torch.device("cuda", chosen)
