"""Figures saved to files. Protocols draw them; nothing here needs a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from ibot_eval.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float = 5.5, height: float = 3.8) -> Figure:
    """An empty figure of that size in inches, without pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path, dots_per_inch: int = 150) -> Path:
    """Writes ``figure`` in the format of the path's ending, atomically, and returns the path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip("."), dpi=dots_per_inch)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, buffer.getvalue())
    return path
