"""A request to stop that lets a training loop end its step and save."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType

from ibot_eval import distributed

_SAME_KEYSTROKE = 1.0
"""Seconds."""


class StopRequest:
    """While the block runs, SIGTERM and a first Ctrl-C only set :attr:`requested`; a second Ctrl-C interrupts at once.

    One Ctrl-C may arrive twice, from the terminal and from torch's launcher, so a second one counts after a second.

    Outside of the main thread, where signals cannot be taken, nothing is ever requested. The handlers that were there
    come back when the block ends.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupted: float | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.received is not None

    def agreed(self) -> bool:
        """Whether any rank was asked to stop, the same answer on every rank. A collective: all ranks call it.

        Ranks get a signal at different steps, and one that stopped alone would leave the others waiting for it.
        """
        return any(distributed.gather_objects(self.requested))

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._interrupted is not None:
            if now - self._interrupted > _SAME_KEYSTROKE:
                raise KeyboardInterrupt
            return
        if number == signal.SIGINT:
            self._interrupted = now
        self.received = signal.Signals(number)
        if distributed.is_main():
            again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
            # Not print: the signal may have come in the middle of one.
            with suppress(OSError):
                os.write(2, f"\n{self.received.name}: stopping after this step{again}\n".encode())
