"""What a linear probe's run reports and leaves in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ibot_eval import distributed
from ibot_eval.features import FeatureRequest
from ibot_eval.files import atomic_write_json
from ibot_eval.metrics.intervals import wilson
from ibot_eval.probes.head_file import HEAD_FILE, ClassifierHead
from ibot_eval.probes.linear_probe import ProbeResult
from ibot_eval.probes.published_features import head_features
from ibot_eval.probes.sweep import HeadSetting
from ibot_eval.protocol import Artifact, Metric, Session

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.record import EvalRecord

SWEEP_FILE = "sweep.json"


def probe_metrics(result: ProbeResult, labels: np.ndarray) -> Iterator[Metric]:
    """top1 and top5 of the reported classifier, and top1_best_on_test.

    Args:
        labels: (n_test,) the right ones.
    """
    n = len(labels)
    selection = "middle rate" if result.held_out_top1 is None else "held-out"
    params = {"selection": selection, **_params(result.setting, result.epoch), "batch": result.batch}
    for name, right in (("top1", result.predicted == labels), ("top5", result.in_top5)):
        correct = int(right.sum())
        yield Metric(name, 100 * correct / n, params=params, n=n, interval=wilson(correct, n))
    # No interval: Wilson's would leave out that the best of many was taken.
    best = _params(result.best_on_test_setting, result.best_on_test_epoch)
    yield Metric("top1_best_on_test", result.best_on_test, params=best, n=n)


def save_sweep(result: ProbeResult, folder: Path) -> Artifact:
    """Writes the accuracy of every setting into the run's folder, for :func:`sweep_figures`."""
    content = {
        "batch": result.batch,
        "chosen": {**_params(result.setting, result.epoch), "held_out_top1": result.held_out_top1},
        "settings": result.table,
    }
    distributed.from_main(lambda: atomic_write_json(folder / SWEEP_FILE, content))
    return Artifact(folder / SWEEP_FILE, "log")


def save_head(
    weight: Tensor,
    bias: Tensor,
    classes: np.ndarray,
    requests: Sequence[FeatureRequest],
    session: Session,
    *,
    protocol: str,
    normalised: bool = False,
) -> Artifact:
    """Writes a classifier into the run's folder as ``head.safetensors``. A collective call.

    Args:
        weight, bias: (C, D) and (C,).
        classes: (C,) the labels of the rows, ascending.
        requests: the atoms that it takes, in order.
        protocol: which trained it.
        normalised: whether it takes features of length 1.
    """
    names = session.class_names
    head = ClassifierHead(
        weight=weight,
        bias=bias,
        class_names=[names[c] if c < len(names) else str(c) for c in classes],
        labels=classes.tolist(),
        features=head_features(requests),
        normalised=normalised,
        protocol=protocol,
        backbone={k: session.checkpoint.get(k) for k in ("reference", "sha256", "key", "architecture")},
        transform=session.transform.describe() if session.transform else {},
    )
    path = session.output / HEAD_FILE
    distributed.from_main(lambda: head.save(path) and None)
    return Artifact(path, "head")


def sweep_figures(*records: EvalRecord) -> Mapping[str, Figure]:
    """``accuracy_by_rate`` of records that have a sweep's table beside them; none where no record has."""
    from matplotlib import colormaps

    from ibot_eval.figures import new_figure

    tables = [(record, table) for record in records if (table := _read_sweep(record))]
    if not tables:
        return {}
    figure = new_figure(6.5, 4 + 0.2 * len(tables))
    axes = figure.subplots()
    for index, (record, table) in enumerate(tables):
        colour = f"C{index}" if len(tables) <= 10 else colormaps["turbo"]((index + 0.5) / len(tables))
        kinds = dict.fromkeys((s["optimizer"], s["weight_decay"]) for s in table["settings"])
        for shade, kind in enumerate(kinds):
            rows = sorted(
                (s for s in table["settings"] if (s["optimizer"], s["weight_decay"]) == kind), key=lambda s: s["lr"]
            )
            own = "" if len(tables) == 1 else record.run
            if len(kinds) > 1:
                own = f"{own} {kind[0]}, weight decay {kind[1]:g}".strip()
            look: dict[str, Any] = {"color": colour, "alpha": 1 - 0.75 * shade / len(kinds), "markersize": 3}
            rates = [s["lr"] for s in rows]
            axes.plot(rates, [s["test_top1"] for s in rows], ":", marker="o", label=f"{own} test".strip(), **look)
            if rows[0]["held_out_top1"] is not None:
                held = [s["held_out_top1"] for s in rows]
                axes.plot(rates, held, "-", marker="o", label=f"{own} held-out part of train".strip(), **look)
        axes.axvline(table["chosen"]["lr"], color=colour, linestyle="--", linewidth=1)
    axes.set_xscale("log")
    name = records[0].protocol
    title = f"{name}, {tables[0][0].run}" if len(tables) == 1 else f"{name}: accuracy by learning rate"
    axes.set(xlabel="learning rate (dashed: the chosen one)", ylabel="top-1 after the last epoch (%)", title=title)
    figure.legend(loc="outside lower center", fontsize="small")
    return {"accuracy_by_rate": figure}


def _read_sweep(record: EvalRecord) -> dict[str, Any] | None:
    path = record.folder / SWEEP_FILE if record.folder else None
    return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else None


def _params(setting: HeadSetting, epoch: int) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": float(f"{setting.lr:.6g}"), "epoch": epoch}
    if setting.optimizer != "sgd":
        params["optimizer"] = setting.optimizer
    if setting.weight_decay:
        params["weight_decay"] = setting.weight_decay
    return params
