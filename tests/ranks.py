"""Functions in processes of their own, several of which may form one group, as torchrun would start them.

Processes are forked from a server that has imported torch once, since that takes seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.fakes", "ibot_eval.extraction", "pytest", "torch.distributed"])


@dataclass(frozen=True)
class Done:
    """A process that has ended."""

    code: int | None
    value: Any
    """What its function returned."""
    stdout: str
    stderr: str


class Running:
    """A process that calls ``function(*arguments)``, which lives at the top of a module and returns JSON values."""

    def __init__(self, function: Callable[..., Any], *arguments: object, **environment: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        os.environ["OMP_NUM_THREADS"], before = "1", os.environ.get("OMP_NUM_THREADS")
        try:
            forkserver.ensure_running()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        self.process: BaseProcess = _context.Process(
            target=_call, args=(self.folder.name, environment, function, arguments)
        )
        self.process.start()

    def done(self, timeout: float = 60) -> Done:
        """Waits for the end of it; a process that does not end is killed, and its exit code is -9."""
        self.process.join(timeout)
        self.process.kill()
        self.process.join()
        out, err, value = ((Path(self.folder.name) / name) for name in ("stdout", "stderr", "value"))
        result = json.loads(value.read_text()) if value.exists() else None
        texts = [path.read_text() if path.exists() else "" for path in (out, err)]
        self.folder.cleanup()
        return Done(self.process.exitcode, result, *texts)


def _call(folder: str, environment: dict[str, str], function: Callable[..., Any], arguments: Sequence[object]) -> None:
    os.environ.update(environment)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    try:
        value = function(*arguments)
    except BaseException:
        traceback.print_exc()
        raise
    Path(folder, "value").write_text(json.dumps(value))


def run_ranks(world: int, function: Callable[..., Any], *arguments: object, timeout: float = 60) -> list[Any]:
    """Calls ``function`` on each of ``world`` ranks: what they return, by rank. Fails if one fails or hangs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [Running(function, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(world)]
    done = [rank.done(timeout) for rank in ranks]
    for one in done:
        assert one.code == 0, one.stderr
    return [one.value for one in done]
