"""Makers of image files, the odd ones among them. Every expected picture is built with numpy alone."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(height: int = 6, width: int = 9, seed: int = 0) -> np.ndarray:
    """(height, width, 3) uint8 noise, so that no flip or turn leaves it as it was."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def save(path: Path, pixels: np.ndarray | None = None, **settings: Any) -> Path:
    """Write pixels, (h, w) or (h, w, 3) uint8; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture() if pixels is None else pixels).save(path, **settings)
    return path


def tree(root: Path, counts: Mapping[str, int | Sequence[str]]) -> Path:
    """``{'train/cat': 3}`` -> train/cat/0.png … 2.png; a list gives the file names. Pixels differ from file to file."""
    for number, (folder, files) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        names = [f"{i}.png" for i in range(files)] if isinstance(files, int) else files
        for i, name in enumerate(names):
            save(root / folder / name, picture(seed=1000 * number + i))
    return root


def with_orientation(path: Path, upright: np.ndarray, orientation: int) -> Path:
    """A PNG whose EXIF orientation says how to get ``upright`` (TIFF 6.0, tag 274: where row 0 and column 0 belong)."""
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright.swapaxes(0, 1)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(path, np.ascontiguousarray(stored), exif=exif)


def truncated(path: Path) -> Path:
    """A JPEG without its second half."""
    buffer = io.BytesIO()
    Image.fromarray(picture(64, 64)).save(buffer, "JPEG", quality=95)
    data = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[: len(data) // 2])
    return path
