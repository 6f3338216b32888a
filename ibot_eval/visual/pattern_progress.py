"""What an interrupted pass over a data set leaves, so that the next one goes on from there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ibot_eval.files import atomic_write_bytes

SECONDS = 60.0
"""Between two savings."""


class Progress:
    """A file beside the result, replaced now and then."""

    def __init__(self, path: Path | None, key: str) -> None:
        """
        Args:
            path: None keeps nothing.
            key: settings of the run; what was left by a run of others is not used.
        """
        self.path, self.key = path, key
        self.batches = 0
        self.skipped: list[str] = []
        self.remarks: dict[str, Any] = {}
        self._saved = time.monotonic()

    def read(self) -> dict[str, np.ndarray]:
        """The arrays that were left; none where there is no such file, or one of other settings."""
        if self.path is None or not self.path.is_file():
            return {}
        try:
            with safe_open(self.path, framework="numpy") as file:
                state = json.loads((file.metadata() or {}).get("state", "{}"))
                if state.get("key") != self.key:
                    return {}
                arrays: dict[str, np.ndarray] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError):
            return {}
        self.batches, self.skipped, self.remarks = state["batches"], state["skipped"], state["remarks"]
        return arrays

    def save(self, arrays: Callable[[], dict[str, np.ndarray]], batches: int, skipped: list[str]) -> None:
        """Keeps the state after ``batches`` batches, unless it was kept a short while ago."""
        if self.path is None or time.monotonic() - self._saved < SECONDS:
            return
        state = {"key": self.key, "batches": batches, "skipped": skipped, "remarks": self.remarks}
        contiguous = {name: np.ascontiguousarray(value) for name, value in arrays().items()}
        atomic_write_bytes(self.path, save(contiguous, metadata={"state": json.dumps(state)}))
        self._saved = time.monotonic()
