"""One process at a time writes a run that may be gone on with."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from ibot_eval import distributed
from ibot_eval.errors import ConfigError


def hold(folder: Path) -> FileLock:
    """Takes the run's folder for this process, or for this group of processes, until the lock is released or they end.

    A collective: rank 0 takes it for all, and every rank may release what it gets.

    Raises:
        ConfigError: on every rank, when another process has it, or the folder cannot be written.
    """
    lock = FileLock(folder / ".lock")
    distributed.from_main(lambda: _take(lock, folder))
    return lock


def _take(lock: FileLock, folder: Path) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process is writing the run {folder}", todo="wait for it or stop it, or choose another --name"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}", todo="choose another --output") from None
