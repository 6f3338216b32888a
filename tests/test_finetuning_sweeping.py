"""Sweeps: which runs they stand for, what they choose, and that a broken-off sweep ends as one that never stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from filelock import FileLock

from ibot_eval.errors import ConfigError, DataError
from ibot_eval.finetuning.config import FinetuneConfig
from ibot_eval.finetuning.sweeping import run_sweep, sweep_figures
from ibot_eval.finetuning.trials import Trial, parse_sweep, with_held_out
from ibot_eval.protocol import Artifact, Event, Metric, Predictions, Warning
from ibot_eval.record import EvalRecord, save_predictions
from ibot_eval.training.finite import NotFinite
from tests.ranks import Running

RATES = ("lr=8e-4,9e-4,1e-3,2e-3",)
HELD_OUT = {0.0008: 70.0, 0.0009: 72.5, 0.001: 72.5, 0.002: 60.0}
"""What each learning rate reaches; two are equally good."""
ON_TEST = {0.0008: 68.0, 0.0009: 66.0, 0.001: 65.0, 0.002: 69.0}


@dataclass(frozen=True)
class Settings:
    """Settings of a protocol that only pretends to train."""

    sweep: tuple[str, ...] = ()
    """As finetune's."""
    hold_out: float = 0.0
    """As finetune's."""
    lr: float = 1e-3
    """Of which its result depends."""
    drop_path: float | None = None
    """A second one."""
    epochs: int = 3
    """One that is not swept."""
    pooling: Literal["cls", "mean"] = "cls"
    """A choice."""
    ema: bool = False
    """A switch."""
    auto_augment: str | None = "rand-m9"
    """A text."""
    keep: int = 3
    """One that may change."""
    scale: tuple[float, float] = (0.08, 1.0)
    """A pair."""


TRIALS = parse_sweep(RATES, Settings)


def names(*texts: str) -> list[str]:
    return [trial.name for trial in parse_sweep(texts, Settings)]


def test_a_sweep_stands_for_every_combination() -> None:
    assert names(*RATES) == ["lr-0.0008", "lr-0.0009", "lr-0.001", "lr-0.002"]
    trials = parse_sweep(["lr=1e-3,2e-3", "drop-path=none,0.1", "pooling=mean"], Settings)
    assert [dict(trial.changes) for trial in trials] == [
        {"lr": lr, "drop_path": path, "pooling": "mean"} for lr in (1e-3, 2e-3) for path in (None, 0.1)
    ]
    assert trials[1].name == "lr-0.001_drop_path-0.1_pooling-mean"
    assert parse_sweep(["ema=true,false", "epochs=5"], Settings)[0].changes == {"ema": True, "epochs": 5}
    assert names("auto_augment=rand-m9/inc1,none") == ["auto_augment-rand-m9_inc1", "auto_augment-None"]
    assert parse_sweep([], Settings) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning=1", "'learning' is not a setting"),
        ("sweep=lr", "'sweep' is not a setting that can be swept"),
        ("hold_out=0.1", "cannot be|not a setting that can be swept"),
        ("scale=0.1", "scale takes several values at once, so it cannot be swept"),
        ("sacle=0.1", "(?s)'sacle' is not a setting(?!.*scale)"),
        ("lr", "'' is no value of lr"),
        ("lr=1e-3,", "'' is no value of lr"),
        ("lr=fast", "'fast' is no value of lr"),
        ("lr=nan", "'nan' is no value of lr"),
        ("lr=none", "'none' is no value of lr"),
        ("epochs=1.5", "'1.5' is no value of epochs"),
        ("pooling=max", "'max' is no value of pooling"),
        ("ema=1", "'1' is no value of ema"),
        ("lr=1e-3,0.001", "a value twice"),
    ],
)
def test_what_cannot_be_swept_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sweep([text], Settings)


def test_values_that_differ_little_have_runs_of_their_own() -> None:
    names = [trial.name for trial in parse_sweep(["lr=1e-3,1.0000001e-3"], FinetuneConfig)]
    assert names == ["lr-0.001", "lr-0.0010000001"]


def test_runs_that_would_share_a_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match="several runs would be called auto_augment-a_b"):
        parse_sweep(["auto_augment=a/b,a_b"], FinetuneConfig)


def test_one_setting_cannot_be_given_twice() -> None:
    with pytest.raises(ConfigError, match="gives lr twice"):
        parse_sweep(["lr=1", "lr=2"], Settings)


def test_a_sweep_holds_images_out() -> None:
    assert with_held_out(Settings(sweep=RATES), frozenset()).hold_out == 0.1
    assert with_held_out(Settings(sweep=RATES, hold_out=0.2), frozenset({"hold_out"})).hold_out == 0.2
    assert with_held_out(Settings(), frozenset()).hold_out == 0
    with pytest.raises(ConfigError, match="--hold-out 0 holds none out"):
        with_held_out(Settings(sweep=RATES), frozenset({"hold_out"}))


def test_a_sweep_of_nothing_is_refused_and_none_is_no_sweep() -> None:
    """The latter takes back the sweep of a recipe."""
    with pytest.raises(ConfigError, match="--sweep names no setting"):
        with_held_out(Settings(), frozenset({"sweep"}))
    assert with_held_out(Settings(sweep=("none",)), frozenset({"sweep"})) == Settings()
    assert parse_sweep(("none",), Settings) == []


class Trainer:
    """Stands for the training of one run: writes a record as the runner would, and can be made to fail."""

    def __init__(self, folder: Path, *, dies_in: float | None = None, raises: dict[float, Any] | None = None):
        self.folder, self.dies_in, self.raises = folder / "sweep", dies_in, raises or {}
        self.begun: list[str] = []

    def __call__(self, trial: Trial) -> None:
        folder, lr = self.folder / trial.name, trial.changes["lr"]
        self.begun.append(trial.name)
        record = EvalRecord(trial.name, "fake", 1, primary="top1")
        record.save(folder)
        if lr == self.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        if lr in self.raises:
            record.status = "error"
            record.error = {"kind": type(self.raises[lr]).__name__, "message": str(self.raises[lr])}
            record.save(folder)
            raise self.raises[lr]
        record.status, record.warnings = "success", [f"of {lr:g}"]
        values: dict[str, tuple[float, dict[str, Any]]] = {
            "top1": (ON_TEST[lr], {"held_out_top1": HELD_OUT[lr], "epoch": 3}),
            "top5": (90.0, {}),
            "top1_best_on_test": (ON_TEST[lr] + 1, {"epoch": 2}),
        }
        record.metrics = [metric(name, value, params) for name, (value, params) in values.items()]
        record.metrics += [metric("per_class_top1", 10.0 * index, {"class": str(index)}) for index in range(3)]
        save_predictions(folder / "predictions.npz", ["a", "b"], {"top1": np.array([0, int(1000 * lr)])})
        (folder / "classifier.safetensors").write_text(f"{lr:g}")
        record.artifacts = [
            {"path": "predictions.npz", "kind": "predictions"},
            {"path": "classifier.safetensors", "kind": "checkpoint"},
        ]
        record.save(folder)


def metric(name: str, value: float, params: dict[str, Any]) -> dict[str, Any]:
    interval = [value - 1, value + 1] if name == "top1" else None
    rest = {"unit": "%", "higher_is_better": True, "n": 2, "interval": interval, "published": None}
    return {"name": name, "value": value, "params": params, **rest}


def run(
    folder: Path, trainer: Trainer, trials: Sequence[Trial] = TRIALS, identity: dict[str, Any] | None = None
) -> list[Event]:
    folder.mkdir(exist_ok=True)
    return list(run_sweep(trials, trainer, folder, identity or {"epochs": 3}))


def test_held_out_images_choose_and_the_best_on_test_stands_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two that are equally good the first: 0.0009. On test 0.002 is the best."""
    events = run(tmp_path / "run", Trainer(tmp_path / "run"))
    metrics = [event for event in events if isinstance(event, Metric)]
    first, _, *classes, best = metrics
    assert [m.name for m in metrics] == ["top1", "top5", *["per_class_top1"] * 3, "top1_best_on_test"]
    assert (first.value, first.interval, first.n) == (66.0, (65.0, 67.0), 2)
    assert first.params == {"lr": 0.0009, "held_out_top1": 72.5, "epoch": 3}
    assert [m.params for m in classes] == [{"class": str(index)} for index in range(3)]
    assert (best.value, best.params) == (70.0, {"lr": 0.002, "epoch": 2})
    (predictions,) = [event for event in events if isinstance(event, Predictions)]
    assert predictions.image_ids == ["a", "b"]
    assert predictions.values["top1"].tolist() == [0, 0]
    files = [(event.kind, event.path.read_text()) for event in events if isinstance(event, Artifact)]
    assert files[0] == ("checkpoint", "0.0009")
    assert [event.message for event in events if isinstance(event, Warning)] == ["of 0.0009"]
    rows = json.loads(files[1][1])["runs"]
    assert [row["held_out_top1"] for row in rows] == list(HELD_OUT.values())
    assert [row["top1"] for row in rows] == list(ON_TEST.values())
    assert [row["run"] for row in rows if row["chosen"]] == ["lr-0.0009"]
    printed = capsys.readouterr().err
    assert "sweep: lr-0.002 (4 of 4)" in printed
    (line,) = [line for line in printed.splitlines() if line.endswith("chosen")]
    assert line.split() == ["0.0009", "72.50", "66.00", "67.00", "chosen"]


def test_runs_that_have_ended_are_not_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first, again, more = Trainer(folder), Trainer(folder), Trainer(folder)
    events = run(folder, first, TRIALS[:2])
    assert [str(event) for event in run(folder, again, TRIALS[:2])] == [str(event) for event in events]
    run(folder, more)
    assert (first.begun, again.begun, more.begun) == (names(*RATES)[:2], [], names(*RATES)[2:])


def killed_sweep(folder: str, dies_in: float) -> None:
    run(Path(folder), Trainer(Path(folder), dies_in=dies_in))


def test_a_killed_sweep_that_is_gone_on_with_ends_with_the_same_table(tmp_path: Path) -> None:
    wanted = run(tmp_path / "whole", Trainer(tmp_path / "whole"))
    folder = tmp_path / "killed"
    assert Running(killed_sweep, str(folder), 0.001).done().code == -signal.SIGKILL
    assert not (folder / "sweep.json").exists()
    trainer = Trainer(folder)
    events = run(folder, trainer)
    assert trainer.begun == ["lr-0.001", "lr-0.002"]
    assert (folder / "sweep.json").read_bytes() == (tmp_path / "whole" / "sweep.json").read_bytes()
    metrics = [[event for event in one if isinstance(event, Metric)] for one in (wanted, events)]
    assert metrics[0] == metrics[1]


def test_a_run_that_diverges_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also when the sweep is gone on with: it would diverge again."""
    folder = tmp_path / "run"
    trainer = Trainer(folder, raises={0.0009: NotFinite("the loss is NaN at step 7")})
    events = run(folder, trainer)
    top1 = next(event for event in events if isinstance(event, Metric))
    assert top1.params["lr"] == 0.001
    assert "runs of the sweep that diverged and cannot be chosen: lr-0.0009" in str(events)
    assert "lr-0.0009 diverged: the loss is NaN at step 7" in capsys.readouterr().err
    again = Trainer(folder)
    assert [str(event) for event in run(folder, again)] == [str(event) for event in events]
    assert again.begun == []
    everywhere = Trainer(tmp_path / "all", raises={lr: NotFinite("the loss is NaN") for lr in HELD_OUT})
    with pytest.raises(ConfigError, match="all 4 runs of the sweep diverged"):
        run(tmp_path / "all", everywhere)


@pytest.mark.parametrize("error", [DataError("no such image"), KeyboardInterrupt("stopped"), ZeroDivisionError("oh")])
def test_anything_else_ends_the_sweep_which_can_be_gone_on_with(tmp_path: Path, error: BaseException) -> None:
    folder = tmp_path / "run"
    with pytest.raises(type(error), match=str(error)):
        run(folder, Trainer(folder, raises={0.0009: error}))
    trainer = Trainer(folder)
    run(folder, trainer)
    assert trainer.begun == ["lr-0.0009", "lr-0.001", "lr-0.002"]


def test_other_settings_are_refused_and_so_is_a_second_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, Trainer(folder), TRIALS[:1])
    with pytest.raises(ConfigError, match="epochs \\(was 3, now 4\\)"):
        run(folder, Trainer(folder), identity={"epochs": 4})
    with FileLock(folder / ".lock"), pytest.raises(ConfigError, match="another process"):
        run(folder, Trainer(folder))


def test_a_test_image_may_be_replaced_until_a_run_has_been_tested(tmp_path: Path) -> None:
    folder, images = tmp_path / "run", [{"images": {"train": "a", "test": test}} for test in "bcd"]
    with pytest.raises(DataError):
        run(folder, Trainer(folder, raises={0.0008: DataError("a broken test image")}), identity=images[0])
    run(folder, Trainer(folder), TRIALS[:1], identity=images[1])
    run(folder, Trainer(folder), identity=images[1])
    with pytest.raises(ConfigError, match=r"images\.test"):
        run(folder, Trainer(folder), identity=images[2])


def test_the_sweep_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, Trainer(folder, raises={0.0008: NotFinite("NaN")}))
    record = EvalRecord("run", "fake", 1)
    record.save(folder)
    (axes,) = sweep_figures(record)["accuracy_by_setting"].axes
    held, test = [np.asarray(line.get_ydata()).tolist() for line in axes.lines[:2]]
    assert held == [72.5, 72.5, 60.0]
    assert test == [66.0, 65.0, 69.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == names(*RATES)
    assert sweep_figures(EvalRecord("other", "fake", 1)) == {}


def test_runs_that_are_given_beside_their_sweep_are_drawn_once(tmp_path: Path) -> None:
    """As `ibot-eval plot` gives them for the sweep's folder."""
    folder = tmp_path / "run"
    run(folder, Trainer(folder))
    EvalRecord("run", "fake", 1).save(folder)
    for name in names(*RATES):
        (folder / "sweep" / name / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    records = [EvalRecord.load(path) for path in (folder, *(folder / "sweep" / name for name in names(*RATES)))]
    assert len(sweep_figures(*records)["learning_curve"].axes[0].lines) == 2 * len(TRIALS)
