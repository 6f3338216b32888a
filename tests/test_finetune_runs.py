"""finetune broken off and gone on with, and on several processes."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from ibot_eval.errors import BadImage, CheckpointError, ConfigError
from ibot_eval.finetuning.config import MAY_CHANGE
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.training.logs import read_log
from tests.finetuning_runs import (
    CONFIG,
    Colours,
    Failed,
    broken_off,
    demo_run,
    disturbed,
    labels,
    metrics,
    on_ranks,
    run,
    session,
)
from tests.ranks import Running, run_ranks

TIMES = {"images_per_second", "data_wait", "peak_memory_gb"}
UNMIXED = {"mixup": 0.0, "cutmix": 0.0, "drop_path": 0.0}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Three runs of six steps: never stopped, killed in the fifth step and gone on with, stopped in the third."""
    folder = tmp_path_factory.mktemp("series")
    killed = Running(demo_run, str(folder), "killed", 5).done(180)
    assert killed.code == -signal.SIGKILL, killed.stderr
    shutil.copytree(folder / "killed", folder / "copy")
    done = Running(broken_off, str(folder)).done(180)
    assert done.code == 0, done.stderr
    demo_run(str(folder), "whole")
    demo_run(str(folder), "killed", workers=1)
    return folder, done.value, done.stderr


@pytest.mark.parametrize("name", ["killed", "terminated"])
def test_a_run_gone_on_with_is_the_run_that_never_stopped(series: Any, name: str) -> None:
    """With mixing, stochastic depth, a moving average and held-out images, to the last bit."""
    folder = series[0]
    one, other = (EvalRecord.load(folder / n) for n in ("whole", name))
    assert one.status == other.status == "success"
    assert one.metrics == other.metrics
    assert one.warnings == other.warnings
    weights = [load_file(folder / n / "classifier.safetensors") for n in ("whole", name)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
    tables = [load_predictions(folder / n / "predictions.npz") for n in ("whole", name)]
    for column in ("image_ids", "label", "top1"):
        np.testing.assert_array_equal(tables[0][column], tables[1][column])
    logs = [
        [{k: v for k, v in row.items() if k not in TIMES} for row in read_log(folder / n / "log.jsonl")]
        for n in ("whole", name)
    ]
    assert logs[0] == logs[1]
    assert [row["step"] for row in logs[0]] == [1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_states_and_messages(series: Any) -> None:
    folder, said, stderr = series
    states = sorted(path.name for path in (folder / "copy" / "checkpoints").iterdir())
    assert states
    assert states[-1] < "step_00000005.pt"
    assert EvalRecord.load(folder / "copy").status == "interrupted"
    assert said == "stopped after step 3 of 6; the same command goes on from there"
    assert "resumed after step 3 of 6" in stderr
    for name in ("whole", "killed", "terminated"):
        assert not (folder / name / "checkpoints").exists()
    with pytest.raises(ConfigError, match="exists already"):
        demo_run(str(folder), "whole")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 4}, r"epochs \(was 3, now 4\)"),
        ({"layer_decay": 0.6}, r"layer_decay \(was 0.75, now 0.6\)"),
        ({"seed": 1}, r"seed \(was 0, now 1\)"),
        ({"train_per_class": 6}, r"images\.train"),
        ({"precision": "bf16"}, r"precision \(was 'fp32', now 'bf16'\)"),
    ],
)
def test_other_settings_or_data_are_refused(series: Any, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    shutil.copytree(series[0] / "copy", tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    with pytest.raises(ConfigError, match=said):
        demo_run(str(tmp_path), "run", **changes)
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()} == before


def test_another_number_of_classes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = Colours(labels(9), "test")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    run(CONFIG, session(tmp_path / "run", Colours(labels(21)), test))
    with pytest.raises(ConfigError, match=r"classes \(was 3, now 4\)"):
        run(CONFIG, session(tmp_path / "run", Colours(labels(21, 4)), test))
    with pytest.raises(ConfigError, match=r"checkpoint\.sha256"):
        run(CONFIG, session(tmp_path / "run", Colours(labels(21)), test, sha256="b" * 64))


def test_what_does_not_matter_may_change(series: Any, tmp_path: Path) -> None:
    shutil.copytree(series[0] / "copy", tmp_path / "run")
    changes = {"log_every": 5, "keep": 1, "save_minutes": 100, "checkpoint_blocks": True}
    assert changes.keys() < MAY_CHANGE
    demo_run(str(tmp_path), "run", **changes)
    assert EvalRecord.load(tmp_path / "run").metrics == EvalRecord.load(series[0] / "whole").metrics


def test_a_run_that_met_a_broken_test_image_goes_on(tmp_path: Path) -> None:
    """Once its file is replaced, or with --bad-images skip; but not on other images that have been tested on."""
    config, train = replace(CONFIG, save_minutes=0), Colours(labels(21))
    test, broken = Colours(labels(9), "test"), Colours(labels(10), "test", bad=[4])
    for name in ("replaced", "skipped"):
        with pytest.raises(BadImage, match=r"test/004\.png"):
            run(config, session(tmp_path / name, train, broken))
        assert len(list((tmp_path / name / "checkpoints").iterdir())) > 0
    with disturbed(5), pytest.raises(Failed):
        run(config, session(tmp_path / "replaced", train, test))
    with pytest.raises(ConfigError, match=r"images\.test"):
        run(config, session(tmp_path / "replaced", train, broken))
    whole = [run(config, session(tmp_path / f"whole {bad}", train, test, bad_images=bad)) for bad in ("stop", "skip")]
    assert metrics(run(config, session(tmp_path / "replaced", train, test))) == metrics(whole[0])
    skipped = metrics(run(config, session(tmp_path / "skipped", train, broken, bad_images="skip")))
    assert skipped["top1"].n == 9
    weights = [load_file(tmp_path / name / "classifier.safetensors") for name in ("skipped", "whole skip")]
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())


def test_a_state_of_another_version_is_refused(series: Any, tmp_path: Path) -> None:
    shutil.copytree(series[0] / "copy", tmp_path / "run")
    path = max((tmp_path / "run" / "checkpoints").iterdir())
    torch.save(torch.load(path, weights_only=True) | {"format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99"):
        demo_run(str(tmp_path), "run")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    where = session(tmp_path, Colours(labels(21)), Colours(labels(9), "test"))
    with FileLock(tmp_path / ".lock"), pytest.raises(ConfigError, match="another process"):
        run(CONFIG, where)


def near(one: Path, other: Path) -> None:
    """The classifiers of two runs, but for biases of keys, whose gradient is rounding."""
    weights, others = (load_file(folder / "classifier.safetensors") for folder in (one, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        rows = [*range(48), *range(96, 144)] if name.endswith("qkv.bias") else slice(None)
        torch.testing.assert_close(tensor[rows], others[name][rows], rtol=1e-3, atol=2e-5)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Batches of four on one process, of two on each of two; an unreadable image among them."""
    changes = {**UNMIXED, "bad": [5], "clip_grad": 0.5}
    one = on_ranks(str(tmp_path / "one"), False, None, changes)
    two = run_ranks(2, on_ranks, str(tmp_path / "two"), False, 4, changes | {"train_batch": 2}, timeout=240)
    assert two[0] == two[1]
    assert two[0] == one
    near(tmp_path / "one", tmp_path / "two")


def test_shared_out_weights_train_as_copies(tmp_path: Path) -> None:
    """Also broken off, and with the best epoch of held-out images."""
    changes = {"hold_out": 0.2, "clip_grad": 0.5}
    copies = run_ranks(2, on_ranks, str(tmp_path / "copies"), False, None, changes, timeout=240)
    shared = run_ranks(2, on_ranks, str(tmp_path / "shared"), True, 4, changes, timeout=240)
    assert shared[0] == shared[1]
    assert copies[0] == shared[0]
    near(tmp_path / "copies", tmp_path / "shared")


def test_ranks_stop_together(tmp_path: Path) -> None:
    """One image that cannot be read ends all ranks, with its name."""
    results = run_ranks(2, on_ranks, str(tmp_path), False, None, {"bad": [5], "bad_images": "stop"}, timeout=240)
    assert results[0] == results[1] == {"error": "train/005.png cannot be decoded"}
