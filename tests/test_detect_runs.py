"""Detection from the command line's settings to the record, on a network and images that are as small as can be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ibot_eval import cli
from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings
from ibot_eval.training.logs import read_log
from protocols.detect import Detect, DetectConfig
from tests.dense import prepared, tiny_checkpoint
from tests.dense_data import coco_folder
from tests.ranks import run_ranks

prepared()

COCO_TINY = Path("/work/shared/data/coco_tiny")
CONFIG = DetectConfig(
    **{"epochs": 3, "steps": (2,), "train_batch": 2, "lr": 1e-3, "crops": False, "warmup": 0, "bootstrap": 30},
    **{"short_sides": (64, 96), "test_side": 96, "long_side": 160, "log_every": 1, "draw": 2, "eval_every": 2},
    **{"channels": 16, "head_width": 16, "fc_width": 32, "rois": 16, "proposals": (40, 20)},
)


def detect(
    folder: Path, data: Path, ckpt: str, name: str = "run", base: DetectConfig = CONFIG, **changes: Any
) -> EvalRecord:
    from ibot_eval import runner

    engine = {key: changes.pop(key) for key in ("seed", "workers", "device") if key in changes}
    settings = RunSettings(
        CheckpointSettings(ckpt=ckpt),
        DataSettings(data=str(data)),
        EngineSettings(**{"device": "cpu", "workers": 0, **engine}),
        OutputSettings(output=folder, name=name),
    )
    return runner.run("detect", Detect(replace(base, **changes)), settings)


def plain(record: EvalRecord) -> dict[str, Any]:
    """The numbers that have no class or size."""
    return {m["name"]: m["value"] for m in record.metrics if not m["params"]}


def weights_of(record: EvalRecord) -> dict[str, torch.Tensor]:
    assert record.folder is not None
    return torch.load(record.folder / "model.pth", weights_only=True)["state_dict"]


class Broken(Exception):
    pass


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Folder of the runs, data of three classes, and a checkpoint."""
    folder = tmp_path_factory.mktemp("detect")
    return folder, coco_folder(folder / "data", 5, 3), str(tiny_checkpoint(folder))


@pytest.fixture(scope="module")
def record(place: tuple[Path, Path, str]) -> EvalRecord:
    return detect(*place)


def test_a_run_reports_boxes_and_masks_by_size_and_class(record: EvalRecord) -> None:
    assert record.status == "success"
    assert list(plain(record)) == [f"{kind}_{name}" for kind in ("box", "mask") for name in ("ap", "ap50", "ap75")]
    for metric in record.metrics:
        value, interval = metric["value"], metric["interval"]
        assert metric["n"] == 3
        assert value is None or 0 <= value <= 100
        assert interval is None or 0 <= interval[0] <= interval[1] <= 100
    of_boxes = [m["params"] for m in record.metrics if m["name"] == "box_ap"]
    sizes = [{"size": size} for size in ("small", "medium", "large")]
    assert of_boxes == [{}, *sizes, *({"class": name} for name in ("square", "disc", "bar"))]
    assert Detect.headline(record.metrics) == record.metrics[0]


def test_its_files(record: EvalRecord) -> None:
    folder = record.folder
    assert folder is not None
    files = {artifact["path"] for artifact in record.artifacts}
    assert files >= {"predictions.npz", "predictions.json", "model.pth", "mmengine_config.py", "log.jsonl"}
    assert sum(path.startswith("pictures/") for path in files) == 2
    assert all((folder / path).is_file() for path in files)
    assert not (folder / "checkpoints").exists()
    # What `compare` and its like look for.
    assert [one["path"] for one in record.artifacts if one["kind"] == "predictions"] == ["predictions.npz"]
    detections = json.loads((folder / "predictions.json").read_text())
    table = load_predictions(folder / "predictions.npz")
    assert table["detections"].sum() == len(detections)
    assert list(table["image_ids"]) == ["val/0000.jpg", "val/0001.jpg", "val/0002.jpg"]
    assert table["objects"].tolist() == [2, 2, 2]
    assert (table["box_hits50"] <= table["objects"]).all()
    rows = read_log(folder / "log.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    tests = [row for row in rows if row.get("event") == "test"]
    assert [row["step"] for row in tests] == [4, 6]
    assert tests[-1]["box_ap"] == pytest.approx(plain(record)["box_ap"])
    assert set(Detect.figures(record)) == {"learning_curve", "ap_by_class"}


def test_pycocotools_says_the_same_of_its_detections(record: EvalRecord, place: tuple[Path, Path, str]) -> None:
    """From the files alone: the annotations as they were given, and predictions.json."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    assert record.folder is not None
    truth = COCO(str(place[1] / "annotations" / "instances_val.json"))
    for kind, name in (("bbox", "box"), ("segm", "mask")):
        evaluation = COCOeval(truth, truth.loadRes(str(record.folder / "predictions.json")), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        found = [plain(record)[f"{name}_{number}"] for number in ("ap", "ap50", "ap75")]
        assert found == pytest.approx(100 * evaluation.stats[:3], abs=1e-9)


def test_trained_weights_are_tested_alone(record: EvalRecord, place: tuple[Path, Path, str]) -> None:
    assert record.folder is not None
    again = detect(*place, name="tested", trained=record.folder / "model.pth")
    assert again.metrics == record.metrics
    assert "model.pth" not in {artifact["path"] for artifact in again.artifacts}
    with pytest.raises(CheckpointError, match="do not fit"):
        detect(*place, name="unfit", trained=record.folder / "model.pth", head_width=8)


def test_a_configuration_given_back_repeats_the_run(record: EvalRecord, place: tuple[Path, Path, str]) -> None:
    """To the last bit, whatever the flags say of the model and the training."""
    assert record.folder is not None
    given = record.folder / "mmengine_config.py"
    again = detect(*place, name="again", config=given, epochs=12, steps=(8,), head_width=64, lr=1.0, rois=7)
    assert again.metrics == record.metrics
    assert all(torch.equal(tensor, weights_of(record)[name]) for name, tensor in weights_of(again).items())


def test_a_run_that_was_broken_off_goes_on_as_if_nothing_had_been(
    record: EvalRecord, place: tuple[Path, Path, str]
) -> None:
    """In its fourth of six iterations, with drop path, sampled regions and random sizes: to the last bit."""
    from protocols.openmmlab.seeded_data import TrainingData

    whole = TrainingData.batches

    def breaking(data: Any, first: int, last: int) -> Iterator[Any]:
        yield from whole(data, first, 3)
        raise Broken

    with mock.patch.object(TrainingData, "batches", breaking), pytest.raises(Broken):
        detect(*place, name="broken", save_minutes=0)
    assert EvalRecord.load(place[0] / "broken").status == "error"
    again = detect(*place, name="broken", save_minutes=0)
    assert again.metrics == record.metrics
    assert weights_of(again).keys() == weights_of(record).keys()
    assert all(torch.equal(tensor, weights_of(record)[name]) for name, tensor in weights_of(again).items())
    assert again.folder is not None
    rows = read_log(again.folder / "log.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_changes_to_the_configuration(place: tuple[Path, Path, str]) -> None:
    changed = detect(*place, name="set", set=("model.neck.out_channels=16", "train_cfg.max_epochs=1"), eval_every=0)
    assert changed.folder is not None
    assert [row["step"] for row in read_log(changed.folder / "log.jsonl") if "loss" in row] == [1, 2]
    with pytest.raises(ConfigError, match="no 'nek'"):
        detect(*place, name="wrong", set=("model.nek.out_channels=16",))


def test_a_configuration_for_other_classes_follows_the_data(
    record: EvalRecord, place: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """And it is said aloud."""
    assert record.folder is not None
    data = coco_folder(tmp_path / "two", 4, 2)
    for file in (data / "annotations").iterdir():
        content = json.loads(file.read_text())
        left = content["categories"].pop()["id"]
        content["annotations"] = [a for a in content["annotations"] if a["category_id"] != left]
        file.write_text(json.dumps(content))
    given = record.folder / "mmengine_config.py"
    two = detect(place[0], data, place[2], name="two", config=given, set=("train_cfg.max_epochs=1",))
    assert any("made for 3 classes, and the data have 2" in warning for warning in two.warnings)
    assert {m["params"]["class"] for m in two.metrics if "class" in m["params"]} == {"square", "disc"}


def test_a_configuration_of_mmdet_trains_over_the_checkpoint(place: tuple[Path, Path, str]) -> None:
    """Cascade Mask R-CNN over ResNet-50 as mmdet ships it, made small by --set."""
    import mmdet

    given = Path(mmdet.__file__).parent / ".mim" / "configs" / "cascade_rcnn" / "cascade-mask-rcnn_r50_fpn_1x_coco.py"
    samplers = [f"model.train_cfg.rcnn.{stage}.sampler.num=8" for stage in range(3)]
    scales = [f"{role}_dataloader.dataset.pipeline.{i}.scale=(160,96)" for role, i in (("train", 2), ("test", 1))]
    proposals = ["model.train_cfg.rpn_proposal.max_per_img=30", "model.test_cfg.rpn.max_per_img=20"]
    short = ["train_cfg.max_epochs=1", "train_dataloader.batch_size=1", "train_dataloader.num_workers=0"]
    record = detect(*place, name="mmdet", config=given, set=(*samplers, *scales, *proposals, *short))
    assert record.status == "success"
    said = " ".join(record.warnings)
    assert "the configuration's backbone (ResNet) gives way to that of --ckpt" in said
    assert "made for 80 classes, and the data have 3" in said
    assert {m["params"]["class"] for m in record.metrics if "class" in m["params"]} == {"square", "disc", "bar"}


def test_data_without_masks_and_a_detector_that_finds_nothing(place: tuple[Path, Path, str], tmp_path: Path) -> None:
    data = coco_folder(tmp_path / "boxes", 3, 2)
    for file in (data / "annotations").iterdir():
        content = json.loads(file.read_text())
        for annotation in content["annotations"]:
            del annotation["segmentation"]
        file.write_text(json.dumps(content))
    boxes = detect(place[0], data, place[2], name="boxes", epochs=1, steps=(), score_threshold=0.99)
    assert plain(boxes) == {"box_ap": 0, "box_ap50": 0, "box_ap75": 0}
    assert any("only boxes can be trained" in warning for warning in boxes.warnings)
    assert any("nothing was detected" in warning for warning in boxes.warnings)


def on_ranks(folder: str, data: str, ckpt: str) -> dict[str, Any]:
    from ibot_eval import distributed
    from protocols.openmmlab import ready

    ready.prepare()
    distributed.init("cpu")
    record = detect(Path(folder), Path(data), ckpt, name="ranks", epochs=2, steps=(), train_batch=1)
    return {"metrics": record.metrics, "status": record.status}


def test_two_processes_train_and_evaluate(place: tuple[Path, Path, str]) -> None:
    """Three test images on two ranks: each counts once."""
    folder, data, ckpt = place
    first, second = run_ranks(2, on_ranks, str(folder), str(data), ckpt, timeout=300)
    assert first == second
    assert first["status"] == "success"
    table = load_predictions(folder / "ranks" / "predictions.npz")
    detections = json.loads((folder / "ranks" / "predictions.json").read_text())
    assert table["detections"].sum() == len(detections)
    assert np.unique([d["image_id"] for d in detections]).tolist() == [5, 15, 25]


@pytest.mark.skipif(not COCO_TINY.is_dir(), reason="no coco_tiny here")
def test_eight_images_of_coco_are_learnt_by_heart(tmp_path: Path) -> None:
    """With the recipe `tiny`, and a network that starts from nothing; unmirrored, which would take twice as long."""
    learnt = detect(
        tmp_path,
        eight_images(tmp_path / "data"),
        str(tiny_checkpoint(tmp_path, width=96)),
        base=cli.parse_protocol("detect", ["--recipe", "detect/tiny"]).config,
        **{"epochs": 45, "steps": (36,), "layer_decay": 1.0, "drop_path": 0.0, "warmup": 10, "bootstrap": 0, "draw": 0},
        set=("train_dataloader.dataset.pipeline.2.prob=0.0",),
    )
    assert plain(learnt)["box_ap"] > 50


def eight_images(folder: Path) -> Path:
    """Those of coco_tiny with one or two large objects, as train and as test."""
    source = json.loads((COCO_TINY / "annotations" / "instances_train2017.json").read_text())
    own: dict[int, list[Any]] = {image["id"]: [] for image in source["images"]}
    for annotation in source["annotations"]:
        own[annotation["image_id"]].append(annotation)
    large = [i for i, found in own.items() if 1 <= len(found) <= 2 and min(a["area"] for a in found) > 96**2]
    chosen = set(sorted(large)[:8])
    part = {
        **source,
        "images": [image for image in source["images"] if image["id"] in chosen],
        "annotations": [annotation for i in chosen for annotation in own[i]],
    }
    (folder / "annotations").mkdir(parents=True)
    for name in ("train", "val"):
        (folder / name).symlink_to(COCO_TINY / "train2017")
        (folder / "annotations" / f"instances_{name}.json").write_text(json.dumps(part))
    return folder
