"""A sweep of fine-tuning: runs that differ in some settings, and the one that held-out images of train choose.

Every run lies in ``RUN/sweep/NAME`` with a record of its own. A sweep that was broken off goes on where it was: runs
that have ended stay as they are, and the unfinished one is gone on with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ibot_eval import distributed, runner
from ibot_eval.errors import ConfigError, RecordError
from ibot_eval.files import atomic_write_json
from ibot_eval.finetuning import outcome
from ibot_eval.finetuning.sweep_table import TABLE, as_text, read_table, row_of
from ibot_eval.finetuning.trials import Trial, parse_sweep
from ibot_eval.probes.holdout import hold_out
from ibot_eval.protocol import Artifact, EvalProtocol, Event, Metric, Predictions, Session, Warning
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.recording import say
from ibot_eval.settings import CheckpointSettings, OutputSettings, RunSettings
from ibot_eval.training.finite import NotFinite
from ibot_eval.training.holding import hold
from ibot_eval.training.resuming import compare_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = "sweep"
"""Folder of the runs, in the sweep's own."""
SETTINGS = "settings.json"
"""What all runs have in common, beside them: nobody may go on with other settings."""


def sweep(
    name: str,
    kind: type[EvalProtocol[Any]],
    config: Any,
    session: Session,
    may_change: Sequence[str] = (),
    labels: np.ndarray | None = None,
) -> Iterator[Event]:
    """Runs every combination of ``config.sweep`` as a protocol run of its own; yields what :func:`run_sweep` does.

    And a warning that the chosen run has seen less than all of train.

    Args:
        name: the protocol's registered name.
        kind: the protocol's class. It sees the settings of every run before the first, so that it can refuse them, and
            leaves the checkpoint's network as it was: all runs start from it.
        config: with ``sweep`` and with ``hold_out`` above 0 (see :func:`trials.with_held_out`).
        session: of a checkpoint and data that have been opened.
        may_change: settings that a sweep may be gone on with others of.
        labels: of the images that a run learns from, part of which is held out. Default: of all of train.

    Raises:
        ConfigError: settings that ``kind`` refuses, nothing that can be held out, or a sweep begun with others.
    """
    trials = parse_sweep(config.sweep, type(config))
    protocols = {trial.name: kind(replace(config, sweep=(), **trial.changes)) for trial in trials}
    data, loaded = session.data, session.loaded
    if data is None or loaded is None or session.engine is None or session.data_settings is None:
        raise TypeError("a sweep opens images and trains a network, and the session has none")
    labels = data.splits["train"].labels if labels is None else labels
    if not hold_out(labels, config.hold_out, session.seed).any():
        raise ConfigError(
            "no image of train can be held out, so a sweep has nothing to choose on",
            todo="take at least two images per class, or make single runs and compare them",
        )
    settings = RunSettings(
        CheckpointSettings(ckpt=loaded.report.reference, key=loaded.report.key, **loaded.report.overrides),
        session.data_settings,
        session.engine,
        OutputSettings(output=session.output / FOLDER),
    )
    # What the sweep's own run has said already.
    told = {*loaded.report.notes, *(f"warning: {warning}" for warning in data.warnings)}
    swept = {setting for trial in trials for setting in trial.changes}
    identity = {
        **{k: v for k, v in asdict(config).items() if k not in {"sweep", *swept, *may_change}},
        "swept": sorted(swept),
        "version": kind.version,
        "checkpoint": {part: session.checkpoint.get(part) for part in ("sha256", "key", "overrides", "identity")},
        "images": {role: split.fingerprint for role, split in data.splits.items()},
        "transform": session.transform.describe() if session.transform else None,
        "precision": session.engine.precision,
        "seed": session.seed,
        "processes": distributed.world_size(),
    }

    def run(trial: Trial) -> None:
        runner.run(
            name,
            protocols[trial.name],
            replace(settings, output=replace(settings.output, name=trial.name)),
            asked=session.asked - {"sweep"},
            loaded=loaded,
            data=data,
            told=told,
            title=f"{session.output.name}/{FOLDER}/{trial.name}",
        )

    for event in run_sweep(trials, run, session.output, identity):
        # Records hold what there is to say about the data, and the sweep's has it already.
        if not (isinstance(event, Warning) and event.message in data.warnings):
            yield event
    yield Warning(
        f"the reported run has not learnt from the {100 * config.hold_out:g} % of train that it was chosen on: to "
        "learn from all of train, run its settings once more with --hold-out 0"
    )


def run_sweep(
    trials: Sequence[Trial], run: Callable[[Trial], object], folder: Path, identity: Mapping[str, Any]
) -> Iterator[Event]:
    """Runs ``trials`` that have not been run yet, and yields what the chosen one has given. A collective.

    The run of the highest top-1 on held-out images is chosen, the first where several are equal. Its metrics,
    predictions and files are the sweep's; top1_best_on_test is the published habit, the best of all runs on the test
    split. A run that diverges is a result like others. Anything else that ends a run ends the sweep, which can be gone
    on with.

    Args:
        trials: of different names, at least one.
        run: makes the run of a trial in ``folder/sweep/NAME``, going on with what it finds there, and leaves its record
            there: ``top1`` with the parameter ``held_out_top1``, ``top1_best_on_test``, and any others.
        folder: of the sweep; ``sweep.json`` is written into it at the end.
        identity: JSON-like: what a sweep that is gone on with must have in common with its beginning.

    Raises:
        ConfigError: another process writes this sweep, it was begun with another identity, or all runs diverged.
        UserError: what ``run`` raises, but for NotFinite.
    """
    lock = hold(folder)
    try:
        distributed.from_main(lambda: _claim(folder / FOLDER / SETTINGS, identity))
        records = [
            _record(trial, run, folder / FOLDER / trial.name, f"{place} of {len(trials)}")
            for place, trial in enumerate(trials, start=1)
        ]
        rows = [row_of(trial, record) for trial, record in zip(trials, records, strict=True)]
        usable = [place for place, row in enumerate(rows) if row["error"] is None]
        if not usable:
            raise ConfigError(
                f"all {len(rows)} runs of the sweep diverged: {', '.join(row['run'] for row in rows)}",
                todo="sweep smaller learning rates, in a run of another --name",
            )
        chosen = max(usable, key=lambda place: rows[place]["held_out_top1"])
        best = max(usable, key=lambda place: rows[place]["top1_best_on_test"])
        for place, row in enumerate(rows):
            row["chosen"], row["best_on_test"] = place == chosen, place == best
        distributed.from_main(lambda: atomic_write_json(folder / TABLE, {"format": 1, "runs": rows}))
        say(["", *as_text(rows).splitlines(), ""])
        yield from _results(trials[chosen], records[chosen])
        yield _metric("top1_best_on_test", trials[best], records[best])
        yield Artifact(folder / TABLE, "log")
        diverged = [row["run"] for row in rows if row["error"]]
        if diverged:
            yield Warning(f"runs of the sweep that diverged and cannot be chosen: {', '.join(diverged)}")
    finally:
        lock.release()


def sweep_figures(*records: EvalRecord) -> dict[str, Figure]:
    """``accuracy_by_setting`` and ``learning_curve``, if there are records of sweeps among ``records``.

    Top-1 of every run on held-out images and on test, the runs in the order of the sweep; and the curves of all these
    runs, and of those of ``records`` that are no sweep's.
    """
    tables = [(record, rows) for record in records if (rows := read_table(record))]
    if not tables:
        return {}
    runs = [run for record in records for run in (_runs(record) or [record])]
    # Who draws a sweep's folder gives its runs, which lie in it, as well.
    curves = outcome.figures(*{run.folder: run for run in runs}.values()).items()
    drawn = {"accuracy_by_setting": _accuracy_by_setting(tables)}
    return drawn | {name: figure for name, figure in curves if name == "learning_curve"}


def _runs(record: EvalRecord) -> list[EvalRecord]:
    """The runs of the sweep that ``record`` is of, as far as they are there."""
    folders = [record.folder / FOLDER / row["run"] for row in read_table(record) or () if record.folder]
    return [run for folder in folders if (run := _loaded(folder)) is not None]


def _accuracy_by_setting(tables: Sequence[tuple[EvalRecord, list[dict[str, Any]]]]) -> Figure:
    from ibot_eval.figures import new_figure

    most = max(len(rows) for _, rows in tables)
    figure = new_figure(4 + 0.5 * most, 4 + 0.2 * len(tables))
    axes = figure.subplots()
    names = list(dict.fromkeys(row["run"] for _, rows in tables for row in rows))
    for index, (record, rows) in enumerate(tables):
        own = "" if len(tables) == 1 else f"{record.run}, "
        shown = [row for row in rows if not row["error"]]
        places = [names.index(row["run"]) for row in shown]
        for column, mark, label in (("held_out_top1", "o", "held-out part of train"), ("top1", "x", "test")):
            values = [row[column] for row in shown]
            axes.plot(places, values, mark, linestyle="none", color=f"C{index % 10}", label=f"{own}{label}")
        chosen = next(row["run"] for row in rows if row["chosen"])
        axes.axvline(names.index(chosen), color=f"C{index % 10}", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize="small")
    title = f"sweep, {tables[0][0].run}" if len(tables) == 1 else "sweeps"
    axes.set(xlabel="run (dashed: the chosen one)", ylabel="top-1 (%)", title=title)
    figure.legend(loc="outside lower center", fontsize="small")
    return figure


def _record(trial: Trial, run: Callable[[Trial], object], folder: Path, place: str) -> EvalRecord:
    record = distributed.from_main(lambda: _ended(folder))
    if record is not None:
        say([f"sweep: {trial.name} ({place}) has been run before"])
        return record
    say([f"sweep: {trial.name} ({place})"])
    distributed.from_main(lambda: _make_way(folder))
    try:
        run(trial)
    except NotFinite as error:
        say([f"sweep: {trial.name} diverged: {error.what}"])
    # From the file, so that ranks, and runs of another day, cannot differ.
    return distributed.from_main(lambda: EvalRecord.load(folder))


def _ended(folder: Path) -> EvalRecord | None:
    """The record of a run that is not to be run again; None where it has not been run to its end."""
    record = _loaded(folder)
    return record if record is not None and (record.status == "success" or _diverged(record)) else None


def _make_way(folder: Path) -> None:
    """Removes what a process left that was killed before the run's record, its first file, was there."""
    if folder.is_dir() and not (folder / "record.json").exists():
        shutil.rmtree(folder)


def _loaded(folder: Path) -> EvalRecord | None:
    try:
        return EvalRecord.load(folder)
    except RecordError:
        return None


def _diverged(record: EvalRecord) -> bool:
    return record.status == "error" and (record.error or {}).get("kind") == NotFinite.__name__


def _claim(path: Path, identity: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(identity, default=str))
    if path.exists():
        # Test images, one of which may have been broken and replaced, matter once a run has been tested on them.
        ended = any(record.status == "success" for folder in path.parent.iterdir() if (record := _loaded(folder)))
        before = json.loads(path.read_text(encoding="utf-8"))
        compare_settings(before, now, set() if ended else {"images.test"})
        if before == now:
            return
    atomic_write_json(path, now)


def _results(trial: Trial, record: EvalRecord) -> Iterator[Event]:
    """What the record of the chosen run holds, as events."""
    assert record.folder is not None
    yield from (Warning(message) for message in record.warnings)
    for name in dict.fromkeys(metric["name"] for metric in record.metrics):
        if name != "top1_best_on_test":
            yield from _metrics(name, trial, record)
    for artifact in record.artifacts:
        path = record.folder / artifact["path"]
        if artifact["kind"] == "predictions":
            values = distributed.from_main(lambda path=path: load_predictions(path))
            yield Predictions(values.pop("image_ids").tolist(), values)
        else:
            yield Artifact(path, artifact["kind"])  # type: ignore[arg-type]


def _metric(name: str, trial: Trial, record: EvalRecord) -> Metric:
    return next(_metrics(name, trial, record))


def _metrics(name: str, trial: Trial, record: EvalRecord) -> Iterator[Metric]:
    for metric in record.metrics:
        if metric["name"] == name:
            # Which run it was; per-class numbers are all of one.
            swept = {} if "class" in metric["params"] else dict(trial.changes)
            interval = metric.get("interval")
            yield Metric(
                name,
                metric["value"],
                metric["unit"],
                metric["higher_is_better"],
                {**swept, **metric["params"]},
                metric["n"],
                tuple(interval) if interval else None,
            )
