"""Settings of detection, and what can be said of data before any network is made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from timm.models.resnet import BasicBlock, ResNet

from ibot_eval.backbone import Backbone
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.models import ResNetBackbone
from ibot_eval.settings import DataSettings, RunSettings
from protocols.detect import Detect, DetectConfig
from tests.dense import prepared
from tests.dense_data import coco_folder
from tests.fakes import FakeBackbone

TRANSFORM = EvalTransform(224, 224, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.0}, "--lr 0.0: it must be above 0"),
        ({"layer_decay": 1.1}, "--layer-decay 1.1"),
        ({"drop_path": 1.0}, "--drop-path 1.0"),
        ({"epochs": 0}, "--epochs 0"),
        ({"epochs": 8}, "--steps 8 11 are not rising numbers below --epochs 8"),
        ({"steps": (11, 8)}, "--steps 11 8"),
        ({"short_sides": ()}, "--short-sides"),
        ({"long_side": 500}, "--long-side 500 is below the largest shorter side, 800"),
        ({"short_sides": (8,)}, "--short-sides 8"),
        ({"bootstrap": -1}, "--bootstrap -1"),
        ({"keep": 0}, "--keep 0"),
        ({"config": Path("nowhere.py")}, "--config nowhere.py: there is no such file"),
        ({"trained": Path("nowhere.pth")}, "--trained nowhere.pth: there is no such file"),
    ],
)
def test_refused_settings(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Detect(replace(DetectConfig(), **changes))
    assert said in error.value.what


@pytest.mark.parametrize("flag", ["crop", "resize", "batch_size"])
def test_flags_of_classification_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} is of classification"):
        Detect(DetectConfig()).for_network(FakeBackbone(), TRANSFORM, frozenset({flag}))


def checked(folder: Path) -> str | None:
    return Detect(DetectConfig(check_data=True)).instead(RunSettings(data=DataSettings(data=str(folder))))


def test_check_data_shows_the_classes_and_needs_no_checkpoint(tmp_path: Path) -> None:
    text = checked(coco_folder(tmp_path, 3, 2))
    assert text is not None
    for part in ("train: 3 images", "val: 2 images", "square", "disc", "bar"):
        assert part in text
    assert Detect(DetectConfig()).instead(RunSettings(data=DataSettings(data=str(tmp_path)))) is None


def test_check_data_stops_at_missing_images(tmp_path: Path) -> None:
    folder = coco_folder(tmp_path, 3, 2)
    (folder / "train" / "0001.jpg").unlink()
    with pytest.raises(DataError, match=r"0001\.jpg"):
        checked(folder)


def test_check_data_tells_of_names_that_differ_in_case(tmp_path: Path) -> None:
    folder = coco_folder(tmp_path, 3, 2)
    file = folder / "annotations" / "instances_val.json"
    content = json.loads(file.read_text())
    content["categories"][0]["name"] = "Square"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="Square"):
        checked(folder)


def breaks_off(file: Path) -> None:
    """Only its header is left, and some of the pixels."""
    file.write_bytes(file.read_bytes()[:2000])


def test_a_test_image_that_breaks_off_is_found_before_training(tmp_path: Path) -> None:
    folder = coco_folder(tmp_path, 3, 3)
    breaks_off(folder / "val" / "0001.jpg")
    with pytest.raises(DataError, match=r"val: images that cannot be decoded: 1 \(val/0001\.jpg\)"):
        checked(folder)
    prepared()
    with pytest.raises(DataError, match="cannot be decoded: 1"):
        Detect(DetectConfig()).open(DataSettings(data=str(folder)))


def test_test_images_that_break_off_can_be_left_out_but_not_all(tmp_path: Path) -> None:
    prepared()
    folder = coco_folder(tmp_path, 3, 3)
    breaks_off(folder / "val" / "0001.jpg")
    settings = DataSettings(data=str(folder), bad_images="skip")
    data = Detect(DetectConfig()).open(settings)
    assert list(data.splits["test"].image_ids) == ["val/0000.jpg", "val/0002.jpg"]
    assert "val: images that cannot be decoded are left out of the test: 1 (val/0001.jpg)" in data.warnings
    for name in ("0000.jpg", "0002.jpg"):
        breaks_off(folder / "val" / name)
    with pytest.raises(DataError, match="cannot be decoded: 3"):
        Detect(DetectConfig()).open(settings)


def test_a_resnet_has_no_drop_path_unless_it_is_asked_for() -> None:
    net = ResNetBackbone(ResNet(BasicBlock, (1, 1, 1, 1), num_classes=0))

    def drop_path(backbone: Backbone, *asked: str) -> float:
        return Detect(DetectConfig()).for_network(backbone, TRANSFORM, frozenset(asked)).config.drop_path

    assert drop_path(net) == 0
    # Refused once the network is built, since a ResNet cannot have any.
    assert drop_path(net, "drop_path") == 0.1
    assert drop_path(FakeBackbone()) == 0.1
