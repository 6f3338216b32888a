"""Suites of protocols: one extraction, failures, what a second start does, whose folder it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from ibot_eval import cli, registry
from ibot_eval.errors import DataError
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.models import ModuleBackbone
from ibot_eval.models.vit import ViTBackbone
from ibot_eval.protocol import EvalProtocol, Event, FrozenProtocol, Metric, Predictions, Session, Warning
from ibot_eval.record import SCHEMA_FILE, EvalRecord, find_records, load_predictions
from tests.ranks import run_ranks
from tests.test_runner import save_vit

SMALL = ("--resize", "32", "--crop", "32", "--batch-size", "4", "--workers", "0", "--heads", "2")
TRAIN, TEST = 8, 4


@dataclass(frozen=True)
class NoSettings:
    """Nothing to choose."""


@dataclass(frozen=True)
class CentroidSettings:
    """Settings of a protocol for these tests."""

    scale: float = 1.0
    """A number that is passed on."""


class Centroid(FrozenProtocol[CentroidSettings]):
    """Nearest class mean of the last block's [CLS]."""

    config_type, version, primary = CentroidSettings, 1, "top1"
    wanted: Sequence[FeatureRequest] = (FeatureRequest("train"), FeatureRequest("test"))

    def features(self) -> Sequence[FeatureRequest]:
        return self.wanted

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        train, test = (banks[request] for request in self.wanted)
        centres = np.stack([train.features[train.labels == c].mean(0) for c in np.unique(train.labels)])
        guess = np.linalg.norm(test.features[:, None] - centres, axis=-1).argmin(1)
        yield Predictions(test.image_ids, {"label": test.labels, "top1": guess})
        params = {"scale": self.config.scale}
        yield Metric("top1", 100 * float(np.mean(guess == test.labels)), params=params, n=len(test))


class Patches(Centroid):
    """The same of the mean patch token, and of the last block by its other name."""

    config_type = NoSettings
    wanted = (FeatureRequest("train", 1, reducer="patch_mean"), FeatureRequest("test", 1, reducer="patch_mean"))

    def features(self) -> Sequence[FeatureRequest]:
        return [*self.wanted, FeatureRequest("train", 1)]

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        guess = np.zeros(len(banks[self.wanted[1]]), int)
        yield Predictions(banks[self.wanted[1]].image_ids, {"top1": guess})
        yield Metric("top1", float(np.abs(banks[self.wanted[0]].features).sum()) % 100)


class OfTest(FrozenProtocol[NoSettings]):
    """Needs the test split only."""

    config_type, version, primary = NoSettings, 1, "nmi"

    def features(self) -> Sequence[FeatureRequest]:
        return [FeatureRequest("test", reducer="norm_patch_mean")]

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        yield Metric("nmi", 50.0, n=len(banks[self.features()[0]]))


class NeedsHead(OfTest):
    """Needs a projection head, which the checkpoint of these tests has not."""

    def features(self) -> Sequence[FeatureRequest]:
        return [FeatureRequest("test", reducer="head_argmax")]


class Failing(Centroid):
    """Fails in a way that is explained."""

    config_type = NoSettings

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        yield Warning("before it")
        raise DataError("no luck today")


class Faulty(Failing):
    """Fails through a fault of its own."""

    error: type[BaseException] = ZeroDivisionError

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        yield Warning("before it")
        raise self.error("a fault")


class Training(EvalProtocol[NoSettings]):
    """Changes the network, fails at first, and goes on from there."""

    config_type, version, primary, resumable = NoSettings, 1, "top1", True

    def run(self, backbone: torch.nn.Module, session: Session) -> Iterator[Event]:
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter.fill_(0.5)
        state = session.output / "state"
        if not state.exists():
            state.write_text("half")
            raise DataError("stopped half-way")
        yield Metric("top1", 60.0)


PROTOCOLS = {
    "a-training": "Training",
    "centroid": "Centroid",
    "failing": "Failing",
    "faulty": "Faulty",
    "head": "NeedsHead",
    "of-test": "OfTest",
    "patches": "Patches",
}


def tiny_module(rest: str) -> ModuleBackbone:
    """What ``--ckpt tiny:…`` gives: a module of somebody's own."""
    assert rest == "x"
    torch.manual_seed(0)
    return ModuleBackbone(Counting(), image_size=32, name="tiny")


class Counting(torch.nn.Module):
    images = 0

    def __init__(self) -> None:
        super().__init__()
        self.colours = torch.nn.Conv2d(3, 6, 8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        Counting.images += len(images)
        return self.colours(images).mean((2, 3))


def registered() -> dict[str, dict[str, EntryPoint]]:
    protocols = {name: f"tests.test_suite:{value}" for name, value in PROTOCOLS.items()}
    groups = {
        "protocols": protocols | {"knn": "protocols.knn:KNN", "missing": "no_such_package_at_all.x:X"},
        "commands": {"suite": "ibot_eval.commands.suite:Suite", "report": "ibot_eval.commands.report:Report"},
        "backbones": {"tiny": "tests.test_suite:tiny_module"},
    }
    return {
        group: {n: EntryPoint(n, value, f"ibot_eval.{group}") for n, value in sorted(points.items())}
        for group, points in groups.items()
    }


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entries", registered().__getitem__)
    # What the tests pass to cli.main is the command line, not what pytest was called with.
    monkeypatch.setattr("sys.argv", ["ibot-eval"])


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes that differ in colour: 4 + 2 images each, 32x32 pixels."""
    generator = np.random.default_rng(0)
    for split, count in (("train", TRAIN // 2), ("val", TEST // 2)):
        for label, name in enumerate(("red", "green")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 60, (32, 32, 3))
                pixels[..., label] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return tmp_path / "images"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_vit(tmp_path / "vit.pth", seed=0)


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Images of each forward pass."""
    passes: list[int] = []
    original = ViTBackbone.outputs

    def outputs(self: ViTBackbone, images: torch.Tensor, *arguments: object, **settings: object) -> object:
        passes.append(len(images))
        return original(self, images, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(ViTBackbone, "outputs", outputs)
    return passes


@pytest.fixture
def suite(images: Path, checkpoint: Path, tmp_path: Path):
    """Calls ``ibot-eval suite`` and returns its exit code."""

    def run(protocols: str, *more: object) -> int:
        common = ("--ckpt", checkpoint, "--data", images, "--output", tmp_path / "runs", *SMALL)
        return cli.main([str(a) for a in ("suite", "--protocols", protocols, *common, *more)])

    return run


def only_suite(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def test_protocols_share_one_pass_over_the_images(
    suite, images: Path, checkpoint: Path, tmp_path: Path, forwarded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite("of-test,knn,centroid,patches") == 0
    assert sum(forwarded) == TRAIN + TEST
    folder = only_suite(tmp_path)
    assert folder.name.startswith("suite-vit-images-")
    printed = capsys.readouterr()
    assert f"records: {folder}" in printed.out
    assert "train: 8 images, test: 4 images, 2 classes" in printed.out
    for name in ("knn", "centroid", "patches", "of-test"):
        content = json.loads((folder / name / "record.json").read_text())
        jsonschema.validate(content, json.loads(SCHEMA_FILE.read_text()))
        assert content["status"] == "success"
        assert content["run"] == f"{folder.name}/{name}"
        assert f"\n{name} " in printed.out
        # The same command for one protocol gives the same numbers about the same data.
        common = ("--ckpt", checkpoint, "--data", images, "--output", tmp_path / "alone", "--name", name, *SMALL)
        assert cli.main([str(a) for a in (name, *common)]) == 0
        alone = EvalRecord.load(tmp_path / "alone" / name)
        assert content["metrics"] == alone.as_dict()["metrics"]
        assert content["data"] == alone.as_dict()["data"]
    assert sum(forwarded) == TRAIN + TEST, "what ran alone found the same banks"
    one, other = (load_predictions(path / "predictions.npz") for path in (folder / "knn", tmp_path / "alone" / "knn"))
    assert one["top1@k=8"].tolist() == other["top1@k=8"].tolist()
    assert EvalRecord.load(folder / "of-test").data["splits"].keys() == {"test"}


def test_remarks_are_printed_once(suite, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (images / "train" / "green").iterdir():
        path.unlink()
    (images / "train" / "green").rmdir()
    assert suite("centroid,knn") == 0
    assert capsys.readouterr().err.count("have images in 'val' only") == 1


def test_a_failure_is_recorded_and_the_others_go_on(
    suite, tmp_path: Path, forwarded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite("failing,faulty,head,centroid,knn") == 2
    assert sum(forwarded) == TRAIN + TEST
    printed = capsys.readouterr()
    assert "failed: failing, faulty, head" in printed.err
    assert "Traceback" not in printed.err
    folder = only_suite(tmp_path)
    records = {path.parent.name: EvalRecord.load(path) for path in find_records(folder)}
    assert {name: record.status for name, record in records.items()} == {
        "failing": "error",
        "faulty": "error",
        "head": "error",
        "centroid": "success",
        "knn": "success",
    }
    assert (records["failing"].error or {})["message"] == "no luck today"
    assert "ZeroDivisionError: a fault" in (records["faulty"].error or {})["traceback"]
    assert "projection head" in (records["head"].error or {})["message"]
    lines = [line.split()[0] for line in printed.out.splitlines() if line]
    assert [name for name in lines if name in records] == ["failing", "faulty", "head", "centroid", "knn"]
    assert "no luck today" in printed.out


def test_a_second_start_does_what_is_missing(
    suite,
    tmp_path: Path,
    forwarded: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert suite("failing,centroid") == 2
    folder = only_suite(tmp_path)
    done = (folder / "centroid" / "record.json").read_bytes()
    assert suite("failing,centroid", "--overwrite", "never") == 2, "it is still failed"
    assert not (folder / "replaced").exists()
    monkeypatch.setattr(Failing, "score", Centroid.score)
    monkeypatch.setattr(Failing, "config_type", CentroidSettings)
    before = len(forwarded)
    capsys.readouterr()
    assert suite("failing,centroid") == 0
    assert len(forwarded) == before, "the banks are there"
    assert (folder / "centroid" / "record.json").read_bytes() == done
    (old,) = (folder / "replaced").iterdir()
    assert old.name.startswith("failing-")
    assert (EvalRecord.load(old).error or {})["message"] == "no luck today"
    assert str(old) in capsys.readouterr().err
    assert len(list(find_records(tmp_path / "runs"))) == 2, "what is replaced is in no table"
    assert suite("failing,centroid", "--overwrite", "always") == 0
    assert len(list((folder / "replaced").iterdir())) == 3
    assert only_suite(tmp_path) == folder


@pytest.mark.parametrize("damage", ["half", "gone", "older version", "killed"])
def test_runs_that_are_of_no_use_are_made_again(suite, tmp_path: Path, damage: str) -> None:
    assert suite("centroid") == 0
    path = only_suite(tmp_path) / "centroid" / "record.json"
    content = json.loads(path.read_text())
    if damage == "gone":
        path.unlink()
    elif damage == "half":
        path.write_text(path.read_text()[:50])
    else:
        change = {"protocol_version": 0} if damage == "older version" else {"status": "interrupted"}
        path.write_text(json.dumps(content | change))
    assert suite("centroid") == 0
    record = EvalRecord.load(path)
    assert (record.status, record.protocol_version) == ("success", 1)
    assert len(list((path.parent.parent / "replaced").iterdir())) == 1


def test_the_table_shows_all_that_the_folder_holds(suite, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("failing") == 2
    capsys.readouterr()
    assert suite("centroid") == 0, "what failed before was not asked for"
    assert "no luck today" in capsys.readouterr().out


def test_other_work_is_another_folder(suite, tmp_path: Path, checkpoint: Path, images: Path) -> None:
    folders: set[Path] = set()
    recipe = tmp_path / "r.yaml"
    recipe.write_text("scale: 2\n")
    for more in ((), ("--seed", 1), ("--crop", 24), ("--recipes", f"centroid={recipe}"), ("--data-name", "X")):
        assert suite("centroid", *more) == 0
        assert len({*(tmp_path / "runs").iterdir()} - folders) == 1, more
        folders = {*(tmp_path / "runs").iterdir()}
    save_vit(checkpoint, seed=1)
    assert suite("centroid") == 0
    (images / "val" / "red" / "0.png").unlink()
    assert suite("centroid") == 0
    assert len(list((tmp_path / "runs").iterdir())) == len(folders) + 2
    assert suite("knn") == 0
    assert suite("centroid", "--batch-size", 3) == 0
    assert len(list((tmp_path / "runs").iterdir())) == len(folders) + 2, "how fast, and what else, is no other work"


def test_a_name_is_never_shared_with_other_work(
    suite, tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite("centroid", "--name", "mine") == 0
    assert suite("centroid", "--name", "mine") == 0
    for more, part in ((("--seed", 1), "seed"), (("--crop", 24), "transform")):
        assert suite("centroid", "--name", "mine", *more) == 2
        assert f"what differs: {part}" in capsys.readouterr().err
    (tmp_path / "runs" / "run").mkdir()
    (tmp_path / "runs" / "run" / "record.json").write_text("{}")
    assert suite("centroid", "--name", "run") == 2
    assert "is not a suite's" in capsys.readouterr().err
    assert suite("centroid", "--name", "../up") == 2
    (tmp_path / "runs" / "mine" / "suite.json").write_text("[")
    assert suite("centroid", "--name", "mine") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_one_process_at_a_time(suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("centroid") == 0
    with FileLock(only_suite(tmp_path) / ".lock"):
        assert suite("centroid", "--overwrite", "always") == 2
    assert "another process" in capsys.readouterr().err
    assert not (only_suite(tmp_path) / "replaced").exists()


def test_recipes_belong_to_their_protocols_and_flags_win(
    suite, tmp_path: Path, forwarded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("scale: 2\ncrop: 24\nbad_images: skip\ninterpolation: bilinear\n")
    common = ("--recipes", f"centroid={recipe}", "--name")
    monkeypatch.setattr("sys.argv", ["ibot-eval", "suite", "--interpolation=bicubic"])
    assert suite("centroid,knn", *common, "flags") == 0
    record = EvalRecord.load(tmp_path / "runs" / "flags" / "centroid")
    assert record.config["scale"] == 2
    assert record.config["crop"] == 32, "the flag wins"
    assert record.config["interpolation"] == "bicubic", "also one that says what is the default"
    assert record.config["bad_images"] == "skip"
    assert EvalRecord.load(tmp_path / "runs" / "flags" / "knn").config["bad_images"] == "stop"


def test_each_transform_is_one_pass(images: Path, checkpoint: Path, tmp_path: Path, forwarded: list[int]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("resize: 40\n")
    common = ("--ckpt", checkpoint, "--heads", 2, "--data", images, "--output", tmp_path / "runs", "--workers", 0)
    more = ("--crop", 32, "--protocols", "centroid,knn,patches", "--recipes", f"centroid={recipe}")
    assert cli.main([str(a) for a in ("suite", *common, *more)]) == 0
    assert sum(forwarded) == 2 * (TRAIN + TEST)
    records = {path.parent.name: EvalRecord.load(path) for path in find_records(tmp_path / "runs")}
    resized = {name: record.data["transform"]["resize"] for name, record in records.items()}
    assert resized == {"centroid": 40, "knn": 256, "patches": 256}


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        (["knn/imagenet_vits61"], "did you mean 'knn/imagenet_vits16'"),
        (["knn/other"], "known: knn/imagenet_swint14, knn/imagenet_swint7, knn/imagenet_vitb16, knn/imagenet_vitl16, "),
        (["pretrain/digits"], "not among the protocols"),
        (["knn/imagenet_vits16", "knn/imagenette128"], "two recipes for knn"),
        (["centroid=nowhere.yaml"], "no recipe 'nowhere.yaml'"),
        (["knn="], "a file is given as PROTOCOL=FILE"),
    ],
)
def test_recipes_that_cannot_be_meant(
    suite, tmp_path: Path, recipes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite("knn,centroid", "--recipes", *recipes) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_settings_that_a_protocol_refuses_are_refused_at_once(
    suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("temperature: 0\n")
    assert suite("centroid,knn", "--recipes", f"knn={recipe}") == 2
    assert "knn: the temperature must be positive" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_which_protocols(suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("kkn") == 2
    assert "did you mean 'knn'" in capsys.readouterr().err
    assert suite("knn,missing") == 2
    assert "no_such_package_at_all" in capsys.readouterr().err
    assert suite("frozen,kkn") == 2
    assert suite("centroid", "--protocols", "knn", "kkn") == 2
    assert "'kkn'" in capsys.readouterr().err, "also with spaces between the names"
    assert suite(" , ") == 2
    assert not (tmp_path / "runs").exists()
    assert suite("frozen") == 2
    assert "missing is left out" in capsys.readouterr().err
    ran = {path.parent.name for path in find_records(only_suite(tmp_path))}
    assert ran == PROTOCOLS.keys() - {"a-training"} | {"knn"}


def test_a_protocol_that_resumes_goes_on_and_spoils_nobodys_network(suite, tmp_path: Path) -> None:
    assert suite("a-training,centroid") == 2
    folder = only_suite(tmp_path)
    first = EvalRecord.load(folder / "centroid").metrics
    assert EvalRecord.load(folder / "a-training").status == "error"
    assert suite("a-training,patches") == 0
    assert EvalRecord.load(folder / "a-training").metrics[0]["value"] == 60.0
    assert not (folder / "replaced").exists()
    assert suite("a-training,centroid", "--overwrite", "always") == 2, "from the beginning"
    assert EvalRecord.load(folder / "centroid").metrics == first


def test_an_interrupted_suite_is_gone_on_with(
    suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Faulty, "error", KeyboardInterrupt)
    assert suite("centroid,faulty,knn") == 130
    assert "the same command goes on" in capsys.readouterr().err
    folder = only_suite(tmp_path)
    assert EvalRecord.load(folder / "faulty").status == "interrupted"
    assert not (folder / "knn").exists()
    monkeypatch.setattr(Faulty, "score", lambda *_: iter([Metric("top1", 1.0)]))
    assert suite("centroid,faulty,knn") == 0


def test_a_suite_that_is_asked_to_end_says_so(suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminate(*_: object, **__: object) -> Iterator[Event]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        raise AssertionError("it goes on")

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Faulty, "score", lambda *_: terminate())
    assert suite("centroid,faulty,knn") == 143
    folder = only_suite(tmp_path)
    assert EvalRecord.load(folder / "faulty").status == "interrupted"
    assert not (folder / "knn").exists()
    monkeypatch.setattr(ViTBackbone, "outputs", terminate)
    assert suite("patches") == 143, "while features are extracted as well"
    assert not (folder / "patches").exists()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_banks_of_a_module_are_shared_and_not_kept(images: Path, tmp_path: Path, private_cache: Path) -> None:
    common = ("--ckpt", "tiny:x", "--data", images, "--output", tmp_path / "runs", *SMALL[:-2])
    Counting.images = 0
    assert cli.main([str(a) for a in ("suite", "--protocols", "centroid,knn", *common)]) == 0
    trial = Counting.images - TRAIN - TEST
    assert 0 <= trial <= 2, "one pass, and what finding out the width takes"
    assert not list(private_cache.glob("banks/*"))


def test_an_unreadable_image_is_named_in_every_record(suite, images: Path, tmp_path: Path) -> None:
    (images / "val" / "red" / "1.png").write_bytes(b"not an image")
    assert suite("centroid,knn") == 2
    records = [EvalRecord.load(path) for path in find_records(only_suite(tmp_path))]
    assert len(records) == 2
    assert all("red/1.png" in (record.error or {})["message"] for record in records)
    assert suite("centroid,knn", "--bad-images", "skip") == 0
    record = EvalRecord.load(only_suite(tmp_path) / "knn")
    assert record.data["skipped_images"] == {"test": ["val/red/1.png"]}


def test_data_without_a_split(suite, images: Path, tmp_path: Path) -> None:
    (images / "train").rename(images / "other")
    assert suite("of-test,knn") == 2
    folder = only_suite(tmp_path)
    assert EvalRecord.load(folder / "of-test").status == "success"
    assert EvalRecord.load(folder / "knn").status == "error"
    (images / "val").rename(images / "more")
    assert suite("of-test") == 2
    assert only_suite(tmp_path) == folder, "without any images there is no suite"


def test_json_is_a_list_of_records(suite, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("failing,centroid", "--json") == 2
    content = json.loads(capsys.readouterr().out)
    assert [(record["protocol"], record["status"]) for record in content] == [
        ("failing", "error"),
        ("centroid", "success"),
    ]


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from ibot_eval.cli import parse; from ibot_eval.commands.suite import Suite\n"
        "try: parse(Suite, ['--help'], 'suite')\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'timm'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--overwrite {never,failed,always}" in done.stdout


def test_the_demonstration_needs_no_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["suite", "--protocols", "knn"]) == 0
    assert "on demo" in capsys.readouterr().out
    assert cli.main(["suite", "--ckpt", "demo"]) == 2


def suite_of_ranks(arguments: Sequence[str]) -> int:
    registry.entries = registered().__getitem__
    return cli.main(["suite", *arguments])


def test_ranks_give_what_one_process_gives(images: Path, checkpoint: Path, tmp_path: Path, suite) -> None:
    (images / "val" / "red" / "0.png").unlink()
    common = ("--ckpt", checkpoint, "--data", images, *SMALL, "--protocols", "centroid,failing,head,knn")
    several = [str(a) for a in (*common, "--output", tmp_path / "many", "--cache", tmp_path / "other")]
    assert run_ranks(2, suite_of_ranks, several, timeout=200) == [2, 2]
    assert suite("centroid,failing,head,knn") == 2
    (many,) = (tmp_path / "many").iterdir()
    assert many.name == only_suite(tmp_path).name, "the number of processes is no other work"
    for name in ("centroid", "failing", "head", "knn"):
        one, other = (EvalRecord.load(folder / name) for folder in (only_suite(tmp_path), many))
        assert (one.status, one.metrics) == (other.status, other.metrics)
        assert other.environment["world_size"] == 2
    assert run_ranks(2, suite_of_ranks, several, timeout=200) == [2, 2]
    assert len(list((many / "replaced").iterdir())) == 2
