"""A request to end (SIGTERM) as an exception, so that what was asked to end leaves a record."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """The process was asked to end (SIGTERM)."""


@contextmanager
def terminated_as_exception() -> Iterator[None]:
    """While the block runs, SIGTERM raises :class:`Interrupted`. Main thread only; elsewhere nothing changes."""
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
