"""Sweeps through the runner: records, ranks, and real training that is killed and gone on with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ibot_eval import distributed, runner
from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.finetuning.sweeping import sweep
from ibot_eval.finetuning.trials import with_held_out
from ibot_eval.protocol import EvalProtocol, Event, Metric, Session, Warning
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings
from protocols.finetune import Finetune, FinetuneConfig
from tests.ranks import Running, run_ranks
from tests.test_finetuning_sweeping import Settings


class Faltering(EvalProtocol[Settings]):
    """Fails half-way at one learning rate, and goes on from there."""

    config_type, version, primary, resumable = Settings, 1, "top1", True

    def __init__(self, config: Settings) -> None:
        super().__init__(config)
        if config.lr > 1:
            raise ConfigError(f"lr {config.lr:g} is too high")

    def for_network(self, backbone: Backbone, transform: Any, asked: frozenset[str]) -> Faltering:
        return Faltering(with_held_out(self.config, asked))

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        if self.config.sweep:
            yield from sweep("faltering", Faltering, self.config, session, may_change=("keep",))
            return
        state = session.output / "state"
        if self.config.lr == 0.5 and not distributed.from_main(state.exists):
            distributed.from_main(lambda: state.write_text("half"))
            raise DataError("stopped half-way")
        params = {"held_out_top1": 50 + self.config.lr, "hold_out": self.config.hold_out}
        yield Warning("a remark")
        yield Metric("top1", 50.0, params=params, n=1)
        yield Metric("top1_best_on_test", 51.0)


def whole_run(folder: str, *texts: str, **changes: Any) -> EvalRecord:
    settings = RunSettings(
        CheckpointSettings(ckpt="demo"),
        DataSettings(data="demo", train_per_class=changes.pop("per_class", 4), test_per_class=2),
        EngineSettings(device="cpu", workers=0, seed=changes.pop("seed", 0)),
        OutputSettings(output=Path(folder), name="run"),
    )
    return runner.run("faltering", Faltering(replace(Settings(sweep=texts), **changes)), settings)


def test_every_run_has_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="half-way"):
        whole_run(str(tmp_path), "lr=0.25,0.5")
    capsys.readouterr()
    record = whole_run(str(tmp_path), "lr=0.25,0.5", keep=1)
    runs = [EvalRecord.load(tmp_path / "run" / "sweep" / name) for name in ("lr-0.25", "lr-0.5")]
    assert [one.run for one in runs] == ["run/sweep/lr-0.25", "run/sweep/lr-0.5"]
    assert [one.config["lr"] for one in runs] == [0.25, 0.5]
    assert runs[0].metrics[0]["params"]["hold_out"] == 0.1
    assert record.config["hold_out"] == 0.1
    assert record.metrics[0]["params"]["lr"] == 0.5
    # What there is to say about network and data is said once, by the run that the user started.
    *others, last = record.warnings
    assert others == [*runs[0].warnings[:-1], "a remark"]
    assert "has not learnt from the 10 % of train that it was chosen on" in last
    printed = capsys.readouterr().err
    assert "lr-0.25 (1 of 2) has been run before" in printed
    assert printed.count("the demonstration network") == 1


def test_a_run_that_was_killed_before_its_record_was_there_starts_anew(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match="half-way"):
            whole_run(str(tmp_path), "lr=0.5")
        (tmp_path / "run" / "sweep" / "lr-0.5" / "record.json").unlink()
    assert (tmp_path / "run" / "sweep" / "lr-0.5" / "state").exists()


def test_what_cannot_be_run_is_refused_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lr 2 is too high"):
        whole_run(str(tmp_path), "lr=0.25,2")
    assert not (tmp_path / "run" / "sweep").exists()
    with pytest.raises(ConfigError, match="no image of train can be held out"):
        whole_run(str(tmp_path), "lr=0.25", per_class=1)
    whole_run(str(tmp_path), "lr=0.25")
    with pytest.raises(ConfigError, match="exists already"):
        whole_run(str(tmp_path), "lr=0.25")


def test_a_sweep_is_not_gone_on_with_under_another_seed(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        whole_run(str(tmp_path), "lr=0.5")
    with pytest.raises(ConfigError, match="seed \\(was 0, now 1\\)"):
        whole_run(str(tmp_path), "lr=0.5", seed=1)


def ranks_run(folder: str) -> list[Any]:
    """After one rank alone failed."""
    failed = ""
    try:
        whole_run(folder, "lr=0.25,0.5")
    except DataError as error:
        failed = error.what
    record = whole_run(folder, "lr=0.25,0.5")
    return [failed, record.metrics]


def test_ranks_agree(tmp_path: Path) -> None:
    one, other = run_ranks(2, ranks_run, str(tmp_path))
    assert one == other
    assert one[0] == "stopped half-way"


def digits_sweep(folder: str, name: str, dies_in: int | None = None) -> None:
    """Two learning rates, of four steps each; SIGKILL in the middle of step ``dies_in`` of all eight."""
    calls, step = iter(range(1, 100)), torch.optim.AdamW.step

    def dying(self: torch.optim.AdamW, *arguments: Any, **named: Any) -> Any:
        if next(calls) == dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments, **named)

    config = FinetuneConfig(
        epochs=2, train_batch=18, scale_lr=False, warmup_epochs=0, sweep=("lr=3e-3,1e-3",), hold_out=0.1, save_minutes=0
    )
    settings = RunSettings(
        CheckpointSettings(ckpt="demo"),
        DataSettings(data="demo", train_per_class=5, test_per_class=3),
        EngineSettings(device="cpu", workers=0),
        OutputSettings(output=Path(folder), name=name),
    )
    with mock.patch.object(torch.optim.AdamW, "step", dying):
        runner.run("finetune", Finetune(config), settings)


def killed_and_whole(folder: str) -> None:
    digits_sweep(folder, "killed")
    digits_sweep(folder, "whole")


def test_a_killed_sweep_of_real_training_ends_with_the_same_table(tmp_path: Path) -> None:
    """Killed in the second run, after its first state was saved."""
    killed = Running(digits_sweep, str(tmp_path), "killed", 7).done()
    assert killed.code == -signal.SIGKILL, killed.stderr
    assert EvalRecord.load(tmp_path / "killed" / "sweep" / "lr-0.003").status == "success"
    assert list((tmp_path / "killed" / "sweep" / "lr-0.001" / "checkpoints").iterdir())
    done = Running(killed_and_whole, str(tmp_path)).done(120)
    assert done.code == 0, done.stderr
    assert "lr-0.003 (1 of 2) has been run before" in done.stderr
    assert "resumed after step 2 of 4" in done.stderr
    one, other = (EvalRecord.load(tmp_path / name) for name in ("killed", "whole"))
    assert one.status == other.status == "success"
    assert one.metrics == other.metrics
    assert one.warnings == other.warnings
    names = {metric["name"] for metric in one.metrics}
    assert names == {"top1", "top5", "top1_best_on_test", "per_class_top1"}
    for file in ("sweep.json", "sweep/lr-0.001/classifier.safetensors"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    tables = [load_predictions(tmp_path / name / "predictions.npz") for name in ("killed", "whole")]
    assert all(np.array_equal(tables[0][column], tables[1][column]) for column in ("image_ids", "label", "top1"))
    rows = json.loads((tmp_path / "killed" / "sweep.json").read_text())["runs"]
    chosen = next(f"sweep/{row['run']}" for row in rows if row["chosen"])
    files = ["predictions.npz", f"{chosen}/classifier.safetensors", f"{chosen}/log.jsonl", "sweep.json"]
    assert [artifact["path"] for artifact in one.artifacts] == files
    drawn = Finetune.figures(one)
    assert set(drawn) == {"accuracy_by_setting", "confusion", "learning_curve"}
    curves = [text.get_text() for text in drawn["learning_curve"].legends[0].get_texts()]
    assert curves == ["lr-0.003", "lr-0.001"]
