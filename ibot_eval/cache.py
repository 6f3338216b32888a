"""The content-addressed store of feature banks: what a bank was made from is its name.

<root>/banks/<key>/{features.npy, labels.npy, ids.json, manifest.json}   finished banks; the manifest comes last
<root>/partial/<key>/shard-START-STOP.npy                                unfinished work (see bank_writer.py)
<root>/locks/<key>.lock                                                  held while a bank is being made
<root>/checkpoints.json                                                  remembered hashes of checkpoint files
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from ibot_eval.bank_writer import FORMAT, BankWriter, disk_errors
from ibot_eval.errors import CacheError, CheckpointError, ConfigError, suggest
from ibot_eval.features import FeatureBank
from ibot_eval.files import atomic_write_json, canonical_json, sha256_file


def bank_key(source: Mapping[str, Any]) -> str:
    """SHA-256 (64 hexadecimal digits) of the canonical JSON of everything that a bank's numbers depend on."""
    return hashlib.sha256(canonical_json(source).encode()).hexdigest()


@dataclass(frozen=True)
class BankInfo:
    """One line of ``ibot-eval cache ls``. Fields that an unfinished bank cannot tell are None."""

    key: str
    bytes: int
    """On disk, unfinished work included."""
    created: datetime
    n: int
    """Number of images; 0 while unfinished."""
    dim: int | None
    """Width of a feature (the last axis); None for indices."""
    checkpoint: str | None
    data: str | None
    split: str | None
    block: int | None
    norm: str | None
    reducer: str | None
    complete: bool


@dataclass(frozen=True)
class Damage:
    """A file that is not what its bank's manifest says."""

    key: str
    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.key[:12]} {self.file}: {self.what}"


class BankCache:
    """Feature banks under one folder, which several processes may use at once.

    Args:
        root: the folder; None means ``$IBOT_EVAL_CACHE``, else ``~/.cache/ibot-eval``. It is made when first needed.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Path(root or os.environ.get("IBOT_EVAL_CACHE") or "~/.cache/ibot-eval").expanduser().absolute()
        # The banks of a split share their ids, of which there may be millions: read them once.
        self._ids: dict[str, tuple[str, ...]] = {}

    def open(self, key: str) -> FeatureBank | None:
        """The finished bank ``key``, memory-mapped; None when there is none or it was not finished.

        Files are compared by size, not hashed: :meth:`verify` does that.

        Raises:
            CacheError: the folder holds something else than its name or its manifest says.
        """
        folder = self.root / "banks" / key
        found = self._look(folder, key)
        if isinstance(found, str):
            # A bank that is being removed loses its manifest first, so a second look tells that from damage.
            found = self._look(folder, key)
        if not isinstance(found, str):
            return found
        raise CacheError(
            f"feature bank {key[:12]} does not match its manifest: {found}",
            where=str(folder),
            todo=f"remove it with {self.removal(key)}; the next run extracts it again",
        )

    def writer(self, key: str, source: Mapping[str, Any], about: Mapping[str, Any]) -> BankWriter:
        """Where the shards of an unfinished bank go.

        Args:
            source: what ``key`` is the hash of.
            about: what people call the checkpoint and the data (keys "checkpoint", "data"), for :meth:`ls`.
        """
        if bank_key(source) != key:
            raise ValueError("a bank's key is the hash of its source")
        return BankWriter(self.root, key, source, about)

    @contextlib.contextmanager
    def lock(self, keys: Iterable[str]) -> Iterator[None]:
        """Holds the right to make these banks; waits, and says so on stderr, while another process has one of them.

        The operating system frees the locks of a process that dies.
        """
        with contextlib.ExitStack() as held:
            told = False
            # Everybody takes locks in the same order, so that two processes cannot wait for each other.
            for key in sorted(set(keys)):
                with disk_errors(self.root):
                    (self.root / "locks").mkdir(parents=True, exist_ok=True)
                    lock = FileLock(self.root / "locks" / f"{key}.lock")
                    try:
                        lock.acquire(timeout=0)
                    except Timeout:
                        if not told:
                            print("waiting for another process that is extracting the same features …", file=sys.stderr)
                            told = True
                        lock.acquire()
                held.callback(lock.release)
            yield

    def ls(self) -> list[BankInfo]:
        """All banks, finished or not, oldest first."""
        keys = {p.name for kind in ("banks", "partial") for p in _folders(self.root / kind)}
        return sorted((self._info(key) for key in keys), key=lambda info: (info.created, info.key))

    def rm(
        self,
        keys: Sequence[str] | None = None,
        *,
        everything: bool = False,
        older_than: timedelta | None = None,
    ) -> list[BankInfo]:
        """Removes banks, finished or not, and tells which.

        Args:
            keys: keys or their beginnings, as :meth:`ls` shows them.
            everything: all banks instead.
            older_than: only those of ``keys`` (default: of all) made longer ago than this.

        Raises:
            ConfigError: nothing was named.
            CacheError: no bank, or more than one, begins with a key; or a process is making one of them just now.
        """
        if keys is None and not everything and older_than is None:
            raise ConfigError("which banks are to be removed?", todo="name keys, or use --all or --older-than")
        infos = self._named(keys) if keys is not None else self.ls()
        if older_than is not None:
            infos = [i for i in infos if datetime.now(UTC) - i.created > older_than]
        for info in infos:
            self._remove(info.key)
        return infos

    def verify(self, keys: Sequence[str] | None = None) -> list[Damage]:
        """Hashes every file of the finished banks (default: of all) and tells which differ from their manifest."""
        infos = self._named(keys) if keys is not None else self.ls()
        return [damage for info in infos if info.complete for damage in self._damages(info.key)]

    def remembered_sha256(self, path: Path | str) -> str:
        """SHA-256 of a file, hashed only once as long as its path, size, times and inode stay.

        Raises:
            CheckpointError: there is no such file, or it changes while it is read.
        """
        path = Path(path).resolve()
        memory = self.root / "checkpoints.json"
        try:
            before = path.stat()
            known = (_read_json(memory) or {}).get(str(path))
            state = _state(before)
            if isinstance(known, dict) and {k: known.get(k) for k in state} == state and "sha256" in known:
                return known["sha256"]
            digest = sha256_file(path)
            after = path.stat()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        if state != _state(after):
            raise CheckpointError(
                f"{path} changed while it was read", todo="wait until it is written, or evaluate a copy of it"
            )
        # A file that was written a moment ago may change once more within the clock's resolution.
        if abs(time.time() - after.st_mtime) > 2:
            # Looking at a checkpoint must not need a cache that can be written.
            with contextlib.suppress(OSError):
                self.root.mkdir(parents=True, exist_ok=True)
                with FileLock(self.root / "checkpoints.lock"):
                    remembered = _read_json(memory) or {}
                    atomic_write_json(memory, {**remembered, str(path): {**state, "sha256": digest}})
        return digest

    def _look(self, folder: Path, key: str) -> FeatureBank | str | None:
        """The bank, or what is wrong with it, or None where there is no finished one."""
        manifest = _read_json(folder / "manifest.json")
        if manifest is None:
            return None
        try:
            wrong = _mismatch(folder, key, manifest)
            if wrong is not None:
                return wrong
            features = np.load(folder / "features.npy", mmap_mode="r")
            labels = np.load(folder / "labels.npy")
            stated = (tuple(manifest["shape"]), manifest["dtype"], manifest["n"])
            if (features.shape, str(features.dtype), len(labels)) != stated:
                return f"it holds {features.shape} {features.dtype} where the manifest says {stated}"
            return FeatureBank(features, labels, self._read_ids(folder, manifest), manifest)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"it cannot be read ({type(error).__name__}: {error})"

    def _read_ids(self, folder: Path, manifest: Mapping[str, Any]) -> tuple[str, ...]:
        digest = manifest["files"]["ids.json"]["sha256"]
        if digest not in self._ids:
            self._ids[digest] = tuple(json.loads((folder / "ids.json").read_bytes()))
        return self._ids[digest]

    def _info(self, key: str) -> BankInfo:
        folder, partial = self.root / "banks" / key, self.root / "partial" / key
        manifest = _read_json(folder / "manifest.json")
        told = manifest or _read_json(partial / "source.json") or {}
        # A manifest that somebody spoilt must not keep its bank from being listed, and so from being removed.
        source, about = (_dictionary(told.get(name)) for name in ("source", "about"))
        shape, n = told.get("shape"), told.get("n")
        try:
            created = datetime.fromisoformat(str(told["created"]))
        except (KeyError, ValueError):
            there = folder if folder.exists() else partial
            created = datetime.fromtimestamp(there.stat().st_mtime if there.exists() else 0, UTC)
        return BankInfo(
            key=key,
            bytes=sum(_size(f) for part in (folder, partial) for f in part.glob("*")),
            created=created,
            n=n if isinstance(n, int) else 0,
            dim=shape[-1] if isinstance(shape, list) and len(shape) > 1 else None,
            checkpoint=about.get("checkpoint"),
            data=about.get("data"),
            split=source.get("split"),
            complete=manifest is not None,
            **{name: _dictionary(source.get("atom")).get(name) for name in ("block", "norm", "reducer")},
        )

    def removal(self, *keys: str) -> str:
        """The command that removes these banks."""
        elsewhere = "" if self.root == BankCache(None).root else f" --cache {self.root}"
        return f"`ibot-eval cache rm {' '.join(key[:12] for key in keys)}{elsewhere}`"

    def _named(self, beginnings: Sequence[str]) -> list[BankInfo]:
        infos = {info.key: info for info in self.ls()}
        chosen: dict[str, BankInfo] = {}
        for beginning in beginnings:
            found = [key for key in infos if beginning and key.startswith(beginning)]
            if len(found) != 1:
                raise CacheError(
                    f"{len(found) or 'no'} feature bank{'s' * (len(found) != 1)} begin with {beginning!r}",
                    where=str(self.root),
                    todo=suggest(beginning, [key[:12] for key in found or infos]) + " (`ibot-eval cache ls`)",
                )
            chosen[found[0]] = infos[found[0]]
        return list(chosen.values())

    def _remove(self, key: str) -> None:
        with disk_errors(self.root):
            (self.root / "locks").mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(self.root / "locks" / f"{key}.lock", timeout=0):
                    # The manifest goes first: what is half removed must not look whole.
                    (self.root / "banks" / key / "manifest.json").unlink(missing_ok=True)
                    for kind in ("banks", "partial"):
                        if (self.root / kind / key).exists():
                            shutil.rmtree(self.root / kind / key)
            except Timeout:
                raise CacheError(
                    f"a process is making feature bank {key[:12]} just now", todo="wait for it, or end it"
                ) from None

    def _damages(self, key: str) -> Iterator[Damage]:
        folder = self.root / "banks" / key
        manifest = _read_json(folder / "manifest.json") or {}
        wrong = _mismatch(folder, key, manifest, sizes=False)
        if wrong:
            yield Damage(key, "manifest.json", wrong)
            return
        for name, stated in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                yield Damage(key, name, "missing")
            elif path.stat().st_size != stated["bytes"]:
                yield Damage(key, name, f"{path.stat().st_size} bytes instead of {stated['bytes']}")
            elif sha256_file(path) != stated["sha256"]:
                yield Damage(key, name, "its bytes have changed")


def _state(stat: os.stat_result) -> dict[str, int]:
    # Copying tools restore modification times; nothing restores the time of the last change to the inode.
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for banks that must not be kept; removed when it is cleaned up, collected, or at exit."""
    return tempfile.TemporaryDirectory(prefix="ibot-eval-", ignore_cleanup_errors=True)


def _mismatch(folder: Path, key: str, manifest: Mapping[str, Any], *, sizes: bool = True) -> str | None:
    """What contradicts the manifest, or None."""
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')}, not {FORMAT}"
    if manifest.get("key") != key or bank_key(_dictionary(manifest.get("source"))) != key:
        return "its manifest belongs to another bank"
    files = _dictionary(manifest.get("files"))
    if not {"features.npy", "labels.npy", "ids.json"} <= files.keys() or any(
        not {"bytes", "sha256"} <= _dictionary(stated).keys() for stated in files.values()
    ):
        return "its manifest does not list its files"
    for name, stated in files.items() if sizes else ():
        size = _size(folder / name)
        if size != stated["bytes"]:
            return f"{name} has {size} bytes instead of {stated['bytes']}"
    return None


def _read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or it was cut short."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _dictionary(value: Any) -> dict[str, Any]:
    """``value`` if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def _folders(parent: Path) -> Iterator[Path]:
    return (p for p in parent.glob("*") if p.is_dir())


def _size(path: Path) -> int:
    # Files come and go while other processes work.
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
