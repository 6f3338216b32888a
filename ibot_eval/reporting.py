"""Records as tables: one run in full, or many runs a line each."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from tabulate import tabulate

from ibot_eval import registry
from ibot_eval.errors import UserError
from ibot_eval.record import EvalRecord

Format = Literal["table", "md", "csv"]

COLUMNS: tuple[str, ...] = (
    "run",
    "protocol",
    "status",
    "network",
    "data",
    "metric",
    "value",
    "95 % interval",
    "n",
    "published",
    "source",
)

PER_CLASS = "class"
"""Metrics with this parameter may be thousands: the record has them, and the table of a run only their range."""


def run_table(record: EvalRecord, folder: Path) -> str:
    """What a run prints at its end: what was measured, every metric, and where the record lies."""
    network, images = _subject(record)
    lines = [
        f"{record.protocol} of {network}",
        images,
        "",
        tabulate(
            _metric_rows([m for m in record.metrics if PER_CLASS not in m["params"]]),
            headers="keys",
            disable_numparse=True,
        ),
        "",
        *_per_class([m for m in record.metrics if PER_CLASS in m["params"]]),
        *(f"note: {note}" for note in record.checkpoint.get("notes", [])),
        *(f"warning: {warning}" for warning in record.warnings),
        f"record: {folder / 'record.json'}",
    ]
    return "\n".join(lines)


def _per_class(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each metric and each set of its other parameters."""
    shared = _shared_params(metrics)
    groups: dict[str, list[dict[str, Any]]] = {}
    for metric in metrics:
        others = {k: v for k, v in metric["params"].items() if k != PER_CLASS and k not in shared}
        title = f"{_CALLED.get(metric['name'], metric['name'])} by class"
        groups.setdefault(" ".join([title, *(f"{k}={v}" for k, v in others.items())]), []).append(metric)
    lines = [f"{title}: {_range_of(group)}; the record has all {len(group):,}" for title, group in groups.items()]
    return [*lines, ""] if lines else []


_CALLED = {"per_class_top1": "top-1"}


def _range_of(metrics: Sequence[dict[str, Any]]) -> str:
    known = [metric for metric in metrics if metric["value"] is not None]
    if not known:
        return "no class has a value"
    ends = (pick(known, key=lambda m: m["value"]) for pick in (min, max))
    text = " to ".join(f"{value_text(m)} {m['unit']} ({m['params'][PER_CLASS]})" for m in ends)
    without = len(metrics) - len(known)
    return f"{text}, none for {without:,} of them" if without else text


def suite_table(records: Sequence[EvalRecord], folder: Path) -> str:
    """What a suite prints at its end: a line per protocol, without what is the same in all lines."""
    known = [record for record in records if record.checkpoint.get("architecture") and record.data.get("splits")]
    # Some protocols need one split only.
    lines = _subject(max(known, key=lambda record: len(record.data["splits"]))) if known else []
    table = records_table(records, leave_out=("run", "network", "data"))
    return "\n".join([*lines, "", table, "", f"records: {folder}"])


def _subject(record: EvalRecord) -> list[str]:
    """Network and images, a line each."""
    checkpoint, data = record.checkpoint, record.data
    key = f", {checkpoint['key']}" if checkpoint.get("key") else ""
    return [
        f"{checkpoint['reference']} ({checkpoint['architecture']}{key}) on {data['reference']}",
        ", ".join(f"{role}: {split['images']:,} images" for role, split in (data["splits"] or {}).items())
        + f", {data.get('classes', 0):,} class{'es' * (data.get('classes') != 1)}",
    ]


def _metric_rows(metrics: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A row per set of parameters, a column per metric name, so that top-1 and top-5 of one k share a line."""
    rows: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    shared = _shared_params(metrics)
    for metric in metrics:
        params = {k: v for k, v in metric["params"].items() if k not in shared}
        key = tuple((k, str(v)) for k, v in params.items())
        row = rows.setdefault(key, {k: str(v) for k, v in params.items()})
        row[_title(metric)] = value_text(metric)
        if metric.get("interval"):
            row[f"{metric['name']} 95 % interval"] = interval_text(metric)
        if metric.get("published"):
            row["published"] = f"{metric['published']['value']:g} ({metric['published']['source']})"
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    columns.sort(key=lambda name: name == "published")
    return [{name: row.get(name, "") for name in columns} for row in rows.values()]


def _shared_params(metrics: Sequence[dict[str, Any]]) -> set[str]:
    """Parameters with the same value in all of several metrics: they distinguish nothing."""
    names = {name for metric in metrics for name in metric["params"]}
    if len({tuple(sorted(m["params"].items(), key=str)) for m in metrics}) < 2:
        return set()
    return {
        name
        for name in names
        if len({str(m["params"].get(name)) for m in metrics}) == 1 and all(name in m["params"] for m in metrics)
    }


def _title(metric: dict[str, Any]) -> str:
    return metric["name"] if metric["unit"] == "1" else f"{metric['name']} [{metric['unit']}]"


def value_text(metric: dict[str, Any]) -> str:
    return "-" if metric["value"] is None else f"{metric['value']:.2f}"


def interval_text(metric: dict[str, Any]) -> str:
    interval = metric.get("interval")
    return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else ""


def params_text(metric: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in metric["params"].items())


def records_table(
    records: Sequence[EvalRecord],
    form: Format = "table",
    every_metric: bool = False,
    leave_out: Collection[str] = (),
) -> str:
    """A line per run with its headline metric, or per metric; published numbers where there are any.

    Args:
        leave_out: columns that are not wanted, of tables that are not CSV.
    """
    rows = [row for record in records for row in _record_rows(record, every_metric)]
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue().rstrip("\n")
    used = [c for c in COLUMNS if c not in leave_out and any(row[c] for row in rows)]
    style = "github" if form == "md" else "simple"
    return tabulate(
        [[row[c] for c in used] for row in rows],
        headers=used,
        tablefmt=style,
        disable_numparse=True,
        colalign=["right" if c in ("value", "n", "published") else "left" for c in used] if rows else None,
    )


def _record_rows(record: EvalRecord, every_metric: bool) -> list[dict[str, str]]:
    base = dict.fromkeys(COLUMNS, "") | {
        "run": record.run,
        "protocol": record.protocol,
        "status": record.status,
        "network": " ".join(str(v) for v in (record.config.get("method"), record.checkpoint.get("architecture")) if v),
        "data": str(record.config.get("data_name") or record.data.get("reference") or ""),
    }
    metrics = record.metrics if every_metric else [m for m in [headline(record)] if m]
    if not metrics:
        message = str((record.error or {}).get("message", ""))
        return [base | {"metric": message.partition("\n")[0]}]
    return [
        base
        | {
            "metric": f"{metric['name']} {params_text(metric)}".strip(),
            "value": f"{value_text(metric)} {metric['unit']}".removesuffix(" 1"),
            "95 % interval": interval_text(metric),
            "n": "" if metric.get("n") is None else str(metric["n"]),
            "published": f"{metric['published']['value']:g}" if metric.get("published") else "",
            "source": metric["published"]["source"] if metric.get("published") else "",
        }
        for metric in metrics
    ]


def headline(record: EvalRecord) -> dict[str, Any] | None:
    """The record's headline metric, by the protocol's own rule while the protocol is installed."""
    try:
        chosen = registry.load_protocol(record.protocol).headline(record.metrics)
    except UserError:
        chosen = next((m for m in record.metrics if m["name"] == record.primary), None)
    return dict(chosen) if chosen else None
