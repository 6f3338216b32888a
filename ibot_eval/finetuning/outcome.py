"""What a fine-tuning run reports, and the figures of its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ibot_eval.finetuning.train import Outcome
from ibot_eval.metrics.accuracy import per_class_accuracy
from ibot_eval.metrics.intervals import wilson
from ibot_eval.protocol import Metric
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.training.logs import read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED_CLASSES = 40
"""Classes whose names still fit beside a confusion matrix."""
WIDTH = 9.0
"""Of the learning curves, inches."""
MOST_ABREAST = 4
"""Confusion matrices in a row."""
FEW_POINTS = 20
"""As many values of a curve are drawn as points, too."""


def metrics(outcome: Outcome, about: Mapping[str, Any], class_names: Sequence[str]) -> Iterator[Metric]:
    """top1 and top5 of the reported weights, top1_best_on_test, and per_class_top1.

    Args:
        outcome: of the run.
        about: parameters of the metrics: learning rate, batch …
        class_names: of all labels.
    """
    tested, reported = outcome.tested, outcome.reported
    n = len(tested.labels)
    params = {"selection": "last epoch" if reported.held_out is None else "held-out", "epoch": reported.epoch, **about}
    if reported.held_out is not None:
        params["held_out_top1"] = round(reported.held_out, 4)
    for name, right in (("top1", tested.predicted == tested.labels), ("top5", tested.in_top5)):
        correct = int(right.sum())
        yield Metric(name, 100 * correct / n, params=params, n=n, interval=wilson(correct, n))
    best = max(outcome.looks, key=lambda look: look.test)
    # No interval: Wilson's would leave out that the best of many was taken.
    yield Metric("top1_best_on_test", best.test, params={"epoch": best.epoch, **about}, n=n)
    for label, accuracy, count in zip(*per_class_accuracy(tested.predicted, tested.labels), strict=True):
        name = class_names[label] if label < len(class_names) else str(label)
        yield Metric("per_class_top1", float(accuracy), params={"class": name}, n=int(count))


def figures(*records: EvalRecord) -> dict[str, Figure]:
    """``learning_curve`` (loss and accuracies against epochs, several runs on the same axes) and ``confusion``.

    What a record has no file for is left out.
    """
    drawn = {}
    logs = [(record.run, log) for record in records if (log := _log(record))]
    if logs:
        drawn["learning_curve"] = _learning_curve(logs)
    tables = [(record, table) for record in records if (table := _predictions(record))]
    if tables:
        drawn["confusion"] = _confusion(tables)
    return drawn


def _log(record: EvalRecord) -> list[dict[str, Any]]:
    path = record.folder / "log.jsonl" if record.folder else None
    return read_log(path) if path and path.is_file() else []


def _predictions(record: EvalRecord) -> dict[str, np.ndarray] | None:
    path = record.folder / "predictions.npz" if record.folder else None
    table = load_predictions(path) if path and path.is_file() else {}
    return table if {"label", "top1"} <= table.keys() else None


def _learning_curve(logs: Sequence[tuple[str, list[dict[str, Any]]]]) -> Figure:
    from matplotlib.lines import Line2D

    from ibot_eval.figures import new_figure

    names = _without_common_folders([run for run, _ in logs])
    # As many columns as fit: at this size about twelve letters are an inch.
    columns = max(1, int(WIDTH / (0.8 + max(map(len, names)) / 12)))
    figure = new_figure(WIDTH, 3.8 + 0.2 * -(-len(logs) // columns))
    losses, accuracies = figure.subplots(1, 2)
    for name, colour, (_, rows) in zip(names, _colours(len(logs)), logs, strict=True):
        looks = [row for row in rows if row.get("event") == "epoch"]
        # All logs tell how many steps an epoch has: the first look does.
        per_epoch = looks[0]["step"] / looks[0]["epoch"] if looks else 1
        look: dict[str, Any] = {"color": colour}
        steps = [row for row in rows if row.get("loss") is not None]
        # A line through one point is not seen.
        shown: dict[str, Any] = look | {"marker": "." if len(steps) <= FEW_POINTS else "", "label": name}
        losses.plot([r["step"] / per_epoch for r in steps], [r["loss"] for r in steps], **shown)
        epochs = [row["epoch"] for row in looks]
        losses.plot(epochs, [_number(r["test_loss"]) for r in looks], ":", **look)
        accuracies.plot(epochs, [_number(r["test_top1"]) for r in looks], ":", marker=".", **look)
        if any(row["held_out_top1"] is not None for row in looks):
            held = [_number(row["held_out_top1"]) for row in looks]
            accuracies.plot(epochs, held, marker=".", **look)
    losses.set(xlabel="epoch", ylabel="loss (nats; train: smoothed and mixed labels)")
    accuracies.set(xlabel="epoch", ylabel="top-1 (%)")
    # Colours tell runs apart, and lines what was looked at: two short legends instead of their product.
    for axes, solid in ((losses, "train"), (accuracies, "held-out part of train")):
        drawn = {line.get_linestyle() for line in axes.lines}
        lines: tuple[tuple[Literal["-", ":"], str], ...] = (("-", solid), (":", "test"))
        handles = [
            Line2D([], [], linestyle=style, color="black", label=label) for style, label in lines if style in drawn
        ]
        axes.legend(handles=handles, fontsize="small")
    if len(logs) > 1:
        runs = [line for line in losses.lines if line.get_label() in names]
        figure.legend(handles=runs, loc="outside lower center", fontsize="small", ncols=columns)
    return figure


def _without_common_folders(names: Sequence[str]) -> list[str]:
    """Runs of one sweep by their own names: ``lr-0.001`` instead of ``rates/sweep/lr-0.001``."""
    own = [name.rpartition("/")[2] for name in names]
    return own if len({name.rpartition("/")[0] for name in names}) == 1 else list(names)


def _colours(count: int) -> list[Any]:
    """As many different ones."""
    from matplotlib import colormaps

    if count <= 10:
        return [f"C{index}" for index in range(count)]
    return [tuple(colour) for colour in colormaps["turbo"](np.linspace(0, 1, count))]


def _confusion(tables: Sequence[tuple[EvalRecord, dict[str, np.ndarray]]]) -> Figure:
    """A matrix per run: of the images of a class (row), the share that was given each class (column)."""
    from ibot_eval.figures import new_figure

    columns = min(len(tables), MOST_ABREAST)
    rows = -(-len(tables) // columns)
    figure = new_figure(5.5 * columns, 5 * rows)
    places_of = np.ravel(figure.subplots(rows, columns))
    for axes in places_of[len(tables) :]:
        axes.remove()
    for axes, (record, table) in zip(places_of, tables, strict=False):
        labels, predicted = table["label"], table["top1"]
        classes, places = np.unique(np.concatenate([labels, predicted]), return_inverse=True)
        counts = np.zeros((len(classes), len(classes)))
        np.add.at(counts, (places[: len(labels)], places[len(labels) :]), 1)
        # A class that was only predicted has no images: an empty row.
        shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        shown = axes.imshow(shares, vmin=0, vmax=100, cmap="viridis", interpolation="nearest")
        if len(classes) <= NAMED_CLASSES:
            names = {index: name for name, index in (record.data.get("class_to_idx") or {}).items()}
            texts = [str(names.get(int(c), c)) for c in classes]
            axes.set_xticks(range(len(classes)), texts, rotation=90, fontsize="x-small")
            axes.set_yticks(range(len(classes)), texts, fontsize="x-small")
        axes.set(xlabel="predicted class", ylabel="class")
        axes.set_title(record.run, fontsize="medium", wrap=True)
        figure.colorbar(shown, ax=axes, label="images of the class (%)", shrink=0.8)
    return figure


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
