"""Segmentation from the command's settings to the record, with small networks and images."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from ibot_eval.errors import ConfigError
from ibot_eval.metrics.regions import region_scores
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.training.logs import read_log
from protocols.segment import Segment
from tests import dense
from tests.dense_data import label_map_folder
from tests.ranks import Running, run_ranks
from tests.segmentation_runs import on_ranks, run, run_quietly

dense.prepared()

TIMES = {"images_per_second", "data_wait", "peak_memory_gb"}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(dense.tiny_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(label_map_folder(tmp_path_factory.mktemp("data"), train=5, test=3))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, ckpt: str, data: str) -> Path:
    """A folder with a run of each head, looked at once or, with the linear head, four times an image."""
    folder = tmp_path_factory.mktemp("runs")
    run(str(folder), "upernet", ckpt, data)
    run(str(folder), "linear", ckpt, data, head="linear", scales=(0.75, 1.0), test_flip=True)
    run(str(folder), "setr-pup", ckpt, data, head="setr-pup")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pth", weights_only=True)["state_dict"]


@pytest.mark.parametrize("head", ["upernet", "linear", "setr-pup"])
def test_a_run_yields_all_there_is(finished: Path, head: str) -> None:
    record = EvalRecord.load(finished / head)
    assert record.status == "success"
    overall = [m for m in record.metrics if "class" not in m["params"]]
    assert [m["name"] for m in overall[:3]] == ["miou", "macc", "aacc"]
    assert {m["params"]["class"] for m in record.metrics if "class" in m["params"]} == {
        "background",
        "square",
        "disc",
        "bar",
    }
    for metric in record.metrics:
        assert metric["params"]["head"] == head
        if metric["interval"]:
            assert metric["interval"][0] <= metric["value"] <= metric["interval"][1]
    table = load_predictions(finished / head / "predictions.npz")
    assert len(table["image_ids"]) == 3
    scores = region_scores(np.stack([table[name] for name in ("intersection", "predicted", "labelled")], 1).sum(0))
    assert [m["value"] for m in overall[:3]] == [float(scores.miou), float(scores.macc), float(scores.aacc)]
    # One row of each image is ignored.
    assert table["labelled"].sum() == 3 * 95 * 128
    files = {(finished / head / a["path"]) for a in record.artifacts}
    assert all(file.is_file() for file in files)
    assert {file.name for file in files} > {"model.pth", "mmengine_config.py", "log.jsonl", "predictions.npz"}
    assert sum(a["kind"] == "figure" for a in record.artifacts) == 2
    assert not (finished / head / "checkpoints").exists()
    assert set(Segment.figures(record)) == {"learning_curve", "iou_by_class"}
    rows = read_log(finished / head / "log.jsonl")
    assert [row["step"] for row in rows if row.get("event") == "test"] == [4, 8]


def test_several_looks_are_reported_beside_a_single_one(finished: Path) -> None:
    record = EvalRecord.load(finished / "linear")
    overall = [m for m in record.metrics if m["name"] == "miou" and "class" not in m["params"]]
    assert [m["params"].get("scales") for m in overall] == ["0.75 1", None]
    assert Segment.headline(record.metrics) is not None
    rows = [row for row in read_log(finished / "linear" / "log.jsonl") if row.get("event") == "test"]
    assert overall[1]["value"] == rows[-1]["miou"]


def test_the_linear_head_trains_nothing_else(finished: Path, ckpt: str) -> None:
    """The backbone of every head but the linear one moves."""
    from ibot_eval.checkpoint import load_checkpoint
    from ibot_eval.settings import CheckpointSettings

    original = load_checkpoint(CheckpointSettings(ckpt=ckpt)).backbone.state_dict()
    moved = {}
    for head in ("upernet", "linear", "setr-pup"):
        state = weights(finished / head)
        own = {
            name: tensor
            for name, tensor in state.items()
            if name.startswith("backbone.") and any(name.endswith(f".{key}") for key in original)
        }
        assert own
        keys = {name: next(key for key in original if name.endswith(f".{key}")) for name in own}
        moved[head] = [not torch.equal(own[name], original[key]) for name, key in keys.items()]
    assert not any(moved["linear"])
    assert sum(moved["upernet"]) > 0.8 * len(moved["upernet"])
    assert sum(moved["setr-pup"]) > 0.8 * len(moved["setr-pup"])
    trained = {name for name in weights(finished / "linear") if not name.startswith("backbone.")}
    assert trained == {"decode_head.conv_seg.weight", "decode_head.conv_seg.bias"}


def test_a_trained_model_is_only_tested(finished: Path, tmp_path: Path, ckpt: str, data: str) -> None:
    for head, more in (("upernet", {}), ("linear", {"scales": (0.75, 1.0), "test_flip": True})):
        record = run(str(tmp_path), head, ckpt, data, head=head, trained=finished / head / "model.pth", **more)
        assert record.metrics == EvalRecord.load(finished / head).metrics
        assert not (tmp_path / head / "model.pth").exists()


def test_a_configuration_given_back_makes_the_same_run(finished: Path, tmp_path: Path, ckpt: str, data: str) -> None:
    file = finished / "upernet" / "mmengine_config.py"
    again = run(str(tmp_path), "again", ckpt, data, config=file, lr=1.0, channels=8)
    assert again.metrics == EvalRecord.load(finished / "upernet").metrics
    changed = run(str(tmp_path), "changed", ckpt, data, set=("optim_wrapper.optimizer.lr=0.0",))
    assert changed.metrics != again.metrics


def test_changes_of_a_heads_values_outlive_a_configuration_that_is_given_back(
    finished: Path, tmp_path: Path, ckpt: str, data: str
) -> None:
    changes = ("model.decode_head.dropout_ratio=0.77", "train_cfg.max_iters=1")
    file = finished / "linear" / "mmengine_config.py"
    run(str(tmp_path), "run", ckpt, data, head="linear", config=file, set=changes)
    assert "dropout_ratio=0.77" in (tmp_path / "run" / "mmengine_config.py").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train_dataloader.batch_size=many", "batch_size is 'many'"),
        ("train_cfg.max_iters=x", "max_iters is 'x'"),
        ("optim_wrapper=7", "optim_wrapper is 7"),
        ("optim_wrapper.optimizer.lr=abc", "changed by hand"),
        ("train_dataloader.dataset.pipeline=[]", "changed by hand"),
        ("model.decode_head.in_index=7", "cannot take the levels 7"),
    ],
)
def test_values_of_no_use_are_said(
    finished: Path, tmp_path: Path, ckpt: str, data: str, change: str, said: str
) -> None:
    file = finished / "linear" / "mmengine_config.py"
    with pytest.raises(ConfigError, match=said):
        run(str(tmp_path), "run", ckpt, data, head="linear", config=file, set=(change,))


def test_a_configuration_without_a_model_is_refused(tmp_path: Path, ckpt: str, data: str) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="model is not there"):
        run(str(tmp_path), "run", ckpt, data, config=tmp_path / "empty.py")


def test_the_class_count_follows_the_data(
    finished: Path, tmp_path: Path, ckpt: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (finished / "upernet" / "mmengine_config.py").read_text()
    (tmp_path / "config.py").write_text(text.replace("num_classes=4", "num_classes=150"))
    record = run(str(tmp_path), "run", ckpt, data, config=tmp_path / "config.py")
    assert record.metrics == EvalRecord.load(finished / "upernet").metrics
    assert any("150 classes" in warning and "4" in warning for warning in record.warnings)
    assert "150 classes" in capsys.readouterr().err


def test_nothing_but_the_runs_own_words_is_printed(
    tmp_path: Path, ckpt: str, data: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run(str(tmp_path), "run", ckpt, data, head="linear", iterations=2, workers=1)
    out, err = capfd.readouterr()
    assert out == ""
    lines = [line for line in err.replace("\r", "\n").splitlines() if line.strip()]
    ours = ("training:", "validation:", "testing:", "warning:", "note:")
    bars = tuple(f"  {name} " for name in ("background", "square", "disc", "bar", "(1"))
    assert all(line.startswith(ours + bars) for line in lines), lines
    assert "training: pixels per class" in lines
    assert sum(line.startswith("  background ") for line in lines) == 2


def test_shapes_are_learnt(tmp_path: Path, ckpt: str) -> None:
    """Four images, which are also those of the test."""
    root = label_map_folder(tmp_path / "data", 4, 4)
    for kind in ("images", "annotations"):
        shutil.rmtree(root / kind / "validation")
        shutil.copytree(root / kind / "training", root / kind / "validation")
    shared = {"train_batch": 4, "eval_every": 0, "photometric": False, "random_scale": (1.0, 1.0), "dropout": 0.0}
    record = run(
        str(tmp_path), "linear", ckpt, str(root), head="linear", lr=0.1, iterations=100, short_side=96, **shared
    )
    values = {m["name"]: m["value"] for m in record.metrics if "class" not in m["params"]}
    assert values["miou"] > 50
    assert values["aacc"] > 85
    run(str(tmp_path), "upernet", ckpt, str(root), lr=1e-2, layer_decay=1.0, drop_path=0.0, iterations=40, **shared)
    losses = [row["loss"] for row in read_log(tmp_path / "upernet" / "log.jsonl") if "loss" in row]
    assert losses[-1] < 0.4 * losses[0]


def test_a_killed_run_goes_on_as_if_it_had_not_been(finished: Path, tmp_path: Path, ckpt: str, data: str) -> None:
    killed = Running(run_quietly, str(tmp_path), "upernet", ckpt, data, 6, signal.SIGKILL).done(180)
    assert killed.code == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "upernet" / "checkpoints").is_dir()
    with pytest.raises(ConfigError, match="iterations"):
        run(str(tmp_path), "upernet", ckpt, data, iterations=10)
    record = run(str(tmp_path), "upernet", ckpt, data)
    assert record.metrics == EvalRecord.load(finished / "upernet").metrics
    other = weights(finished / "upernet")
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(tmp_path / "upernet").items())
    logs = [
        [{k: v for k, v in row.items() if k not in TIMES} for row in read_log(folder / "upernet" / "log.jsonl")]
        for folder in (tmp_path, finished)
    ]
    assert logs[0] == logs[1]


def test_two_ranks_train_and_test_as_one(finished: Path, tmp_path: Path, ckpt: str, data: str) -> None:
    """The linear head, which has no batch norm: two ranks of one image are one process of two."""
    changes = {"head": "linear", "dropout": 0.0}
    one = on_ranks(str(tmp_path / "one"), ckpt, data, changes)
    two = run_ranks(2, on_ranks, str(tmp_path / "two"), ckpt, data, changes | {"train_batch": 1}, timeout=240)
    assert two[0] == two[1]
    assert [m[:2] for m in two[0]] == [m[:2] for m in one]
    for (_, _, value), (_, _, other) in zip(one, two[0], strict=True):
        assert value is other or value == pytest.approx(other, abs=0.5)
    state, others = weights(tmp_path / "one" / "run"), weights(tmp_path / "two" / "run")
    torch.testing.assert_close(state["decode_head.conv_seg.weight"], others["decode_head.conv_seg.weight"])


def test_two_ranks_train_upernet(tmp_path: Path, ckpt: str, data: str) -> None:
    """Pictures and files are written once; both ranks say the same."""
    two = run_ranks(2, on_ranks, str(tmp_path), ckpt, data, {"iterations": 2, "eval_every": 0}, timeout=240)
    assert two[0] == two[1]
    record = EvalRecord.load(tmp_path / "run")
    assert len(load_predictions(tmp_path / "run" / "predictions.npz")["image_ids"]) == 3
    assert sum(a["kind"] == "figure" for a in record.artifacts) == 2


def test_a_batch_of_one_is_refused(tmp_path: Path, ckpt: str, data: str) -> None:
    with pytest.raises(ConfigError, match="UperNet pools each image to one pixel"):
        run(str(tmp_path), "one", ckpt, data, train_batch=1)


def test_a_finished_run_is_not_written_over(tmp_path: Path, ckpt: str, data: str) -> None:
    run(str(tmp_path), "run", ckpt, data, head="linear", iterations=2, eval_every=0)
    with pytest.raises(ConfigError, match="exists already"):
        run(str(tmp_path), "run", ckpt, data, head="linear", iterations=2)


FOREIGN = """
default_scope = "mmseg"
norm_cfg = dict(type="SyncBN", requires_grad=True)
crop_size = (64, 64)
data_preprocessor = dict(type="SegDataPreProcessor", mean=[120.0] * 3, std=[60.0] * 3, bgr_to_rgb=True, size=crop_size,
                         test_cfg=dict(size_divisor=32))
model = dict(
    type="EncoderDecoder", data_preprocessor=data_preprocessor, pretrained="nowhere.pth",
    backbone=dict(type="ResNetV1c", depth=50),
    decode_head=dict(type="UPerHead", in_channels=[256, 512, 1024, 2048], in_index=[0, 1, 2, 3], channels=8,
                     num_classes=150, norm_cfg=norm_cfg),
    auxiliary_head=[dict(type="FCNHead", in_channels=1024, in_index=2, channels=8, num_convs=1, concat_input=False,
                         num_classes=150, norm_cfg=norm_cfg,
                         loss_decode=dict(type="CrossEntropyLoss", loss_weight=0.4))],
    train_cfg=dict(), test_cfg=dict(mode="whole"))
load = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations", reduce_zero_label=True)]
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(type="ADE20KDataset", data_root="data/ade", data_prefix=dict(img_path="a", seg_map_path="b"),
                 pipeline=[*load, dict(type="RandomCrop", crop_size=crop_size), dict(type="PackSegInputs")]))
test_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="ADE20KDataset", data_root="data/ade", data_prefix=dict(img_path="a", seg_map_path="b"),
                 pipeline=[load[0], dict(type="Resize", scale=(256, 64), keep_ratio=True), load[1],
                           dict(type="PackSegInputs")]))
test_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
train_cfg = dict(type="IterBasedTrainLoop", max_iters=2, val_interval=2)
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.01, weight_decay=0.01),
                     paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0))))
param_scheduler = [dict(type="PolyLR", eta_min=1e-4, power=0.9, begin=0, end=2, by_epoch=False)]
"""
"""As mmsegmentation's own configurations are written."""


def test_a_configuration_of_mmsegmentation_fits_the_checkpoint_and_the_data(
    tmp_path: Path, ckpt: str, data: str
) -> None:
    (tmp_path / "foreign.py").write_text(FOREIGN)
    record = run(str(tmp_path), "run", ckpt, data, config=tmp_path / "foreign.py")
    assert record.status == "success"
    assert any("ResNetV1c" in warning for warning in record.warnings)
    state = weights(tmp_path / "run")
    assert state["decode_head.lateral_convs.0.conv.weight"].shape == (8, 32, 1, 1)
    assert state["auxiliary_head.0.convs.0.conv.weight"].shape == (8, 32, 3, 3)
    assert state["decode_head.conv_seg.weight"].shape == (4, 8, 1, 1)
    assert load_predictions(tmp_path / "run" / "predictions.npz")["labelled"].sum() == 3 * 95 * 128
