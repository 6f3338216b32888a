"""Fixtures that several test files use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SHARED = REPOSITORY.parent / "shared"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not here")

Run = Callable[..., subprocess.CompletedProcess[str]]
MAIN = sys.modules["__main__"]


@pytest.fixture(autouse=True)
def own_main() -> Iterator[None]:
    """Streamlit's AppTest leaves its script as ``__main__``, which every process that a later test spawns would run."""
    yield
    sys.modules["__main__"] = MAIN


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Feature banks of a test go into a folder of its own, never into the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("IBOT_EVAL_CACHE", str(folder))
    return folder


@pytest.fixture
def ibot_eval(tmp_path: Path) -> Run:
    """Runs ``ibot-eval`` as a user does, in a process of its own, in an empty folder."""

    def run(*arguments: object, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ibot_eval", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example plug-in, installed into a folder; the value is for PYTHONPATH."""
    target = tmp_path_factory.mktemp("plugin")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", target, REPOSITORY / "tests" / "plugin"], check=True)
    return str(target)
