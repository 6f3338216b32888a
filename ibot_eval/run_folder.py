"""The folder of a run: its name, and that nothing is overwritten."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ibot_eval.errors import ConfigError, RecordError
from ibot_eval.files import atomic_write_json, canonical_json
from ibot_eval.record import REPLACED, EvalRecord
from ibot_eval.settings import RunSettings

SUITE_FILE = "suite.json"
"""What identifies the work of a suite, beside its runs."""


def new_run_folder(protocol: str, settings: RunSettings, resumable: bool = False) -> Path:
    """Makes the folder that ``--output`` and ``--name`` ask for.

    Args:
        resumable: whether an unfinished run of this protocol that has the name already is to be gone on with.

    Raises:
        ConfigError: a name that is taken or cannot be one, or a place that cannot be written.
    """
    if settings.output.name is not None:
        folder = settings.output.output / _checked(settings.output.name)
        if resumable and unfinished(folder, protocol):
            return folder
        if folder.exists():
            raise ConfigError(
                f"the run {folder} exists already", todo="choose another --name; nothing is ever overwritten"
            )
    else:
        folder = settings.output.output / f"{protocol}-{_subject(settings)}-{_stamp()}"
    _make(folder)
    return folder


def unfinished(folder: Path, protocol: str) -> bool:
    """Whether ``folder`` holds a run of ``protocol`` that did not end well."""
    try:
        record = EvalRecord.load(folder)
    except RecordError:
        return False
    return record.protocol == protocol and record.status != "success"


def suite_folder(settings: RunSettings, identity: Mapping[str, Any]) -> Path:
    """The folder of the suite that does the work ``identity``: the same for the same work, made if it is not there.

    Its name is ``--name``, or tells checkpoint, data and the beginning of the hash of ``identity``.

    Raises:
        ConfigError: a folder of that name that is no suite's, or a place that cannot be written.
    """
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:8]
    name = _checked(settings.output.name) if settings.output.name else f"suite-{_subject(settings)}-{digest}"
    folder = settings.output.output / name
    # Hidden: the lock of a suite that was ended before it could write anything.
    empty = folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())
    if folder.exists() and not empty and not (folder / SUITE_FILE).exists():
        raise ConfigError(f"{folder} exists already and is not a suite's", todo="choose another --name")
    _make(folder, exist_ok=True)
    return folder


def claim_suite(folder: Path, identity: Mapping[str, Any]) -> None:
    """Writes down what work the suite in ``folder`` does, or sees to it that it is this one.

    Raises:
        ConfigError: it belongs to other work; names what differs.
    """
    path = folder / SUITE_FILE
    now = json.loads(canonical_json(identity))
    if not path.exists():
        atomic_write_json(path, {"format": 1, "identity": now})
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["identity"]
        differing = sorted(part for part in before.keys() | now.keys() if before.get(part) != now.get(part))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} cannot be read, so whose suite this is is not known", todo="choose another --name"
        ) from None
    if differing:
        raise ConfigError(
            f"the suite {folder} belongs to other work; what differs: {', '.join(differing)}",
            todo="choose another --name, or leave it out: then the folder is found by what it holds",
        )


def set_aside(folder: Path) -> Path:
    """Moves a run whose place another is to take into the folder ``replaced`` beside it, and returns where it is now.

    Raises:
        ConfigError: it cannot be moved.
    """
    target = folder.parent / REPLACED / f"{folder.name}-{_stamp()}"
    try:
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
    except OSError as error:
        raise ConfigError(
            f"cannot move {folder} to {target}: {error.strerror}", todo="choose another --output"
        ) from None
    return target


def _checked(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise ConfigError(f"{name!r} cannot name a run", todo="use letters, digits, '-', '_' and '.'")
    return name


def _make(folder: Path, exist_ok: bool = False) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise ConfigError(
            f"cannot create the run folder {folder}: {error.strerror}", todo="choose another --output"
        ) from None


def _subject(settings: RunSettings) -> str:
    return f"{_stem(settings.checkpoint.ckpt or 'model')}-{_stem(settings.data.data or 'data')}"


def _stamp() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _stem(reference: str) -> str:
    name = re.split(r"[/\\:]", reference.rstrip("/\\"))[-1]
    return re.sub(r"[^\w]+", "_", re.sub(r"\.(pth|pt|bin|safetensors)$", "", name)).strip("_")[:40] or "x"
