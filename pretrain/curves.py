"""Figures of pre-training runs, drawn from their log.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ibot_eval.errors import DataError
from ibot_eval.training.logs import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from ibot_eval.record import EvalRecord

POINTS = 100
"""A curve with more values than this is drawn as means of as many stretches, in front of each stretch's range."""


class Curve(NamedTuple):
    """One field of the log in a panel."""

    field: str
    label: str = ""
    """Its name in the legend, where a panel has several."""
    style: Literal["-", ":"] = "-"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    uniform: Literal["cls", "patch"] | None = None
    """Whose ln K to draw."""
    from_zero: bool = False
    logarithmic: bool = False
    scale: float = 1.0


def _single(field: str, title: str, unit: str, **options: Any) -> Panel:
    return Panel(title, unit, (Curve(field),), **options)


FIGURES: Mapping[str, tuple[Panel, ...]] = {
    "losses": (
        _single("cls_loss", "[CLS] loss", "nats", uniform="cls"),
        Panel(
            "patch loss",
            "nats",
            (
                Curve("patch_loss_per_token", "mean over masked tokens"),
                Curve("patch_loss", "mean over crops, empty masks as 0 (collapsed: about half of ln K)", ":"),
            ),
            uniform="patch",
        ),
    ),
    "collapse": (
        _single("teacher_entropy", "entropy of the teacher, [CLS]", "nats", uniform="cls", from_zero=True),
        _single("kl", "KL of student from teacher, [CLS]", "nats", from_zero=True),
        _single("patch_entropy", "entropy of the teacher, patches", "nats", uniform="patch", from_zero=True),
        _single("patch_kl", "KL of student from teacher, patches", "nats", from_zero=True),
    ),
    "clustering": (
        _single("nmi", "NMI of the teacher's arg-max against labels", "%"),
        _single("ari", "ARI", "%"),
        _single("fmi", "FMI", "%"),
        _single("agreement", "student and teacher agree on the arg-max", "%"),
    ),
    "knn": (_single("knn_top1", "k-NN of the teacher", "top-1 accuracy (%)"),),
    "schedules": (
        _single("lr", "learning rate", "lr"),
        _single("weight_decay", "weight decay", "weight decay"),
        _single("momentum", "momentum of the teacher", "momentum"),
        Panel(
            "temperature of the teacher",
            "temperature",
            (Curve("teacher_temp", "[CLS]"), Curve("patch_teacher_temp", "patches", ":")),
        ),
        _single("gradient_norm", "gradient before clipping", "norm", logarithmic=True),
        _single("mask_fraction", "masked patches of a batch", "%", scale=100, from_zero=True),
    ),
    "throughput": (
        _single("images_per_second", "images, all processes", "images/s", from_zero=True),
        _single("data_wait", "time waiting for data", "%", scale=100, from_zero=True),
        _single("mfu", "MFU", "%", from_zero=True),
        _single("peak_memory_gb", "peak memory of a process", "GB", from_zero=True),
    ),
}


class _Run(NamedTuple):
    name: str
    rows: list[dict[str, Any]]
    prototypes: Mapping[str, int | None]
    """K of 'cls' and 'patch' outputs; None where the record does not tell."""
    steps_per_epoch: float | None
    """None before the first epoch has ended."""


def figures(*records: EvalRecord) -> dict[str, Figure]:
    """Curves of one run, or of several on the same axes; finished or not.

    ``losses``; ``collapse`` (entropy and KL of DINO's section 5.3 against ln K, alarms as vertical lines);
    ``clustering`` (NMI, which is the iBOT paper's Figure 8, ARI and FMI); ``knn``; ``schedules``; ``throughput``. What
    no run has measured is left out.

    Args:
        records: each with its folder, where log.jsonl lies. Those without a line in it yet are left out.

    Raises:
        DataError: a log that cannot be read, or no run with a line in its log.
    """
    runs = [run for record in records if (run := _read(record)).rows]
    if not runs:
        raise DataError(
            f"no curves to draw: nothing is logged yet in {', '.join(record.run for record in records)}",
            todo="the first line comes after --log-every steps",
        )
    drawn = {}
    for name, panels in FIGURES.items():
        filled = [panel for panel in panels if any(_has(run, curve.field) for run in runs for curve in panel.curves)]
        if filled:
            drawn[name] = _draw(filled, runs, alarms=name == "collapse")
    return drawn


def _read(record: EvalRecord) -> _Run:
    path = None if record.folder is None else record.folder / "log.jsonl"
    rows = read_log(path) if path is not None and path.exists() else []
    ended = [row for row in rows if row.get("event") in ("epoch", "knn") and row.get("epoch")]
    config = record.config
    k = config.get("prototypes")
    # A tokenizer brings its own vocabulary, whose size no setting tells.
    patch_k = config.get("patch_prototypes") or (None if config.get("tokenizer") else k)
    return _Run(
        record.run, rows, {"cls": k, "patch": patch_k}, ended[-1]["step"] / ended[-1]["epoch"] if ended else None
    )


def _draw(panels: Sequence[Panel], runs: Sequence[_Run], alarms: bool) -> Figure:
    from ibot_eval.figures import new_figure

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    in_epochs = all(run.steps_per_epoch for run in runs)
    legend = list(_legend(panels, runs, alarms))
    figure = new_figure(max(6.5, 1.2 + 4.2 * columns), 2.6 * lines + 0.5 + 0.2 * len(legend))
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _fill(axes, panel, runs, in_epochs, alarms)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    figure.suptitle(runs[0].name if len(runs) == 1 else "pre-training")
    if legend:
        # Below the axes, where long names of runs hide nothing.
        figure.legend(handles=legend, loc="outside lower center", fontsize="small")
    return figure


def _fill(axes: Axes, panel: Panel, runs: Sequence[_Run], in_epochs: bool, alarms: bool) -> None:
    from matplotlib.ticker import LogLocator

    for index, run in enumerate(runs):
        colour = _colour(index, len(runs))
        for curve in panel.curves:
            steps, values = _values(run, curve.field)
            if not len(steps):
                continue
            x = steps / run.steps_per_epoch if in_epochs and run.steps_per_epoch else steps
            x, mean, low, high = _stretches(x, panel.scale * values)
            few = {"marker": "o", "markersize": 3} if len(x) <= 60 else {}
            axes.plot(x, mean, curve.style, color=colour, linewidth=1.3, **few)
            if (low < high).any():
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        for step in _alarms(run) if alarms else ():
            x = step / run.steps_per_epoch if in_epochs and run.steps_per_epoch else step
            axes.axvline(x, color=colour, linestyle=(0, (1, 2)), linewidth=1)
    for k in _prototypes([panel], runs):
        axes.axhline(math.log(k), color="grey", linestyle="--", linewidth=1)
    if panel.logarithmic:
        axes.set_yscale("log")
        # Numbers that are read at a glance, rather than powers of ten.
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter("{x:g}")
    elif panel.from_zero:
        # As if a value were 0, for a margin above values that are all alike.
        axes.update_datalim([(0, 0)], updatex=False)
        axes.autoscale_view()
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize="medium")
    axes.set(xlabel="epoch" if in_epochs else "step", ylabel=panel.unit)
    axes.grid(alpha=0.25)


def _legend(panels: Sequence[Panel], runs: Sequence[_Run], alarms: bool) -> Iterator[Line2D]:
    from matplotlib.lines import Line2D

    if len(runs) > 1:
        for index, run in enumerate(runs):
            yield Line2D([], [], color=_colour(index, len(runs)), label=run.name)
    for panel in panels:
        for curve in panel.curves if len(panel.curves) > 1 else ():
            yield Line2D([], [], color="black", linestyle=curve.style, label=f"{panel.title}: {curve.label}")
    for k in _prototypes(panels, runs):
        yield Line2D([], [], color="grey", linestyle="--", label=f"ln K = {math.log(k):.2f}, uniform over K = {k}")
    if alarms and any(_alarms(run) for run in runs):
        yield Line2D([], [], color="black", linestyle=(0, (1, 2)), label="alarm")


def _prototypes(panels: Sequence[Panel], runs: Sequence[_Run]) -> list[int]:
    """The K that these panels draw ln K of."""
    named = [run.prototypes[panel.uniform] for panel in panels if panel.uniform for run in runs]
    return sorted({k for k in named if k is not None and k > 1})


def _has(run: _Run, field: str) -> bool:
    return any(row.get(field) is not None for row in run.rows)


def _values(run: _Run, field: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a field, (n,) each, where it was measured."""
    pairs = [(row["step"], row[field]) for row in run.rows if row.get(field) is not None]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return steps, values


def _alarms(run: _Run) -> list[int]:
    return [row["step"] for row in run.rows if row.get("event") == "alarm"]


def _stretches(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean position, mean, minimum and maximum of at most ``POINTS`` stretches of nearly equal length."""
    if len(x) <= POINTS:
        return x, values, values, values
    starts = np.arange(POINTS) * len(x) // POINTS
    lengths = np.diff(np.append(starts, len(x)))
    where, mean = (np.add.reduceat(array, starts) / lengths for array in (x, values))
    return where, mean, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _colour(index: int, count: int) -> Any:
    from matplotlib import colormaps

    return f"C{index}" if count <= 10 else colormaps["turbo"]((index + 0.5) / count)
