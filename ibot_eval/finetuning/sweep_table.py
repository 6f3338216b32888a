"""The table of a sweep: a row for each of its runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from ibot_eval.finetuning.trials import Trial
from ibot_eval.record import EvalRecord

TABLE = "sweep.json"
"""What came of each run, beside the sweep's record."""


def row_of(trial: Trial, record: EvalRecord) -> dict[str, Any]:
    """A row of the table: nothing in it depends on how often the sweep was broken off."""
    values = {metric["name"]: metric for metric in reversed(record.metrics)}
    top1 = values.get("top1", {"value": None, "params": {}})
    return {
        "run": trial.name,
        "settings": dict(trial.changes),
        "held_out_top1": top1["params"].get("held_out_top1"),
        "top1": top1["value"],
        "top1_best_on_test": values.get("top1_best_on_test", top1)["value"],
        "error": record.error["message"] if record.error else None,
    }


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, a line per run; the chosen one is marked."""
    lines = [
        {
            **{name: "none" if value is None else str(value) for name, value in row["settings"].items()},
            "top1 held out [%]": _percent(row["held_out_top1"]),
            "top1 on test [%]": _percent(row["top1"]),
            "best epoch on test [%]": _percent(row["top1_best_on_test"]),
            "": "diverged" if row["error"] else ", ".join(mark for mark, given in _marks(row) if given),
        }
        for row in rows
    ]
    return tabulate(lines, headers="keys", disable_numparse=True)


def read_table(record: EvalRecord) -> list[dict[str, Any]] | None:
    """The rows of the sweep that ``record`` is of; None where it is of none."""
    path = record.folder / TABLE if record.folder else None
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path and path.is_file() else None


def _marks(row: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    yield "chosen", row["chosen"]
    yield "best on test", row["best_on_test"]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
