"""Records of runs as a table beside published numbers, and the figures that their protocols draw."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import streamlit as st

from dashboards.frame import mistake, plain
from dashboards.given import Given
from dashboards.link import Link
from dashboards.taking import command, downloads, file_name, picture_of
from ibot_eval import published, registry, reporting
from ibot_eval.errors import UserError
from ibot_eval.record import EvalRecord, readable_records
from ibot_eval.visual.export import provenance

AT_MOST = 20
"""Runs in one figure that are chosen without being asked for."""
NUMBER = st.column_config.NumberColumn(format="%.2f")


def draw(link: Link) -> None:
    st.title("Results")
    given = Given.from_environment()
    if given.runs is None:
        _without_runs()
        return
    records, problems = readable_records(given.runs)
    if problems:
        with st.expander(f"{len(problems)} records cannot be read"):
            for problem in problems:
                mistake(problem)
    if not records:
        st.info("There is no record in the folder of --runs yet. Every protocol writes one:")
        st.code("ibot-eval knn --ckpt FILE --data FOLDER", language="bash")
        return
    every = link.switch("One line for each metric", "all")
    rows = [row for record in records for row in _rows(record, every)]
    # Columns in which nothing stands only push the others out of sight.
    used = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    st.dataframe(
        [{name: row[name] for name in used} for row in rows],
        width="stretch",
        hide_index=True,
        column_config={
            "value": NUMBER,
            "from": NUMBER,
            "to": NUMBER,
            "published": NUMBER,
            "settings": st.column_config.TextColumn(width="medium"),
        },
        placeholder="",
    )
    st.caption("From and to are the ends of the 95 % interval.")
    command(shlex.join(["ibot-eval", "report", given.runs, *(["--all"] if every else [])]))
    _figures(link, records, given.runs)


def _without_runs() -> None:
    st.info("Start the app with the folder of your runs to see them here, beside the published numbers below:")
    st.code("ibot-eval knn --ckpt FILE --data FOLDER\nibot-eval app --runs runs", language="bash")
    st.subheader("Published numbers", anchor=False)
    shown = ("protocol", "metric", "data", "method", "arch", "value", "unit", "source")
    rows = []
    for entry in published.entries():
        others = {**entry.get("params", {}), **{k: v for k, v in entry.items() if k not in (*shown, "params")}}
        settings = " ".join(f"{name}={value}" for name, value in others.items())
        rows.append({name: entry[name] for name in shown[:-1]} | {"settings": settings, "source": entry["source"]})
    st.dataframe(rows, width="stretch", height=520, hide_index=True)


def _rows(record: EvalRecord, every: bool) -> list[dict[str, Any]]:
    """A line of the table for the headline metric, or for each metric."""
    metrics = record.metrics if every else [metric for metric in [reporting.headline(record)] if metric]
    return [_row(record, metric) for metric in metrics] or [_row(record, None)]


def _row(record: EvalRecord, metric: dict[str, Any] | None) -> dict[str, Any]:
    """What is looked for first stands first: a narrow window shows some columns only."""
    known = metric or {"name": "", "params": {}, "value": None, "unit": "1"}
    low, high = known.get("interval") or (None, None)
    published_number = known.get("published") or {}
    described = (record.config.get("method"), record.checkpoint.get("architecture"))
    return {
        "run": record.run,
        "protocol": record.protocol,
        "metric": known["name"],
        "value": known["value"],
        "from": low,
        "to": high,
        "unit": "" if known["unit"] == "1" else known["unit"],
        "published": published_number.get("value"),
        "settings": reporting.params_text(known),
        "n": known.get("n"),
        "network": " ".join(str(v) for v in described if v),
        "data": str(record.config.get("data_name") or record.data.get("reference") or ""),
        "status": record.status,
        "message": str((record.error or {}).get("message", "")).partition("\n")[0],
        "source": published_number.get("source", ""),
    }


def drawable(records: list[EvalRecord]) -> dict[str, list[EvalRecord]]:
    """Protocol or command -> its runs that can be drawn: ended well, or with a log that is drawn as it grows."""
    logged = registry.entries("commands").keys() - registry.entries("protocols").keys()
    found: dict[str, list[EvalRecord]] = {}
    for record in records:
        if record.status == "success" or record.protocol in logged:
            found.setdefault(record.protocol, []).append(record)
    return found


def _figures(link: Link, records: list[EvalRecord], runs: str) -> None:
    kinds = drawable(records)
    if not kinds:
        st.info("No run has ended well so far, so there is nothing to draw.")
        return
    st.subheader("Figures", anchor=False)
    protocol = link.choice("Protocol", "protocol", tuple(kinds))
    of_protocol = {_path(record, runs): record for record in kinds[protocol]}
    chosen = _choose_runs(link, protocol, of_protocol)
    if not chosen:
        st.info("Choose a run to draw.")
        return
    picked = [of_protocol[name] for name in chosen]
    try:
        figures = registry.load_drawer(protocol).figures(*picked)
    except UserError as error:
        mistake(error)
        return
    if not figures:
        st.info(plain(f"{protocol} draws no figures."))
    line = shlex.join(["ibot-eval", "plot", *chosen])
    for name, figure in figures.items():
        st.image(picture_of(lambda figure=figure: figure, protocol, name, *(_state(record) for record in picked)))
        downloads(
            file_name(protocol, name),
            lambda name=name: registry.load_drawer(protocol).figures(*picked)[name],
            lambda name=name: provenance(f"{protocol} {name}", [], {"runs": chosen}, [], line),
            link.key(f"figure.{name}"),
        )
    command(line)


def _path(record: EvalRecord, runs: str) -> str:
    """The run's folder as a path for the command line, from the folder that the user named."""
    assert record.folder is not None  # it was read from there
    inside = os.path.relpath(record.folder, Path(runs).resolve())
    return os.path.normpath(Path(runs) / inside)


def _state(record: EvalRecord) -> str:
    """Changes when the run goes on: its record, or the log that it is drawn from."""
    assert record.folder is not None  # it was read from there
    files = sorted(file for file in record.folder.iterdir() if file.suffix in (".json", ".jsonl"))
    return " ".join(f"{file.name} {file.stat().st_mtime_ns}" for file in files)


def _choose_runs(link: Link, protocol: str, runs: dict[str, EvalRecord]) -> list[str]:
    """Folders of the runs to draw, the last ones first chosen."""
    key = link.key(f"runs.{protocol}")
    if key not in st.session_state:
        wanted = set((link.wanted("runs") or "").split("\n"))
        st.session_state[key] = [name for name in runs if runs[name].run in wanted] or list(runs)[-AT_MOST:]
    st.session_state[key] = [name for name in st.session_state[key] if name in runs]
    chosen = st.multiselect("Runs", tuple(runs), key=key, format_func=lambda name: runs[name].run)
    link.keep("runs", "\n".join(runs[name].run for name in chosen))
    return chosen
