"""The figures of detection and segmentation: loss and score against steps, and a bar for each class. No mm*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ibot_eval.figures import new_figure
from ibot_eval.training.logs import read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.record import EvalRecord

NAMED = 160
"""Classes whose names fit below a bar chart, ADE20K's among them."""
_STYLES = (("-", "."), (":", "x"))
"""Line and marker of each score."""
_WIDEST = 24
"""Of a bar chart, in inches."""


@dataclass(frozen=True)
class Drawn:
    """What a protocol's figures show."""

    scores: Sequence[tuple[str, str]]
    """At most two names of metrics, as in log.jsonl and in the record, each with what a legend adds to the run's name.
    The bars are the first's."""
    loss_axis: str
    score_axis: str
    bar_axis: str
    bars: str
    """Name of the figure with the classes."""


def figures(records: Sequence[EvalRecord], drawn: Drawn) -> dict[str, Figure]:
    """``learning_curve`` (several runs on the same axes) and ``drawn.bars``.

    What a record has no file or metrics for is left out.
    """
    found = {}
    logs = [
        (record.run, read_log(path))
        for record in records
        if record.folder and (path := record.folder / "log.jsonl").is_file()
    ]
    if logs:
        found["learning_curve"] = _learning_curve(logs, drawn)
    tables = [(record.run, table) for record in records if (table := _by_class(record, drawn.scores[0][0]))]
    if tables:
        found[drawn.bars] = _bars(tables, drawn.bar_axis)
    return found


def _by_class(record: EvalRecord, name: str) -> dict[str, float]:
    table: dict[str, float] = {}
    for metric in record.metrics:
        if metric["name"] == name and "class" in metric["params"] and metric["value"] is not None:
            # The headline's come first: of several looks at each test image, before those of a single one.
            table.setdefault(metric["params"]["class"], metric["value"])
    return table


def _learning_curve(logs: Sequence[tuple[str, list[dict[str, Any]]]], drawn: Drawn) -> Figure:
    figure = new_figure(9, 3.8 + 0.2 * len(logs))
    losses, scores = figure.subplots(1, 2, sharex=True)
    losses.xaxis.get_major_locator().set_params(integer=True)
    for index, (run, rows) in enumerate(logs):
        look: dict[str, Any] = {"color": f"C{index % 10}"}
        steps = [row for row in rows if row.get("loss") is not None]
        # A line through one point is none.
        marker = "." if len(steps) == 1 else ""
        losses.plot([row["step"] for row in steps], [row["loss"] for row in steps], marker=marker, label=run, **look)
        for (name, added), (style, marker) in zip(drawn.scores, _STYLES, strict=False):
            tests = [row for row in rows if row.get(name) is not None]
            if tests:
                # The loss has named the run already, unless there is more than one line to tell apart.
                label = f"{run}, {added}" if added else None
                values = [row[name] for row in tests]
                scores.plot([row["step"] for row in tests], values, style, marker=marker, label=label, **look)
    losses.set(xlabel="step", ylabel=drawn.loss_axis)
    scores.set(xlabel="step", ylabel=drawn.score_axis)
    figure.legend(loc="outside lower center", fontsize="small", ncols=3)
    return figure


def _bars(tables: Sequence[tuple[str, dict[str, float]]], axis: str) -> Figure:
    """In the order of the first run's values; classes that only later runs have come last."""
    first = tables[0][1]
    names = sorted(dict.fromkeys(name for _, table in tables for name in table), key=lambda name: -first.get(name, -1))
    figure = new_figure(max(5.5, min(_WIDEST, 0.25 * len(names) * (1 + 0.3 * len(tables)))), 4.2)
    axes = figure.subplots()
    width = 0.8 / len(tables)
    for index, (run, table) in enumerate(tables):
        places = np.arange(len(names)) + (index - (len(tables) - 1) / 2) * width
        axes.bar(places, [table.get(name, 0.0) for name in names], width, label=run)
    if len(names) <= NAMED:
        axes.set_xticks(np.arange(len(names)), names, rotation=90, fontsize="x-small")
    axes.set(ylabel=axis, ylim=(0, 100), xlabel="class")
    axes.margins(x=0.01)
    axes.legend(fontsize="small")
    return figure
