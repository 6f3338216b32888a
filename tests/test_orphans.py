"""Processes of a launcher that was killed outright do not stay behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ibot_eval.orphans import LAUNCHER

pytestmark = pytest.mark.skipif(os.name != "posix", reason="parents are not told of elsewhere")

WAITER = "import time; from ibot_eval.orphans import end_with_launcher; end_with_launcher(); print(1, flush=True); "
LAUNCHER_CODE = """
import os, subprocess, sys, time
os.environ["{variable}"] = str(os.getpid()) if {ours} else "1"
child = subprocess.Popen([sys.executable, "-c", sys.argv[1] + "time.sleep(30)"], stdout=subprocess.PIPE,
                         start_new_session=True)
child.stdout.read(1)
print(child.pid, flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("ours", [True, False])
def test_a_process_ends_with_the_launcher_that_started_it_only(ours: bool) -> None:
    code = LAUNCHER_CODE.format(variable=LAUNCHER, ours=ours)
    launcher = subprocess.Popen([sys.executable, "-c", code, WAITER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    assert _runs(child)
    launcher.kill()
    launcher.wait()
    try:
        assert _gone_within(child, 10 if ours else 1.5) is ours
    finally:
        if _runs(child):
            os.kill(child, signal.SIGKILL)


def _gone_within(process: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not _runs(process):
            return True
        time.sleep(0.05)
    return False


def _runs(process: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")
