"""Unfinished feature banks: shards that survive a kill, and the step that makes one bank of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ibot_eval.errors import CacheError, DataError
from ibot_eval.files import TEMPORARY_SUFFIX, atomic_open, atomic_write_json

FORMAT = 1
"""Raised when the layout of a bank's folder changes."""


class Shard(NamedTuple):
    """The images ``start`` … ``stop - 1`` of a split."""

    start: int
    stop: int


def shards(
    n: int, batch_size: int, row_bytes: int, *, per_bank: int = 64, largest: int = 1024, most_bytes: int = 1 << 28
) -> list[Shard]:
    """Cuts n images into shards of whole batches.

    It depends on nothing else, so that any number of ranks, and a run that resumes, make the same batches.

    Args:
        row_bytes: what one image takes in memory, all its outputs together.
        per_bank: aim for this many shards (what a kill loses is at most a shard per rank) …
        largest: … of at most this many images …
        most_bytes: … and bytes, since a shard is held in memory.
    """
    batches = math.ceil(n / batch_size)
    fits = most_bytes // (batch_size * max(1, row_bytes))
    size = batch_size * max(1, min(math.ceil(batches / per_bank), largest // batch_size, fits))
    return [Shard(start, min(start + size, n)) for start in range(0, n, size)]


class BankWriter:
    """One unfinished bank. Ranks put different shards; one process, which holds the key's lock, begins and finishes."""

    def __init__(self, root: Path, key: str, source: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.root, self.key, self.source, self.about = root, key, dict(source), dict(about)
        self.partial = root / "partial" / key

    def begin(self) -> None:
        """Makes the folder and notes what it is for."""
        with disk_errors(self.root):
            atomic_write_json(self.partial / "source.json", {"source": self.source, "about": self.about})

    def has(self, shard: Shard, *, allow_skipped: bool = True) -> bool:
        """Whether the shard is there and whole; with images left out, only if ``allow_skipped``."""
        with contextlib.suppress(OSError, ValueError):
            skipped = self.skipped(shard)
            shape, dtype, offset = npy_header(self._path(shard))
            size = self._path(shard).stat().st_size
            whole = size == offset + math.prod(shape) * dtype.itemsize
            return whole and shape[0] == shard.stop - shard.start - len(skipped) and (allow_skipped or not skipped)
        return False

    def put(self, shard: Shard, rows: np.ndarray, skipped: Sequence[tuple[int, str]]) -> None:
        """Stores a shard.

        Args:
            rows: (m, …) features of the shard's images in order, without the skipped ones.
            skipped: (index in the split, reason) of the others.
        """
        with disk_errors(self.root):
            if skipped:
                # Before the rows: a shard that lacks rows without saying which is not whole.
                atomic_write_json(self._skipped_path(shard), [list(entry) for entry in skipped])
            else:
                self._skipped_path(shard).unlink(missing_ok=True)
            with atomic_open(self._path(shard)) as file:
                np.save(file, np.ascontiguousarray(rows), allow_pickle=False)

    def skipped(self, shard: Shard) -> list[tuple[int, str]]:
        """(index in the split, reason) of the images that the shard leaves out."""
        path = self._skipped_path(shard)
        return [(int(i), str(reason)) for i, reason in json.loads(path.read_bytes())] if path.exists() else []

    def finish(self, parts: Sequence[Shard], labels: np.ndarray, image_ids: Sequence[str]) -> None:
        """Makes the bank of its shards, the manifest last, and removes them.

        Args:
            parts: all shards, in order.
            labels: (n,) of the whole split.
            image_ids: n names of the whole split.

        Raises:
            CacheError: a shard is missing or of another kind than the rest, or the disk is full.
            DataError: every image was skipped.
        """
        missing = [s for s in parts if not self.has(s)]
        if missing:
            raise CacheError(
                f"{len(missing)} of {len(parts)} shards of feature bank {self.key[:12]} are not there",
                where=str(self.partial),
                todo="all ranks must see the same cache folder: choose one on a shared disk with --cache",
            )
        skipped = [entry for shard in parts for entry in self.skipped(shard)]
        kept = np.ones(len(image_ids), dtype=bool)
        kept[[index for index, _ in skipped]] = False
        if not kept.any():
            raise DataError(
                f"none of the {len(image_ids)} images of split {self.source.get('split')!r} can be decoded",
                where=skipped[0][1] if skipped else None,
                todo="look at the first of them",
            )
        folder = self.root / "banks" / self.key
        with disk_errors(self.root):
            (folder / "manifest.json").unlink(missing_ok=True)
            # What a process left that was killed at this point; the lock says that nobody is at it now.
            for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
                leftover.unlink()
            shape, dtype, features = self._join(parts, folder / "features.npy", int(kept.sum()))
            buffer = BytesIO()
            np.save(buffer, np.asarray(labels, dtype=np.int64)[kept])
            ids = [name for name, keep in zip(image_ids, kept.tolist(), strict=True) if keep]
            files = {
                "features.npy": features,
                "labels.npy": _write(folder / "labels.npy", buffer.getvalue()),
                "ids.json": _write(folder / "ids.json", json.dumps(ids).encode()),
            }
            manifest = {
                "format": FORMAT,
                "key": self.key,
                "source": self.source,
                "about": self.about,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "n": len(ids),
                "shape": list(shape),
                "dtype": str(dtype),
                "skipped": [[image_ids[index], reason] for index, reason in skipped],
                "files": files,
            }
            atomic_write_json(folder / "manifest.json", manifest)
        shutil.rmtree(self.partial, ignore_errors=True)

    def _join(
        self, parts: Sequence[Shard], path: Path, n: int
    ) -> tuple[tuple[int, ...], np.dtype[Any], dict[str, Any]]:
        """Streams the shards into one file: (shape, dtype, size and checksum)."""
        headers = [npy_header(self._path(shard)) for shard in parts]
        kinds = {(shape[1:], dtype) for shape, dtype, _ in headers if shape[0]}
        if len(kinds) != 1 or sum(shape[0] for shape, _, _ in headers) != n:
            raise CacheError(
                f"the shards of feature bank {self.key[:12]} do not fit together",
                where=str(self.partial),
                todo=f"remove them with `ibot-eval cache rm {self.key[:12]}` and run again",
            )
        trailing, dtype = kinds.pop()
        shape = (n, *trailing)
        digest, size = hashlib.sha256(), 0
        with atomic_open(path) as target:

            def write(piece: bytes) -> None:
                nonlocal size
                digest.update(piece)
                size += target.write(piece)

            header = BytesIO()
            described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(header, described)
            write(header.getvalue())
            for shard, (part_shape, _, offset) in zip(parts, headers, strict=True):
                if part_shape[0]:
                    with open(self._path(shard), "rb") as source:
                        source.seek(offset)
                        while piece := source.read(1 << 20):
                            write(piece)
        return shape, dtype, {"bytes": size, "sha256": digest.hexdigest()}

    def _path(self, shard: Shard) -> Path:
        return self.partial / f"shard-{shard.start:08d}-{shard.stop:08d}.npy"

    def _skipped_path(self, shard: Shard) -> Path:
        return self._path(shard).with_suffix(".skipped.json")


def npy_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """(shape, dtype, offset of the first value) of a C-ordered .npy file. Raises OSError or ValueError."""
    with open(path, "rb") as file:
        shape, fortran, dtype = _read_header(file)
        if fortran and len(shape) > 1:
            raise ValueError("not in C order")
        return shape, dtype, file.tell()


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


def _write(path: Path, data: bytes) -> dict[str, Any]:
    with atomic_open(path) as file:
        file.write(data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turns what the operating system says about a full or forbidden disk into a CacheError."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write to the feature cache: {error.strerror or error}",
            where=str(error.filename or root),
            todo="free some space (`ibot-eval cache rm`), or choose another folder with --cache or $IBOT_EVAL_CACHE",
        ) from error
