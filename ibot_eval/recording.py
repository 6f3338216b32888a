"""What goes into a record while a run goes on: the data, the protocol's events, the published numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ibot_eval import distributed, published
from ibot_eval.data.splits import Data
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.protocol import Artifact, EvalProtocol, Event, Metric, Predictions, Warning
from ibot_eval.record import EvalRecord, save_predictions
from ibot_eval.settings import RunSettings


def say(lines: Iterable[str], told: set[str] | None = None) -> None:
    """Prints ``lines`` on stderr, once for all ranks.

    Args:
        told: lines that were printed before and are left out; what is printed is added.
    """
    for line in lines:
        if told is not None:
            if line in told:
                continue
            told.add(line)
        if distributed.is_main():
            print(line, file=sys.stderr)


def describe_data(data: Data, settings: RunSettings, transform: EvalTransform) -> dict[str, Any]:
    """The record's ``data``."""
    return {
        "reference": settings.data.data or data.reference,
        "fingerprint": data.fingerprint,
        "splits": {
            role: {"name": data.split_names.get(role, role), "images": len(split), "fingerprint": split.fingerprint}
            for role, split in data.splits.items()
        },
        "classes": len(data.class_names),
        "class_to_idx": data.class_to_idx,
        "transform": transform.describe() if data.transform is None else dict(data.transform),
        "skipped_images": {},
    }


def note_skipped(record: EvalRecord, skipped: dict[str, list[str]]) -> list[str]:
    """Puts images that were left out (by role) into the record; the warnings that say so."""
    warnings = []
    for role, names in skipped.items():
        if names:
            record.data["skipped_images"][role] = sorted(names)
            record.data["splits"][role]["images"] -= len(names)
            shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            warnings.append(f"unreadable images of {role}, left out: {len(names)} ({shown})")
    record.warnings += warnings
    return warnings


def collect(record: EvalRecord, events: Iterator[Event], folder: Path) -> None:
    """Puts what a protocol yields into the record, and predictions beside it into ``folder``."""
    for event in events:
        if isinstance(event, Metric):
            record.metrics.append({**asdict(event), "params": dict(event.params), "published": None})
        elif isinstance(event, Predictions):
            path = folder / "predictions.npz"
            if distributed.is_main():
                save_predictions(path, list(event.image_ids), event.values)
            record.artifacts.append({"path": path.name, "kind": "predictions"})
        elif isinstance(event, Artifact):
            inside = event.path.is_relative_to(folder)
            path = event.path.relative_to(folder) if inside else event.path
            record.artifacts.append({"path": path.as_posix(), "kind": event.kind})
        elif isinstance(event, Warning):
            record.warnings.append(event.message)
            say([f"warning: {event.message}"])
        else:
            raise TypeError(f"a protocol yields Metric, Predictions, Artifact or Warning, not {type(event).__name__}")


def add_published(
    record: EvalRecord, protocol: EvalProtocol[Any], data: str | None, method: str | None, arch: str
) -> None:
    """Puts the published number beside each metric for which ``protocol`` names one.

    Args:
        data, method, arch: as publications call them.
    """
    headline = protocol.headline(record.metrics)
    for metric in record.metrics:
        key = protocol.published_key(record.protocol, metric, data) if data else None
        if key is None:
            continue
        found = published.lookup(
            key.protocol,
            key.metric,
            data=key.data,
            method=method,
            arch=arch,
            params=metric["params"],
            headline=metric is headline or metric["name"] != protocol.primary or key.exact,
        )
        metric["published"] = found and {**found, "source": found["source"] + key.remark}
