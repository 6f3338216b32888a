"""Files that are either whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY_SUFFIX = ".tmp"


@contextlib.contextmanager
def atomic_open(path: Path | str) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes its name only when the block ends without an error.

    Parent folders are made. A process that is killed in between leaves at most a hidden ``.*.tmp`` file.

    Raises:
        OSError: the folder cannot be written or the disk is full; ``path`` is then what it was before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are private to the user (0600), which a cache shared by a group must not be.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def atomic_write_bytes(path: Path | str, data: bytes) -> None:
    """Writes ``data`` to ``path``, whole or not at all (see :func:`atomic_open`)."""
    with atomic_open(path) as file:
        file.write(data)


def atomic_write_text(path: Path | str, text: str) -> None:
    """Writes ``text`` in UTF-8 with the line ends it has, whole or not at all."""
    atomic_write_bytes(path, text.encode())


def atomic_write_json(path: Path | str, value: Any, *, indent: int | None = 2) -> None:
    """Writes ``value`` as JSON, whole or not at all.

    Raises:
        ValueError: a NaN or an infinity, which JSON has no word for; write None instead.
        TypeError: a value that JSON cannot hold.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    # Names of files may hold bytes that are not UTF-8 (surrogates); JSON can escape them, UTF-8 cannot hold them.
    atomic_write_bytes(path, (text + "\n").encode("utf-8", "backslashreplace"))


def canonical_json(value: Any) -> str:
    """JSON text that is the same for equal values: sorted keys, no spaces, ASCII. Raises as ``atomic_write_json``."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256_file(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    # A rename survives a power cut only once its folder is on the disk; not every system lets folders be opened.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
