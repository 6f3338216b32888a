"""Whole runs: records, failures, the cache, the Python interface."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ibot_eval as api
from ibot_eval import cli
from ibot_eval.api import split_settings
from ibot_eval.data.splits import Data
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.record import SCHEMA_FILE, EvalRecord, load_predictions
from tests.conftest import Run

SCHEMA = json.loads(SCHEMA_FILE.read_text())
SMALL = ("--resize", "32", "--crop", "32", "--batch-size", "4", "--workers", "0")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three classes that differ in colour; 6 + 3 images each, 40x32 pixels."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("red", "green", "blue")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 60, (32, 40, 3))
                pixels[..., label] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return tmp_path / "images"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_vit(tmp_path / "vit.pth", seed=0)


def save_vit(path: Path, seed: int) -> Path:
    """A small ViT in DINO's backbone-only layout."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0)
    torch.save(network.state_dict(), path)
    return path


def run_here(*arguments: object) -> int:
    return cli.main([str(a) for a in arguments])


def only_record(output: Path) -> tuple[EvalRecord, Path]:
    (path,) = output.glob("*/record.json")
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    return EvalRecord.load(path), path.parent


def knn(images: Path, checkpoint: Path, output: Path, *more: object) -> int:
    data = ("--ckpt", checkpoint, "--heads", 2, "--data", images, "--output", output)
    return run_here("knn", *data, *SMALL, "--k", 1, 5, *more)


def test_a_run_leaves_a_record_that_keeps_the_schema(
    images: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert knn(images, checkpoint, tmp_path / "runs", "--name", "first") == 0
    record, folder = only_record(tmp_path / "runs")
    assert folder.name == record.run == "first"
    assert record.status == "success"
    assert record.error is None
    top1 = {m["params"]["k"]: m for m in record.metrics if m["name"] == "top1"}
    assert top1.keys() == {1, 5}
    assert top1[1]["value"] == 100.0, "colours are told apart by any network"
    assert top1[1]["n"] == 9
    assert top1[1]["interval"][0] < 100.0 <= top1[1]["interval"][1]
    assert record.config["heads"] == 2
    assert record.config["temperature"] == 0.07
    assert record.checkpoint["missing"] == []
    assert len(record.checkpoint["sha256"]) == 64
    assert record.data["class_to_idx"] == {"blue": 0, "green": 1, "red": 2}
    assert record.data["splits"]["train"]["images"] == 18
    assert record.environment["seed"] == 0
    assert record.environment["packages"]["torch"] == torch.__version__.split("+")[0]
    assert record.timing["seconds"].keys() >= {"load", "extract", "score"}
    predictions = load_predictions(folder / "predictions.npz")
    assert predictions["image_ids"].tolist()[0] == "val/blue/0.png"
    np.testing.assert_array_equal(predictions["top1@k=1"], predictions["label"])
    printed = capsys.readouterr().out
    assert "top1 [%]" in printed
    assert "100.00" in printed


def test_json_goes_to_stdout_and_everything_else_to_stderr(images: Path, checkpoint: Path, ibot_eval: Run) -> None:
    options = ("--ckpt", checkpoint, "--heads", 2, "--data", images, *SMALL, "--k", 1)
    done = ibot_eval("knn", *options, "--json")
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), SCHEMA)


def test_a_run_is_never_overwritten(images: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert knn(images, checkpoint, tmp_path / "runs", "--name", "x") == 0
    before = (tmp_path / "runs" / "x" / "record.json").read_bytes()
    assert knn(images, checkpoint, tmp_path / "runs", "--name", "x") == 2
    assert (tmp_path / "runs" / "x" / "record.json").read_bytes() == before


def test_a_failed_run_leaves_a_record_with_the_error(images: Path, checkpoint: Path, tmp_path: Path) -> None:
    (images / "val" / "red" / "0.png").write_bytes(b"not an image")
    assert knn(images, checkpoint, tmp_path / "runs") == 2
    record, _ = only_record(tmp_path / "runs")
    assert record.status == "error"
    assert record.error is not None
    assert record.error["kind"] == "BadImage"
    assert "red/0.png" in record.error["message"]
    assert record.metrics == []
    assert record.checkpoint["architecture"]


def test_a_checkpoint_that_is_not_there_leaves_a_record_too(images: Path, tmp_path: Path) -> None:
    assert knn(images, tmp_path / "nowhere.pth", tmp_path / "runs") == 2
    record, _ = only_record(tmp_path / "runs")
    assert record.status == "error"
    assert "nowhere.pth" in (record.error or {})["message"]
    assert record.checkpoint["reference"] == str(tmp_path / "nowhere.pth")


def test_bad_images_can_be_skipped_and_are_counted(images: Path, checkpoint: Path, tmp_path: Path) -> None:
    (images / "val" / "red" / "0.png").write_bytes(b"")
    (images / "train" / "blue" / "3.png").write_bytes((images / "train" / "blue" / "3.png").read_bytes()[:60])
    assert knn(images, checkpoint, tmp_path / "runs", "--bad-images", "skip") == 0
    record, folder = only_record(tmp_path / "runs")
    assert record.data["skipped_images"] == {"train": ["train/blue/3.png"], "test": ["val/red/0.png"]}
    assert {m["n"] for m in record.metrics} == {8}
    assert "val/red/0.png" not in load_predictions(folder / "predictions.npz")["image_ids"]
    assert record.data["splits"]["test"]["images"] == 8, "what was evaluated"
    assert any("left out: 1 (val/red/0.png)" in w for w in record.warnings)
    # The bank of a run that skipped must not serve a run that is to stop.
    assert knn(images, checkpoint, tmp_path / "again") == 2
    error = only_record(tmp_path / "again")[0].error
    assert error is not None
    assert "train/blue/3.png" in error["message"]


def test_a_second_run_makes_no_forward_pass(
    images: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert knn(images, checkpoint, tmp_path / "one") == 0
    from ibot_eval.models.vit import ViTBackbone

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a forward pass")

    monkeypatch.setattr(ViTBackbone, "outputs", refuse)
    assert knn(images, checkpoint, tmp_path / "two") == 0
    first, second = (only_record(tmp_path / name)[0] for name in ("one", "two"))
    assert first.metrics == second.metrics


def test_another_checkpoint_in_the_same_place_is_another_bank(images: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert knn(images, checkpoint, tmp_path / "one") == 0
    stat = checkpoint.stat()
    save_vit(checkpoint, seed=1)
    assert checkpoint.stat().st_size == stat.st_size
    assert knn(images, checkpoint, tmp_path / "two") == 0
    first, second = (only_record(tmp_path / name)[0] for name in ("one", "two"))
    assert first.checkpoint["sha256"] != second.checkpoint["sha256"]
    assert second.timing["images_per_second"], "the features of the new checkpoint were extracted"


def test_unlabelled_images_are_refused_for_knn_and_fine_for_extract(
    images: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = tmp_path / "flat"
    (flat / "val").mkdir(parents=True)
    for path in sorted((images / "val").rglob("*.png")):
        (flat / "val" / f"{path.parent.name}{path.name}").write_bytes(path.read_bytes())
    (images / "train").rename(flat / "train")
    assert knn(flat, checkpoint, tmp_path / "runs") == 2
    assert "label" in capsys.readouterr().err
    out = tmp_path / "features.npz"
    common = ("--ckpt", checkpoint, "--heads", 2, "--data", flat, *SMALL, "--blocks", -2, -1)
    assert run_here("extract", *common, "--out", out) == 0
    written = np.load(out, allow_pickle=False)
    assert written["features"].shape == (9, 64)
    assert written["labels"].tolist() == [-1] * 9
    assert written["image_ids"][0] == "val/blue0.png"
    assert run_here("extract", *common, "--out", out) == 2, "nothing is replaced silently"
    assert run_here("extract", *common, "--out", tmp_path / "f.safetensors") == 0
    from safetensors import safe_open

    with safe_open(tmp_path / "f.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor("features"), written["features"])
        assert json.loads(file.metadata()["image_ids"])[0] == "val/blue0.png"


def test_a_terminated_run_says_so_in_its_record(images: Path, checkpoint: Path, tmp_path: Path) -> None:
    for signum, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        output = tmp_path / f"runs{signum}"
        process = start_endless_run(images, checkpoint, output)
        process.send_signal(signum)
        assert process.wait(60) == code
        record, _ = only_record(output)
        assert record.status == "interrupted", "even a run that was killed leaves a trace"
        assert record.checkpoint["reference"] == str(checkpoint)


def start_endless_run(images: Path, checkpoint: Path, output: Path) -> subprocess.Popen[bytes]:
    """A k-NN run whose scoring never ends; returns once it has begun."""
    code = (
        "import sys, time; from protocols.knn import KNN; from ibot_eval.cli import main\n"
        "def score(self, banks, session):\n"
        "    print('scoring', flush=True)\n"
        "    while True: time.sleep(0.05)\n"
        "    yield\n"
        "KNN.score = score; sys.exit(main(sys.argv[1:]))"
    )
    options = ["knn", "--ckpt", checkpoint, "--heads", "2", "--data", images, "--output", output, *SMALL]
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, options)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"scoring\n"
    return process


class Colours(nn.Module):
    """A module of somebody's own: mean colour."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))


def test_evaluate_takes_ones_own_module(images: Path, tmp_path: Path, private_cache: Path) -> None:
    record = api.evaluate(
        Colours(), "knn", images, k=(1, 3), crop=32, resize=32, output=str(tmp_path / "runs"), workers=0, batch_size=4
    )
    assert {m["params"]["k"]: m["value"] for m in record.metrics if m["name"] == "top1"} == {1: 100.0, 3: 100.0}
    assert record.checkpoint["reference"].endswith("Colours")
    jsonschema.validate(record.as_dict(), SCHEMA)
    assert not list(private_cache.glob("banks/*")), "features of a module are not kept: no hash covers its code"


def test_evaluate_takes_data_sets(tmp_path: Path) -> None:
    def make(count: int) -> list[tuple[Image.Image, int]]:
        return [(Image.new("RGB", (32, 32), (250 * (i % 2), 0, 0)), i % 2) for i in range(count)]

    record = api.evaluate(Colours(), "knn", (make(8), make(4)), k=(1,), crop=32, resize=32, output=tmp_path, workers=0)
    assert record.metrics[0]["value"] == 100.0
    data = Data.from_datasets(make(8), make(4), class_names=("black", "red"))
    again = api.evaluate(Colours(), "knn", data, k=(1,), crop=32, resize=32, output=tmp_path, workers=0)
    assert again.data["class_to_idx"] == {"black": 0, "red": 1}
    assert again.data["fingerprint"] == record.data["fingerprint"] or again.data["classes"] == 2


def test_evaluate_refuses_unknown_settings(images: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'tempature'.*\n.*'temperature'"):
        api.evaluate(Colours(), "knn", images, tempature=0.1)
    with pytest.raises(ConfigError, match="no protocol is called 'kkn'"):
        api.evaluate(Colours(), "kkn", images)


def test_features_that_are_not_numbers_are_named(images: Path, tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            features = images.mean((2, 3))
            features[0] = float("nan")
            return features

    with pytest.raises(DataError, match=r"blue/0\.png"):
        api.evaluate(Broken(), "knn", images, crop=32, resize=32, output=tmp_path / "r", workers=0, batch_size=64)


@pytest.mark.parametrize("processes", [2, 3])
def test_ranks_give_the_predictions_of_one_process(
    images: Path, checkpoint: Path, tmp_path: Path, processes: int, ibot_eval: Run
) -> None:
    for name in ("val/red/0.png", "val/blue/2.png", "train/green/5.png"):
        (images / name).unlink()  # 7 and 17 images are left, which neither 2 nor 3 divides
    common = ("knn", "--ckpt", checkpoint, "--heads", 2, "--data", images, *SMALL, "--k", 1, 5)
    alone = ibot_eval(*common, "--output", "alone")
    assert alone.returncode == 0, alone.stderr
    many = ibot_eval(*common, "--output", "many", "--launch", f"local:{processes}", "--cache", tmp_path / "other")
    assert many.returncode == 0, many.stderr
    assert many.stdout.count("record:") == 1, "only one rank prints"
    (one, one_folder), (other, other_folder) = (only_record(tmp_path / name) for name in ("alone", "many"))
    assert other.environment["world_size"] == processes
    assert one.metrics == other.metrics
    first, second = (load_predictions(folder / "predictions.npz") for folder in (one_folder, other_folder))
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_torchrun_works_and_errors_keep_their_exit_code(images: Path, checkpoint: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options = ["ibot_eval", "knn", "--ckpt", checkpoint, "--heads", 2, "--data", images, *SMALL, "--k", 1]
    command = [*torchrun, *map(str, options), "--output", str(tmp_path / "runs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert only_record(tmp_path / "runs")[0].environment["world_size"] == 2


def test_an_error_on_the_ranks_ends_all_of_them_with_code_2(images: Path, checkpoint: Path, ibot_eval: Run) -> None:
    (images / "val" / "red" / "1.png").write_bytes(b"not an image")
    done = ibot_eval(
        *("knn", "--ckpt", checkpoint, "--heads", 2, "--data", images, *SMALL, "--launch", "local:2"), timeout=120
    )
    assert done.returncode == 2
    assert "red/1.png" in done.stderr
    assert done.stderr.count("ibot-eval: error") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ending_a_launched_run_is_no_fault(
    images: Path, checkpoint: Path, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    options = ("knn", "--ckpt", checkpoint, "--heads", 2, "--data", images, *SMALL, "--launch", "local:2")
    process = subprocess.Popen(
        [sys.executable, "-m", "ibot_eval", *map(str, options), "--output", str(tmp_path / "runs")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("runs/*/record.json")):
        time.sleep(0.05)
        assert process.poll() is None
    os.killpg(process.pid, signum)
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait(60) == code, errors
    assert "SignalException" not in errors


def test_published_numbers_stand_beside_the_published_protocol_only(images: Path, tmp_path: Path) -> None:
    def published(**settings: object) -> list[object]:
        record = api.evaluate(
            module, "knn", images, crop=32, resize=32, output=tmp_path, workers=0, k=(5, 10), **names, **settings
        )
        return [m["published"] for m in record.metrics if m["name"] == "top1"]

    module, names = Colours(), {"data_name": "ImageNet-1K", "method": "iBOT"}
    from ibot_eval.models import ModuleBackbone

    module = ModuleBackbone(module, image_size=32, name="vit-s/16")
    assert published() == [None, {"value": 75.2, "source": "published iBOT README, model table"}]
    assert published(temperature=0.1) == [None, None]
    assert published(leave_one_out=True, loo_split="train") == [None, None]


def test_settings_that_cannot_be_are_refused_before_the_features_are_extracted(
    images: Path, checkpoint: Path, tmp_path: Path, private_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("k: [1000]\n")
    for arguments, message in (
        (("--k", 19), "19"),
        (("--recipe", recipe), "1000"),
        (("--blocks", 1, -1), "names a block twice"),
        (("--loo-split", "train"), "--leave-one-out"),
        (("--seed", 1 << 70), "the seed"),
    ):
        common = ("--ckpt", checkpoint, "--heads", 2, "--data", images, "--output", tmp_path / "runs")
        assert run_here("knn", *common, *SMALL, *arguments) == 2
        assert message in capsys.readouterr().err
    assert not list(private_cache.glob("banks/*"))


def test_places_that_cannot_be_written_are_named(
    images: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--ckpt", checkpoint, "--heads", 2, "--data", images, *SMALL)
    (tmp_path / "folder.npz").mkdir()
    for out in ("/proc/x.npz", tmp_path / "folder.npz", checkpoint / "x.npz"):
        assert run_here("extract", *common, "--out", out, "--overwrite") == 2
        assert f"cannot write {out}" in capsys.readouterr().err
    assert knn(images, checkpoint, tmp_path / "runs", "--name", "a") == 0
    for out in ("/proc/nope", checkpoint):
        assert run_here("plot", tmp_path / "runs", "--out", out) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_names_of_runs_tell_protocol_checkpoint_and_data(images: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert knn(images, checkpoint, tmp_path / "runs") == 0
    assert only_record(tmp_path / "runs")[0].run.startswith("knn-vit-images-2")


def test_plot_draws_what_the_protocol_offers(
    images: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert knn(images, checkpoint, tmp_path / "runs", "--name", "a") == 0
    capsys.readouterr()
    assert run_here("plot", tmp_path / "runs" / "a") == 0
    (path,) = capsys.readouterr().out.split()
    with Image.open(path) as image:
        assert image.size[0] > 400
    assert Path(path).parent == tmp_path / "runs" / "a" / "figures"
    assert knn(images, checkpoint, tmp_path / "runs", "--name", "b", "--pooling", "patch_mean") == 0
    assert run_here("plot", tmp_path / "runs", "--out", tmp_path / "both", "--format", "svg") == 0
    assert [p.suffix for p in (tmp_path / "both").iterdir()] == [".svg"]


def test_cache_commands(
    images: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], private_cache: Path
) -> None:
    assert knn(images, checkpoint, tmp_path / "runs") == 0
    capsys.readouterr()
    assert run_here("cache", "ls", "--json") == 0
    banks = json.loads(capsys.readouterr().out)
    assert sorted((b["split"], b["n"], b["reducer"]) for b in banks) == [("train", 18, "cls"), ("val", 9, "cls")]
    assert run_here("cache", "ls") == 0
    assert "2 banks" in capsys.readouterr().out
    assert run_here("cache", "verify") == 0
    damaged = next(private_cache.glob("banks/*/features.npy"))
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    assert run_here("cache", "verify") == 2
    assert damaged.parent.name[:12] in capsys.readouterr().out
    assert run_here("cache", "rm", damaged.parent.name[:12]) == 0
    assert not damaged.exists()
    assert run_here("cache", "rm", "zzz") == 2
    assert run_here("cache", "rm", "--all") == 0
    assert list(private_cache.glob("banks/*")) == []


def test_settings_of_the_groups_do_not_overlap() -> None:
    from ibot_eval.settings import RunSettings

    names = [name for group in RunSettings().groups() for name in vars(group)]
    assert len(set(names)) == len(names)
    groups, own = split_settings({"crop": 1, "k": (1,)}, __import__("protocols.knn").knn.KNNConfig)
    assert own == {"k": (1,)}
    assert {"crop": 1} in groups.values()
