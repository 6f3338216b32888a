"""Processes that ``--launch`` started end when their launcher is gone, and loading processes with the run they serve.

Whoever is killed outright (SIGKILL, or by the kernel for want of memory) cannot end its processes. Those of a launcher,
which have sessions of their own, would wait for one another, or go on writing into a run that is meanwhile begun again;
loading processes would wait for ever for someone to take their batch, since each keeps the others' pipe open.
"""

from __future__ import annotations

import os
import threading
import time

LAUNCHER = "IBOT_EVAL_LAUNCHER"
"""Environment variable with the launcher's process number."""
LOOK_EVERY = 0.5
"""Seconds."""


def end_with_launcher() -> None:
    """Ends this process at once when the launcher that started it no longer runs; does nothing without one."""
    launcher = os.environ.get(LAUNCHER)
    # Not those that the processes start in their turn, such as loading processes: these end with their own parents.
    if launcher is None or os.name != "posix" or os.getppid() != int(launcher):
        return
    end_with(int(launcher))


def end_with(parent: int) -> None:
    """Ends this process at once when ``parent``, the number of the process that started it, no longer runs."""
    if os.name == "posix":
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    # No clean-up: another run may own the folder by now, and what a kill leaves behind can be gone on with.
    os._exit(1)
