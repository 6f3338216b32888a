"""``ibot-eval pretrain``: bad input, what is left of a run that failed, and what the files of a good one are for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from ibot_eval.checkpoint import load_checkpoint
from ibot_eval.errors import BadImage
from ibot_eval.record import SCHEMA_FILE
from ibot_eval.settings import CheckpointSettings
from ibot_eval.training.logs import read_log
from pretrain import ibot
from pretrain import run as runs
from pretrain import train as loop
from tests import images
from tests.pretraining import FLAGS, run

SHORT = [*FLAGS, "--epochs", "1", "--batch-size", "4", "--log-every", "1"]
"""Seven steps."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("finished")
    done = run(folder, *SHORT, "--name", "good", "--knn-every", "1", "--knn-per-class", "2", "--json")
    assert done["code"] == 0, done["stderr"]
    return folder / "runs" / "good", done


def record_of(run_folder: Path) -> dict[str, Any]:
    """A record that keeps to the schema."""
    record = json.loads((run_folder / "record.json").read_text())
    jsonschema.validate(record, json.loads(SCHEMA_FILE.read_text()))
    return record


def failed(folder: Path, *flags: object) -> str:
    """What the command says of a mistake; without a traceback."""
    done = run(folder, *SHORT, "--name", "bad", *flags)
    assert done["code"] == 2
    assert "Traceback" not in done["stderr"]
    return done["stderr"] + done["stdout"]


def test_record_of_a_good_run(finished: Any) -> None:
    folder, done = finished
    record = record_of(folder)
    assert json.loads(done["stdout"]) == record
    assert (record["protocol"], record["status"], record["primary"]) == ("pretrain", "success", "knn_top1")
    metrics = {metric["name"]: metric["value"] for metric in record["metrics"]}
    rows = read_log(folder / "log.jsonl")
    assert metrics["knn_top1"] == rows[-1]["knn_top1"]
    assert metrics["cls_loss"] == next(row["cls_loss"] for row in reversed(rows) if "cls_loss" in row)
    assert all(0 <= metrics[name] <= 100 for name in ("nmi", "fmi", "agreement", "mfu"))
    assert record["config"]["prototypes"] == 32
    assert record["data"]["splits"]["train"]["images"] == 30
    assert {item["path"] for item in record["artifacts"]} >= {"teacher.safetensors", "log.jsonl"}
    assert all((folder / item["path"]).exists() for item in record["artifacts"])


def test_run_folder_is_a_checkpoint(finished: Any) -> None:
    folder, _ = finished
    state = torch.load(folder / "checkpoints" / "step_00000007.pt", weights_only=True)
    for key, role in ((None, "teacher"), ("student", "student")):
        loaded = load_checkpoint(CheckpointSettings(ckpt=str(folder), key=key))
        wanted = state[role]
        backbone, head = loaded.backbone.state_dict(), loaded.projection_head
        assert all(torch.equal(tensor, wanted[f"trunk.backbone.{name}"]) for name, tensor in backbone.items())
        assert head is not None
        assert all(torch.equal(tensor, wanted[f"head.{name}"]) for name, tensor in head.state_dict().items())
        assert (loaded.backbone.num_heads, loaded.backbone.patch_size) == (3, 8)
        assert (loaded.masked_embed is None) == (role == "teacher")
    assert not torch.equal(state["student"]["head.mlp.0.weight"], state["teacher"]["head.mlp.0.weight"])


def test_knn_on_the_run(finished: Any) -> None:
    """The protocol finds what the probe found in training, on the same images."""
    folder, _ = finished
    few = ["--train-per-class", "2", "--test-per-class", "2", "--crop", "32", "--resize", "32"]
    done = run(folder, "--ckpt", folder, "--data", "demo", *few, "--json", "--device", "cpu", command="knn")
    assert done["code"] == 0, done["stderr"]
    found = {(m["name"], m["params"].get("k")): m["value"] for m in json.loads(done["stdout"])["metrics"]}
    logged = read_log(folder / "log.jsonl")[-1]
    assert found["top1", 20] == pytest.approx(logged["knn_top1"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch-size", "64"], r"30 images, fewer than one batch of 64(.|\n)*--batch-size 30"),
        (["--batch-size", "8", "--accumulate", "4"], r"30 images, fewer than one batch"),
        (["--patch-size", "7", "--local-crops", "0"], r"--global-size 32 is not a multiple of the patch size 7"),
        (["--prototypes", "0"], r"--prototypes 0: at least 1"),
        (["--global-size", "36", "--patch-size", "8"], r"36 is not a multiple"),
        (["--local-size", "20"], r"--local-size 20 is not a multiple of the patch size 8"),
        (["--pred-ratio", "0.3", "0.1"], r"."),
        (["--pred-ratio", "0.9"], r"mask ratio|variance"),
        (["--seed", "-1"], r"--seed -1 is out of range"),
        (["--data", "nowhere"], r"nowhere"),
        (["--tokenizer", "nowhere.pth"], r"nowhere\.pth"),
        (["--local-scale", "0.5", "0.2"], r"local_scale|--local-scale"),
        (["--knn-every", "1", "--knn-per-class", "0"], r"--knn-per-class 0: at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_explained(flags: list[str], said: str, tmp_path: Path) -> None:
    assert re.search(said, failed(tmp_path, *flags))
    if (tmp_path / "runs" / "bad").exists():
        record = record_of(tmp_path / "runs" / "bad")
        assert record["status"] == "error"
        assert re.search(said, record["error"]["message"])
        assert not (tmp_path / "runs" / "bad" / "teacher.safetensors").exists()


def test_recipe_with_an_unknown_key(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("epochs: 3\nprototype: 64\n")
    told = failed(tmp_path, "--recipe", "mine.yaml")
    assert "prototype" in told
    assert not (tmp_path / "runs").exists()


def test_recipe_gives_way_to_flags(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("epochs: 3\nhead_typo: 1\n")
    assert "head" in failed(tmp_path, "--recipe", "mine.yaml")
    (tmp_path / "mine.yaml").write_text("epochs: 3\nstudent_temp: 0.2\n")
    done = run(tmp_path, "--recipe", "mine.yaml", *SHORT, "--name", "good")
    assert done["code"] == 0, done["stderr"]
    config = record_of(tmp_path / "runs" / "good")["config"]
    assert (config["epochs"], config["student_temp"]) == (1, 0.2)


def test_unlabelled_images_smaller_than_a_crop(tmp_path: Path) -> None:
    for i, (height, width) in enumerate([(5, 9), (1, 1), (40, 3), (16, 16)]):
        images.save(tmp_path / "photos" / f"{i}.png", images.picture(height, width, seed=i))
    flags = [*SHORT, "--data", "photos", "--train-split", ".", "--batch-size", "2", "--name", "flat"]
    del flags[flags.index("--train-per-class") : flags.index("--train-per-class") + 2]
    done = run(tmp_path, *flags)
    assert done["code"] == 0, done["stderr"]
    record = record_of(tmp_path / "runs" / "flat")
    assert record["data"]["splits"]["train"]["images"] == 4
    assert not {"nmi", "ari", "fmi", "knn_top1"} & {metric["name"] for metric in record["metrics"]}
    rows = read_log(tmp_path / "runs" / "flat" / "log.jsonl")
    assert [row["step"] for row in rows if "event" not in row] == [1, 2]
    assert "agreement" in rows[-1]
    assert "nmi" not in rows[-1]
    # The evaluation that needs labels is refused before the first step.
    again = run(tmp_path, *flags, "--name", "watched", "--knn-every", "1")
    assert again["code"] == 2


def test_small_ratio_and_batch_of_one(tmp_path: Path) -> None:
    flags = ["--pred-ratio", "0.05", "--pred-ratio-var", "0", "--batch-size", "1", "--train-per-class", "1"]
    fractions = []
    for name, more in (("plain", []), ("sure", ["--mask-at-least-one"])):
        done = run(tmp_path, *SHORT, *flags, "--name", name, *more)
        assert done["code"] == 0, done["stderr"]
        rows = [row for row in read_log(tmp_path / "runs" / name / "log.jsonl") if "event" not in row]
        assert len(rows) == 10
        assert all(row["loss"] is not None for row in rows)
        fractions.append([row["mask_fraction"] for row in rows])
        for row in rows:
            assert (row["patch_loss_per_token"] is None) == (row["mask_fraction"] == 0)
    # Of 4 x 4 patches 5 % is less than one: blocks never fit.
    assert fractions == [[0.0] * 10, [1 / 16] * 10]


def test_loss_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, calls = ibot.patch_losses, iter(range(1, 100))

    def broken(*arguments: Any) -> torch.Tensor:
        # One more call came before the first step, to count the work.
        return losses(*arguments) * (float("nan") if next(calls) == 6 else 1)

    monkeypatch.setattr(ibot, "patch_losses", broken)
    told = failed(tmp_path, "--save-steps", "2")
    assert "the patch loss is NaN or infinite at step 5" in told
    folder = tmp_path / "runs" / "bad"
    record = record_of(folder)
    assert (record["status"], record["error"]["kind"]) == ("error", "NotFinite")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000002.pt", "step_00000004.pt"]
    state = torch.load(folder / "checkpoints" / "step_00000004.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in state["student"].values())
    assert [row["step"] for row in read_log(folder / "log.jsonl")] == [1, 2, 3, 4]
    # And the run goes on from there.
    done = run(tmp_path, *SHORT, "--save-steps", "2", "--name", "bad", "--resume", "auto")
    assert done["code"] == 0, done["stderr"]
    assert record_of(folder)["status"] == "success"


def test_an_evaluation_that_fails_costs_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> dict[str, float]:
        raise BadImage("test/3.png cannot be decoded")

    watched = ["--epochs", "2", "--knn-every", "1", "--knn-per-class", "2", "--save-every", "5"]
    with monkeypatch.context() as patch:
        patch.setattr(runs, "teacher_knn", broken)
        assert "test/3.png cannot be decoded" in failed(tmp_path, *watched)
    folder = tmp_path / "runs" / "bad"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000007.pt"]
    assert (folder / "teacher.safetensors").exists()
    assert read_log(folder / "log.jsonl")[-1]["event"] == "epoch"
    # And the run goes on from there, with what it owes.
    done = run(tmp_path, *SHORT, *watched, "--name", "bad", "--resume", "auto")
    assert done["code"] == 0, done["stderr"]
    assert "resumed after step 7 of 14" in done["stderr"]
    rows = [row for row in read_log(folder / "log.jsonl") if row.get("event") == "knn"]
    assert [(row["step"], row["epoch"]) for row in rows] == [(7, 1), (14, 2)]
    assert all(0 <= row["knn_top1"] <= 100 for row in rows)


def test_a_finished_run_keeps_its_last_evaluation(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is later than the last checkpoint, so that only the log has it; where it has not, it is done."""
    again = [*SHORT, "--name", "good", "--resume", "auto", "--knn-every", "1", "--knn-per-class", "2"]
    folder = Path(shutil.copytree(finished[0], tmp_path / "runs" / "good"))
    rows = read_log(folder / "log.jsonl")
    text = (folder / "log.jsonl").read_text()

    def measured() -> dict[str, float]:
        done = run(tmp_path, *again)
        assert done["code"] == 0, done["stderr"]
        return {metric["name"]: metric["value"] for metric in record_of(folder)["metrics"]}

    with monkeypatch.context() as patch:
        patch.setattr(runs, "teacher_knn", None)  # not called
        (folder / "log.jsonl").write_text(re.sub(r'"knn_top1": [\d.]+', '"knn_top1": 12.5', text))
        assert measured()["knn_top1"] == 12.5
    (folder / "log.jsonl").write_text("".join(line for line in text.splitlines(True) if '"knn"' not in line))
    assert measured()["knn_top1"] == rows[-1]["knn_top1"]
    assert read_log(folder / "log.jsonl") == rows


def test_first_bad_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        views_of = loop.views_of

        def dark(*arguments: Any) -> ibot.Views:
            views = views_of(*arguments)
            views.globals[0, 0, 0, 0] = float("inf")
            return views

        patch.setattr(loop, "views_of", dark)
        assert "the normalised images is NaN or infinite at step 1" in failed(tmp_path)
    clip = loop.clip_each_

    def exploding(parameters: Any, limit: float) -> torch.Tensor:
        parameters[0].grad.fill_(float("inf"))
        return clip(parameters, limit)

    monkeypatch.setattr(loop, "clip_each_", exploding)
    told = failed(tmp_path, "--name", "second")
    assert "the gradient of trunk.masked_embed is NaN or infinite at step 1" in told


def test_learning_rate_beyond_reason(tmp_path: Path) -> None:
    assert "is NaN or infinite at step 2" in failed(tmp_path, "--lr", "1e30")
