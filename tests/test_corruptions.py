"""ImageNet-C on tiny folders, and corruptions made on the fly."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from ibot_eval import cli
from ibot_eval.data.folders import FolderSplit
from ibot_eval.errors import ConfigError, DataError, MissingExtra
from ibot_eval.prediction_columns import column_of
from ibot_eval.protocol import Metric, Warning
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.robustness.answers import Answers
from ibot_eval.robustness.corrupted import CorruptedSplit
from ibot_eval.robustness.corruption_errors import ALEXNET, EXTRA
from ibot_eval.settings import DataSettings
from ibot_eval.testing import check_protocol
from protocols.corruptions import Corruptions, CorruptionsConfig
from tests import layouts
from tests.images import picture, save
from tests.robustness_classifiers import checkpoint
from tests.robustness_folders import SIDE, TRANSFORM, classify_by_pixel, folder, predictions, run, says, values


def test_conforms() -> None:
    check_protocol("corruptions")


def test_mce_and_relative_mce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*ALEXNET, *EXTRA]
    root = folder(tmp_path / "c", {f"{c}/{s}/{k}": [0] for c in names for s in range(1, 6) for k in "ab"})
    save(root / "fog/3/b/0.png", says(1))
    clean = folder(tmp_path / "clean", {"a": [0, 0], "b": [1, 0]})
    classify_by_pixel(monkeypatch, [0, 1])
    config = CorruptionsConfig(corruptions=tuple(names), clean=clean)
    events = run(Corruptions(config), tmp_path, DataSettings(data=str(root)))
    # The error is 50 % on every corruption, but 40 % on fog, whose third severity has none; and 25 % on clean images.
    errors = {name: 40 if name == "fog" else 50 for name in names}
    plain = values(events)
    assert plain["mce"] == pytest.approx(100 * sum(errors[c] / e for c, e in ALEXNET.items()) / 15)
    assert plain["relative_mce"] == pytest.approx(
        100 * sum((errors[c] - 25) / (e - 43.5) for c, e in ALEXNET.items()) / 15
    )
    each = values(events, "corruption")
    assert each["mce", "fog"] == pytest.approx(100 * 40 / 81.9324)
    assert each["relative_mce", "fog"] == pytest.approx(100 * 15 / (81.9324 - 43.5))
    assert ("mce", "spatter") not in each
    unrelated = values(events, "relative_to", "corruptions")
    assert unrelated["mce", "none", 15] == pytest.approx((14 * 50 + 40) / 15)
    assert unrelated["mce", "none", 19] == pytest.approx((18 * 50 + 40) / 19)
    top1 = values(events, "corruption", "severity")
    assert [top1["top1", "fog", level] for level in (1, 3, "mean")] == [50, 100, 60]
    assert top1["top1", "clean", 0] == 75
    answers = predictions(events)
    assert answers["fog/3/b/0.png"] == 1
    assert answers["clean/b/1.png"] == 0
    shown = Corruptions.headline([{"name": e.name, "params": e.params} for e in events if hasattr(e, "params")])  # pyright: ignore
    assert shown == {"name": "mce", "params": {}}


def test_figure_by_hand() -> None:
    def record(name: str, changes: dict[tuple[str, int], float]) -> EvalRecord:
        rows = {("clean", 0): 90.0, ("fog", 1): 80.0, ("snow", 1): 60.0, ("fog", 2): 40.0, ("pixelate", 1): 10.0}
        metrics = [Metric("top1", v, params={"corruption": c, "severity": s}) for (c, s), v in (rows | changes).items()]
        metrics.append(Metric("top1", 50, params={"corruption": "fog", "severity": "mean"}))
        return EvalRecord(name, "corruptions", 1, metrics=[asdict(m) for m in metrics])

    (figure,) = Corruptions.figures(record("one", {}), record("two", {("fog", 2): 0.0})).values()
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines.keys() == {f"{run} {kind}" for run in ("one", "two") for kind in ("weather", "digital")}
    assert lines["one weather"].get_xdata().tolist() == [0, 1, 2]
    assert lines["one weather"].get_ydata().tolist() == [90, 70, 40]
    assert lines["two weather"].get_ydata().tolist() == [90, 70, 0]
    assert lines["two digital"].get_ydata().tolist() == [90, 10]


def test_a_part_has_no_mce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the parts of ImageNet-C unpack: below a folder of their own.
    root = folder(tmp_path / "c", {f"weather/fog/{s}/{k}": [0] for s in (1, 2) for k in "ab"})
    (root / "weather/fog/3").mkdir()
    classify_by_pixel(monkeypatch, [0, 1])
    protocol = Corruptions(CorruptionsConfig(corruptions=("fog", "snow")))
    notes = protocol.open(DataSettings(data=str(root))).warnings
    assert any("not there" in note and "'fog/4'" in note and "'snow/1'" in note for note in notes)
    assert any("without images" in note and "'fog/3'" in note for note in notes)
    events = run(protocol, tmp_path, DataSettings(data=str(root)))
    assert values(events, "severity") == {("top1", 1): 50, ("top1", 2): 50}
    assert any(isinstance(e, Warning) and "no mCE: only 0 of its 15" in e.message for e in events)
    assert Corruptions.headline([{"name": "top1", "params": {}}]) is None


def test_larger_images_are_cropped_and_smaller_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The crop's first pixel says the class; a resize would blend it with the frame.
    picture = says(2, SIDE + 6)
    picture[3 : 3 + SIDE, 3 : 3 + SIDE] = says(1)
    save(tmp_path / "fog/1/b/0.png", picture)
    folder(tmp_path, {"fog/1/a": [0]})
    classify_by_pixel(monkeypatch, [0, 1, -1])
    protocol = Corruptions(CorruptionsConfig(corruptions=("fog",)))
    assert values(run(protocol, tmp_path, DataSettings(data=str(tmp_path))), "severity")["top1", 1] == 100
    save(tmp_path / "fog/1/b/small.png", says(1, SIDE - 1))
    with pytest.raises(DataError, match=r"small.png has 31 x 31 pixels, not 32 x 32 pixels at least"):
        run(protocol, tmp_path, DataSettings(data=str(tmp_path)))


def test_settings_and_data_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (("rain",), (), ("fog", "fog")):
        with pytest.raises(ConfigError, match="different ones of ImageNet-C"):
            Corruptions(CorruptionsConfig(corruptions=names))
    with pytest.raises(ConfigError, match="--clean is not needed"):
        Corruptions(CorruptionsConfig(on_the_fly=True, clean=tmp_path))
    with pytest.raises(DataError, match="none of the folders"):
        Corruptions(CorruptionsConfig()).open(DataSettings(data=str(tmp_path)))
    root = folder(tmp_path / "c", {f"fog/1/{k}": [0] for k in "ab"})
    clean = folder(tmp_path / "clean", {"a": [0], "c": [1]})
    with pytest.raises(ConfigError, match="classes of --clean"):
        Corruptions(CorruptionsConfig(corruptions=("fog",), clean=clean)).open(DataSettings(data=str(root)))
    classify_by_pixel(monkeypatch, [0, -1])
    with pytest.raises(ConfigError, match="lacks 1 of the 2 classes of the data: 'b'"):
        run(Corruptions(CorruptionsConfig(corruptions=("fog",))), tmp_path, DataSettings(data=str(root)))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(MissingExtra, match=r"ibot-eval\[corruptions\]"):
        Corruptions(CorruptionsConfig(on_the_fly=True)).for_network(None, TRANSFORM, frozenset())  # pyright: ignore


def clean_split(root: Path, count: int = 3) -> FolderSplit:
    files = [save(root / f"{i}.png", picture(40, 48, i)).name for i in range(count)]
    return FolderSplit("val", root, files, np.arange(count) % 2)


def test_ways_of_an_image_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    split = clean_split(tmp_path)
    load = FolderSplit.load
    monkeypatch.setattr(FolderSplit, "load", lambda self, i: decoded.append(i) or load(self, i))
    corrupted = CorruptedSplit(split, TRANSFORM, [("clean", 0)] * 2, 0)
    assert corrupted.labels.tolist() == [0, 0, 1, 1, 0, 0]
    for i in range(6):
        np.testing.assert_array_equal(np.asarray(corrupted.load(i)), TRANSFORM(load(split, i // 2)).permute(1, 2, 0))
    assert decoded == [0, 1, 2]
    corrupted.ways = [("clean", 0), ("fog", 2)]
    found = Answers(
        np.array([0, 1, 3, 4, 5]), np.array([0, 0, 1, 0, 0]), np.arange(5), np.zeros(5), ["clean/0/val/1.png"]
    )
    clean, fog = dict(corrupted.each(found)).values()
    assert (clean.indices.tolist(), clean.predicted.tolist(), clean.unreadable) == (
        [0, 2],
        [0, 3],
        ["clean/0/val/1.png"],
    )
    assert (fog.indices.tolist(), fog.predicted.tolist(), fog.unreadable) == ([0, 1, 2], [1, 2, 4], [])


def test_every_corruption_is_seeded_per_image(tmp_path: Path) -> None:
    pytest.importorskip("imagecorruptions")
    split, names = clean_split(tmp_path), (*ALEXNET, *EXTRA)
    ways = [("clean", 0), *((name, 3) for name in names)]
    corrupted = CorruptedSplit(split, TRANSFORM, ways, 5)
    before = np.random.get_state()[1].tolist()  # pyright: ignore
    first = [np.asarray(corrupted.load(i)) for i in range(len(corrupted))]
    assert np.random.get_state()[1].tolist() == before  # pyright: ignore
    # In another order, with fewer ways beside it.
    for i in (2, 0):
        for name in reversed(names):
            alone = np.asarray(CorruptedSplit(split, TRANSFORM, [(name, 3)], 5).load(i))
            np.testing.assert_array_equal(alone, first[i * len(ways) + 1 + names.index(name)], err_msg=name)
    for number, (name, _) in enumerate(ways[1:], 1):
        assert first[number].shape == (SIDE, SIDE, 3)
        assert (first[number] != first[0]).mean() > 0.05, name
    noise = [np.asarray(CorruptedSplit(split, TRANSFORM, [("impulse_noise", 3)], seed).load(0)) for seed in (5, 6)]
    assert (noise[0] != noise[1]).any()


def test_on_the_fly_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imagecorruptions")
    monkeypatch.chdir(tmp_path)
    few = ["--test-per-class", "2", "--train-per-class", "3", "--resize", "32", "--crop", "32", "--corruptions"]
    command = ["corruptions", "--on-the-fly", *few, "fog", "impulse_noise", "--output", "runs"]
    for name, workers, batch in (("one", "0", "64"), ("two", "2", "7")):
        assert cli.main([*command, "--name", name, "--workers", workers, "--batch-size", batch]) == 0
    one, two = (EvalRecord.load(tmp_path / "runs" / name) for name in ("one", "two"))
    assert [m["value"] for m in one.metrics] == [m["value"] for m in two.metrics]
    assert {m["params"].get("severity") for m in one.metrics} == {0, 1, 2, 3, 4, 5, "mean", None}
    table = load_predictions(tmp_path / "runs" / "one" / "predictions.npz")
    assert len(table["label"]) == 20
    assert len([name for name in table if name.startswith("top1@")]) == 11
    for metric in one.metrics:
        column = column_of(metric, table)
        if metric["name"] == "top1" and metric["params"]["severity"] != "mean":
            assert column is not None
            assert metric["value"] == pytest.approx(100 * (table[column] == table["label"]).mean())


def test_stored_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mCE from the saved predictions, with a network's own classifier."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    checkpoint(tmp_path / "net.safetensors", layouts.vit(num_classes=2), heads=3)
    for number, name in enumerate(ALEXNET):
        for level in range(1, 6):
            for i, label in enumerate("ab"):
                save(tmp_path / f"c/{name}/{level}/{label}/{i}.png", picture(32, 32, 100 * number + 10 * level + i))
    shared = [
        "corruptions",
        "--ckpt",
        "net.safetensors",
        "--heads",
        "3",
        "--data",
        "c",
        "--crop",
        "32",
        "--workers",
        "0",
    ]
    assert cli.main([*shared, "--name", "run"]) == 0
    record = EvalRecord.load(tmp_path / "runs" / "run")
    table = load_predictions(tmp_path / "runs" / "run" / "predictions.npz")
    assert table["image_ids"].tolist() == ["a/0.png", "b/1.png"]
    wrong = {name: table[name] != table["label"] for name in table if name.startswith("top1@")}
    errors = {
        c: 100 * np.mean([wrong[f"top1@corruption={c},severity={level}"] for level in range(1, 6)]) for c in ALEXNET
    }
    mce = next(m["value"] for m in record.metrics if m["name"] == "mce" and not m["params"])
    assert mce == pytest.approx(100 * np.mean([errors[c] / ALEXNET[c] for c in ALEXNET]))
    assert record.data["transform"]["resize"] is None
    assert cli.main(["plot", "runs/run"]) == 0
    assert (tmp_path / "runs/run/figures/corruptions-accuracy_by_severity.png").is_file()
