"""``--launch local:N``: several processes on this machine through torch's own launcher."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ibot_eval.errors import ConfigError
from ibot_eval.orphans import LAUNCHER


def launch(how: str, argv: list[str]) -> int:
    """Runs ``python -m ibot_eval ARGV`` in N processes and returns the exit code.

    Args:
        how: ``local:N``.
        argv: the command line without ``--launch``.

    Raises:
        ConfigError: ``how`` is not of that form, or N is below 1.
    """
    match = re.fullmatch(r"local:(\d+)", how)
    if not match or int(match[1]) < 1:
        raise ConfigError(
            f"--launch {how!r} is not understood", todo="use --launch local:N with N processes, such as local:2"
        )
    # The launcher explains a child's failure at length; the child has already said it in plain words.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(match[1]))))
    os.environ[LAUNCHER] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(match[1]),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"ibot-eval-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", "ibot_eval", *argv)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code > 0), 1)
    except SignalException as error:
        print(f"ibot-eval: ended by signal {signal.Signals(error.sigval).name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def without_launch(argv: list[str]) -> list[str]:
    """``argv`` without ``--launch HOW`` and ``--launch=HOW``."""
    kept: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        if token == "--launch":
            next(tokens, None)
        elif not token.startswith("--launch="):
            kept.append(token)
    return kept
