"""The record of a run: what was measured, on what, with what, and how it ended.

Layout: ``record.schema.json`` beside this file. A record is written atomically as ``RUN/record.json``; per-sample
predictions lie beside it. A record with status "interrupted" is written when the run starts and replaced when it ends,
so that even a run that was killed leaves a trace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ibot_eval.errors import RecordError
from ibot_eval.files import atomic_write_bytes, atomic_write_text

SCHEMA = 1
SCHEMA_FILE = Path(__file__).with_name("record.schema.json")
NO_CHECKPOINT: dict[str, Any] = dict.fromkeys(
    ("reference", "sha256", "key", "architecture", "matched", "missing", "unexpected")
)
NO_DATA: dict[str, Any] = dict.fromkeys(("reference", "fingerprint", "splits", "skipped_images"))


@dataclass
class EvalRecord:
    """One run. Fields are those of record.schema.json; values are JSON-ready."""

    run: str
    protocol: str
    protocol_version: int
    status: Literal["success", "error", "interrupted"] = "interrupted"
    error: dict[str, str] | None = None
    warnings: list[str] = field(default_factory=list)
    primary: str = ""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=lambda: dict(NO_CHECKPOINT))
    data: dict[str, Any] = field(default_factory=lambda: dict(NO_DATA))
    environment: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    artifacts: list[dict[str, str]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    schema: int = SCHEMA
    folder: Path | None = field(default=None, compare=False)
    """Where the record lies, the run's other files beside it; None until it is saved. Not written down, so that a run
    may be moved."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready content; numbers that JSON has no word for (NaN, infinities) become null."""
        plain = _plain(asdict(self))
        del plain["folder"]
        return {"schema": plain.pop("schema"), **plain}

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, folder: Path) -> Path:
        """Writes ``folder/record.json`` atomically and returns its path."""
        path = folder / "record.json"
        atomic_write_text(path, self.as_json())
        self.folder = folder
        return path

    @classmethod
    def load(cls, path: Path) -> EvalRecord:
        """Reads a record file, or the record of a run folder. Raises RecordError naming the file."""
        path = path / "record.json" if path.is_dir() else path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecordError(f"no record at {path}", todo="give a run folder, or the folder that holds runs") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RecordError(f"cannot read the record {path}: {error}") from None
        if not isinstance(content, dict) or "schema" not in content or "protocol" not in content:
            raise RecordError(f"{path} is not an ibot-eval record")
        content = migrate(content, path)
        known = {f.name for f in fields(cls)} - {"folder"}
        missing = {"run", "protocol", "protocol_version", "status", "metrics"} - content.keys()
        if missing:
            raise RecordError(f"the record {path} lacks {', '.join(sorted(missing))}")
        if wrong := _wrong_field(content):
            raise RecordError(f"the record {path} is damaged: {wrong}")
        return cls(**{name: value for name, value in content.items() if name in known}, folder=path.parent)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "run": str,
    "protocol": str,
    "protocol_version": int,
    "primary": str,
    "metrics": list,
    "warnings": list,
    "artifacts": list,
    "command": list,
    "config": dict,
    "checkpoint": dict,
    "data": dict,
    "environment": dict,
    "timing": dict,
    "error": (dict, type(None)),
}


def _wrong_field(content: Mapping[str, Any]) -> str | None:
    """What in a record's content is not of the kind that its readers count on; None when all is well."""
    for name, kind in _KINDS.items():
        if name in content and not isinstance(content[name], kind):
            return f"{name} is {content[name]!r}"
    if content["status"] not in ("success", "error", "interrupted"):
        return f"status is {content['status']!r}"
    for index, metric in enumerate(content["metrics"]):
        fine = (
            isinstance(metric, dict)
            and isinstance(metric.get("name"), str)
            and isinstance(metric.get("unit"), str)
            and isinstance(metric.get("params"), dict)
            and isinstance(metric.get("value", ""), (int, float, type(None)))
            and (
                metric.get("interval") is None
                or (isinstance(metric["interval"], list) and len(metric["interval"]) == 2)
            )
            and isinstance(metric.get("published"), (dict, type(None)))
        )
        if not fine:
            return f"metric {index} is {metric!r}"
    return None


def migrate(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Brings the content of an older record to the present schema; raises RecordError for a newer one."""
    schema = content["schema"]
    if schema == SCHEMA:
        return content
    if isinstance(schema, int) and schema > SCHEMA:
        raise RecordError(
            f"the record {path} has schema {schema}; this version of ibot-eval reads up to {SCHEMA}",
            todo="upgrade ibot-eval",
        )
    raise RecordError(
        f"the record {path} has an unknown schema {schema!r}; this version of ibot-eval reads {SCHEMA}",
        todo="run the protocol again, or use the version of ibot-eval that wrote it",
    )


REPLACED = "replaced"
"""Name of the folder that keeps runs whose place another has taken (see ``run_folder.set_aside``)."""


def find_records(folder: Path) -> Iterator[Path]:
    """Paths of all record files at or below ``folder``, sorted; without those that others have replaced."""
    if folder.is_file():
        yield folder
        return
    if not folder.is_dir():
        raise RecordError(f"no such folder: {folder}", todo="give a run folder, or the folder that holds runs")
    for path in sorted(folder.rglob("record.json")):
        # A run may itself be called so.
        if REPLACED not in path.relative_to(folder).parts[:-2]:
            yield path


def load_records(*folders: Path | str) -> list[EvalRecord]:
    """All records at or below ``folders`` (run folders, folders of runs, or files), oldest first.

    Raises:
        RecordError: a record that cannot be read; :func:`readable_records` leaves such out.
    """
    records, problems = readable_records(*folders)
    if problems:
        raise problems[0]
    return records


def readable_records(*folders: Path | str) -> tuple[list[EvalRecord], list[RecordError]]:
    """The records at or below ``folders`` that can be read, oldest first and none twice, and what is wrong with others.

    One damaged record must not hide the others.
    """
    records, problems = [], []
    for path in dict.fromkeys(path.resolve() for folder in folders for path in find_records(Path(folder))):
        try:
            records.append(EvalRecord.load(path))
        except RecordError as error:
            problems.append(error)
    return sorted(records, key=lambda record: str(record.timing.get("started", ""))), problems


def save_predictions(path: Path, image_ids: list[str], values: Mapping[str, np.ndarray]) -> None:
    """Writes per-sample results as a .npz of plain arrays: ``image_ids`` (n,) and one array per name."""
    import io

    buffer = io.BytesIO()
    arrays: dict[str, Any] = {"image_ids": np.asarray(image_ids, dtype=np.str_), **values}
    np.savez_compressed(buffer, **arrays)
    atomic_write_bytes(path, buffer.getvalue())


def load_predictions(path: Path) -> dict[str, np.ndarray]:
    """Reads what :func:`save_predictions` wrote; never unpickles."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
