"""Runs whose predictions can be paired: right or wrong, image by image, on the same data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from ibot_eval.data.splits import few
from ibot_eval.errors import ConfigError, RecordError, suggest
from ibot_eval.metrics.accuracy import per_class_accuracy
from ibot_eval.prediction_columns import column_of, column_parts
from ibot_eval.record import EvalRecord, find_records, load_predictions
from ibot_eval.reporting import headline, params_text
from ibot_eval.same_data import data_differences, skipped_images


@dataclass(frozen=True)
class Judged:
    """A run, and whether it was right on each image."""

    name: str
    """What to call it; different from the names of the runs beside it."""
    path: Path
    """Its record file."""
    record: EvalRecord
    column: str
    """Column of the predictions that is judged."""
    image_ids: np.ndarray
    """(n,) texts, ascending, so that runs with the same images have the same rows."""
    labels: np.ndarray | None
    """(n,) int64; None where the run saved none."""
    right: np.ndarray
    """(n,) bool."""
    note: str | None = None
    """What the reader should know about the choice of the column."""

    @property
    def accuracy(self) -> float:
        """Percent."""
        return 100 * int(self.right.sum()) / len(self.right)


def judge_all(paths: Sequence[Path], columns: Sequence[str] = ()) -> list[Judged]:
    """The runs at ``paths`` with the outcome for each image; all of them saw the images of the first.

    Args:
        paths: run folders or record files, at least two.
        columns: names of columns of the predictions: one for all runs, or one for each. Default: that of the headline.

    Raises:
        RecordError: a record or its predictions cannot be read, the run did not end well, or the images are not those
            of the first run.
        ConfigError: the same run twice, or no column of the predictions says right or wrong.
    """
    files = [_record_file(path) for path in paths]
    records = [EvalRecord.load(file) for file in files]
    for i, record in enumerate(records):
        for j in range(i):
            # Equal although in another folder: a copy, of which any difference would be 0.
            if files[i].resolve() == files[j].resolve() or record == records[j]:
                raise ConfigError(f"{paths[j]} and {paths[i]} are the same run", todo="name different runs")
    names = _names(files, records)
    if len(columns) not in (0, 1, len(paths)):
        raise ConfigError(
            f"{len(columns)} columns for {len(paths)} runs", where="--column", todo="give one for all, or one for each"
        )
    wanted = [columns[min(i, len(columns) - 1)] if columns else None for i in range(len(paths))]
    runs = [_judge(*parts) for parts in zip(names, files, records, wanted, strict=True)]
    for other in runs[1:]:
        _check_same_images(runs[0], other)
    return runs


def differing_settings(first: Judged, other: Judged) -> list[str]:
    """What else differs between two runs on the same data and may explain a difference, for the reader."""
    notes = []
    a, b = first.record, other.record
    if a.protocol == b.protocol and a.protocol_version != b.protocol_version:
        notes.append(
            f"{first.name} ran version {a.protocol_version} of {a.protocol}, {other.name} version "
            f"{b.protocol_version}: numbers may have moved between them"
        )
    sizes = [{name: (r.data.get("transform") or {}).get(name) for name in ("resize", "crop")} for r in (a, b)]
    if sizes[0] != sizes[1]:
        said = [" and ".join(f"{name} {value}" for name, value in size.items()) for size in sizes]
        notes.append(f"{first.name} saw the images at {said[0]}, {other.name} at {said[1]}")
    return notes


def _record_file(path: Path) -> Path:
    file = path / "record.json" if path.is_dir() else path
    if file.exists():
        return file
    inside = list(find_records(path)) if path.is_dir() else []
    if inside:
        raise ConfigError(
            f"{path} is a folder of {len(inside)} runs, not a run", todo=f"name runs: {inside[0].parent} …"
        )
    raise RecordError(f"no run at {path}", todo="name run folders or record files; `ibot-eval report` lists runs")


def _names(files: Sequence[Path], records: Sequence[EvalRecord]) -> list[str]:
    """The runs' names where they differ, otherwise as many of the folders above as tell them apart; without the name of
    a suite that they share."""
    names, depth = [record.run for record in records], 1
    while len(set(names)) < len(names):
        depth += 1
        parts = [(f.parent if f.name == "record.json" else f).resolve().parts for f in files]
        names = ["/".join(p[-depth:]) for p in parts]
    suites, _, runs = zip(*(name.rpartition("/") for name in names), strict=True)
    return list(runs) if len(set(suites)) == 1 else names


def _judge(name: str, path: Path, record: EvalRecord, asked: str | None) -> Judged:
    if record.status != "success":
        message = str((record.error or {}).get("message", "")).partition("\n")[0]
        raise RecordError(
            f"{name} did not end well ({record.status}{f': {message}' if message else ''})",
            where=str(path),
            todo="run it again",
        )
    values = _predictions(name, path, record)
    usable = [column for column in values if _says_right_or_wrong(column, values, record)]
    column = _column(name, path, record, usable, asked)
    ids, labels, outcome = values["image_ids"], values.get("label"), values[column]
    right = outcome if outcome.dtype == bool else outcome == labels
    order = np.argsort(ids)
    run = Judged(name, path, record, column, ids[order], None if labels is None else labels[order], right[order])
    return run if asked else replace(run, note=_not_the_headline(run, usable))


def _column(name: str, path: Path, record: EvalRecord, usable: Sequence[str], asked: str | None) -> str:
    """The column to judge ``name`` by: the one ``asked`` for, else that of the headline."""
    if asked is not None:
        if asked in usable:
            return asked
        raise ConfigError(
            f"the predictions of {name} have no column {asked!r} that says right or wrong",
            where="--column",
            todo=suggest(asked, usable),
        )
    metric = headline(record)
    column = column_of(metric, usable) if metric else None
    if column is None:
        why = f"its headline, {_said(metric)}, is not the share of images that are right" if metric else "no headline"
        raise ConfigError(
            f"{name} ({record.protocol}) cannot be paired: {why}",
            where=str(path),
            todo=f"choose a --column: {', '.join(usable)}" if usable else "see the numbers with `ibot-eval report`",
        )
    return column


def _predictions(name: str, path: Path, record: EvalRecord) -> dict[str, np.ndarray]:
    """Arrays of the run's predictions, ``image_ids`` among them."""
    saved = [path.parent / a["path"] for a in record.artifacts if a.get("kind") == "predictions" and "path" in a]
    if not saved:
        raise RecordError(
            f"{name} ({record.protocol}) saved no result of each image, so it cannot be paired", where=str(path)
        )
    try:
        values = load_predictions(saved[-1])
    except FileNotFoundError:
        raise RecordError(
            f"the predictions of {name} are not beside its record",
            where=str(saved[-1]),
            todo="copy the whole run folder, not the record alone",
        ) from None
    except ValueError:
        # NumPy's own words advise to unpickle what it does not know.
        raise RecordError(
            f"cannot read the predictions of {name}: not an archive of plain arrays", where=str(saved[-1])
        ) from None
    except (OSError, EOFError, BadZipFile, zlib.error) as error:
        raise RecordError(f"cannot read the predictions of {name}: {error}", where=str(saved[-1])) from None
    n = len(values.get("image_ids", ()))
    if not n or any(array.ndim == 0 or len(array) != n for array in values.values()):
        raise RecordError(
            f"the predictions of {name} are damaged: their columns differ in length", where=str(saved[-1])
        )
    return values


def _says_right_or_wrong(column: str, values: Mapping[str, np.ndarray], record: EvalRecord) -> bool:
    array = values[column]
    if array.ndim != 1 or column == "image_ids":
        return False
    if array.dtype == bool:
        return True
    # Other integers, such as clusters, are no classes; a predicted class is saved under its metric's name.
    predicted = column_parts(column)[0] in {metric["name"] for metric in record.metrics}
    return predicted and "label" in values and np.issubdtype(array.dtype, np.integer)


def _said(metric: dict[str, Any]) -> str:
    return f"{metric['name']} {params_text(metric)}".strip()


def _not_the_headline(run: Judged, usable: Sequence[str]) -> str | None:
    """A note where the headline is not the accuracy of the column alone, as with a mean over draws."""
    metric = headline(run.record)
    if metric is None or metric.get("value") is None or abs(metric["value"] - run.accuracy) < 0.005:
        return None
    others = [column for column in usable if column != run.column]
    return (
        f"{run.name}: {run.accuracy:.2f} % are right in the column {run.column}, while the headline is "
        f"{metric['value']:.2f} % ({_said(metric)})"
        + (f"; --column chooses another column: {few(others)}" if others else "")
    )


def _check_same_images(a: Judged, b: Judged) -> None:
    """Raises RecordError, saying what differs, where two runs did not see the same data."""
    both = f"{a.name} and {b.name} cannot be paired: "
    if a.record.data.get("fingerprint") != b.record.data.get("fingerprint") or not a.record.data.get("fingerprint"):
        differences, perhaps_copied = data_differences(a.record, b.record, (a.name, b.name))
        if perhaps_copied and np.array_equal(a.image_ids, b.image_ids):
            differences.append("the images that were scored have the same names in both")
        raise RecordError(
            both + "their data differ\n    " + "\n    ".join(differences),
            todo="if one is a copy of the other, with other times: run both again with --fingerprint content"
            if perhaps_copied
            else "run both on the same images, with the same options for the data",
        )
    skipped = [skipped_images(run.record) for run in (a, b)]
    for run, own, others in ((a, *skipped), (b, *reversed(skipped))):
        if only := sorted(own - others):
            raise RecordError(both + f"unreadable images were left out of {run.name} only: {few(only)}")
    for run, own, others in ((a, a.image_ids, b.image_ids), (b, b.image_ids, a.image_ids)):
        if len(only := np.setdiff1d(own, others)):
            raise RecordError(both + f"{run.name} alone classified {few(map(str, only))}")
    if a.labels is not None and b.labels is not None and not np.array_equal(a.labels, b.labels):
        i = int(np.flatnonzero(a.labels != b.labels)[0])
        raise RecordError(both + f"{a.image_ids[i]} has label {a.labels[i]} in one, {b.labels[i]} in the other")


class ClassChange(NamedTuple):
    """How often two runs are right on the images of one class, in percent."""

    name: str
    n: int
    first: float
    other: float

    @property
    def difference(self) -> float:
        return self.other - self.first


def class_changes(first: Judged, other: Judged) -> list[ClassChange]:
    """The change of each class from the first run to the other, the greatest gain first; equal ones in class order.

    Raises:
        RecordError: neither run saved the labels.
    """
    labels = first.labels if first.labels is not None else other.labels
    if labels is None:
        raise RecordError(f"neither {first.name} nor {other.name} saved the images' labels", todo="leave --classes out")
    names = {index: name for name, index in (first.record.data.get("class_to_idx") or {}).items()}
    classes, before, counts = per_class_accuracy(np.where(first.right, labels, -1), labels)
    _, after, _ = per_class_accuracy(np.where(other.right, labels, -1), labels)
    changes = [
        ClassChange(names.get(int(c), str(c)), int(n), float(a), float(b))
        for c, n, a, b in zip(classes, counts, before, after, strict=True)
    ]
    return sorted(changes, key=lambda change: -change.difference)
