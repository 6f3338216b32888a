"""Processes of a launcher that was killed outright do not stay behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


LOADER_CODE = """
import os, signal, sys
from multiprocessing import active_children
from pathlib import Path
import numpy as np
from PIL import Image
from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.loading import image_loader
from ibot_eval.data.transforms import EvalTransform

Image.new("RGB", (256, 256)).save(sys.argv[1] + "/a.png")
split = FolderSplit("split", Path(sys.argv[1]), ["a.png"] * 40, np.zeros(40, np.int64))
# Batches larger than a pipe holds, which nobody takes.
batches = image_loader(split, EvalTransform(256, 256, "bicubic", (0,) * 3, (1,) * 3), [[i] for i in range(40)], 2,
                       outlast={outlast})
next(batches)
print(*(p.pid for p in active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("outlast", [True, False])
def test_loading_processes_end_with_the_run_that_is_killed(tmp_path: Path, outlast: bool) -> None:
    code = LOADER_CODE.replace("{outlast}", str(outlast))
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    # Not to its end, which comes with that of the workers.
    workers = [int(number) for number in run.stdout.readline().split()]
    run.wait()
    assert len(workers) == 2
    try:
        assert all(_gone_within(worker, 10) for worker in workers)
    finally:
        for worker in filter(_runs, workers):
            os.kill(worker, signal.SIGKILL)


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
