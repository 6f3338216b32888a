"""What a number was made with: versions, hardware, source revision, time and memory."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "pillow", "faiss-cpu", "faiss-gpu")


def versions() -> dict[str, str]:
    """Installed versions of the packages that numbers depend on."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def own_version() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("ibot-eval")
    return "unknown"


def git_revision(folder: Path | None = None) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that this package runs from; nulls when it is an installed wheel."""
    folder = folder or Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        # A wheel inside somebody else's repository must not be given that repository's commit.
        if not (top / "ibot_eval").is_dir() or (top / "ibot_eval").resolve() != folder:
            return {"commit": None, "dirty": None}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def environment(device: torch.device, *, precision: str, world_size: int, seed: int) -> dict[str, Any]:
    """The record's ``environment``."""
    return {
        "ibot_eval": own_version(),
        "git": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "device": str(device),
        "device_name": device_name(device),
        "precision": precision,
        "world_size": world_size,
        "seed": seed,
    }


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far, in GB (10^9 bytes): the device's for CUDA, resident memory otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # Linux counts kibibytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Stopwatch:
    """Wall time per phase, for the record's ``timing``."""

    def __init__(self) -> None:
        self.started = utc_now()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - begin, 4)

    def as_dict(self, device: torch.device, images_per_second: float | None = None) -> dict[str, Any]:
        return {
            "started": self.started,
            "finished": utc_now(),
            "seconds": dict(self.seconds),
            "images_per_second": images_per_second,
            "peak_memory_gb": round(peak_memory(device), 4),
        }


def command_line() -> list[str]:
    """The command as a person would type it."""
    name = os.path.basename(sys.argv[0])
    return ["python", "-m", "ibot_eval", *sys.argv[1:]] if name == "__main__.py" else [name, *sys.argv[1:]]
