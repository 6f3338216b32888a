"""Settings of segmentation, and what can be said of data before any network is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from timm.models.resnet import BasicBlock, ResNet

from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.models import ResNetBackbone
from ibot_eval.settings import DataSettings, RunSettings
from protocols.openmmlab.segmentation_pictures import draw_example, palette_of
from protocols.segment import Segment, SegmentConfig
from tests.dense import prepared
from tests.dense_data import label_map_folder
from tests.fakes import FakeBackbone

TRANSFORM = EvalTransform(224, 224, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.0}, "--lr 0.0: it must be above 0"),
        ({"layer_decay": 1.1}, "--layer-decay 1.1"),
        ({"dropout": 1.0}, "--dropout 1.0"),
        ({"iterations": 0}, "--iterations 0"),
        ({"crop_size": 16}, "--crop-size 16"),
        ({"stride": 600}, "--stride 600 is larger than --crop-size 512"),
        ({"random_scale": (2.0, 0.5)}, "--random-scale 2.0 0.5"),
        ({"drop_path": 1.0}, "--drop-path 1.0"),
        ({"short_side": 1}, "--short-side 1: it is 32 or above, or 0"),
        ({"scales": (0.5, 0.0)}, "--scales 0.0: it must be above 0"),
        ({"bootstrap": -1}, "--bootstrap -1"),
        ({"config": Path("nowhere.py")}, "--config nowhere.py: there is no such file"),
        ({"trained": Path("nowhere.pth")}, "--trained nowhere.pth: there is no such file"),
    ],
)
def test_refused_settings(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Segment(replace(SegmentConfig(), **changes))
    assert said in error.value.what


def resolved(asked: frozenset[str] = frozenset(), **changes: Any) -> SegmentConfig:
    return Segment(SegmentConfig(**changes)).for_network(FakeBackbone(), TRANSFORM, asked).config


@pytest.mark.parametrize("flag", ["crop", "resize", "batch_size"])
def test_flags_of_classification_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} is of classification"):
        resolved(frozenset({flag}))


def test_what_is_left_open_is_filled_in() -> None:
    own = resolved(crop_size=96, iterations=200)
    assert (own.short_side, own.stride, own.warmup) == (96, 64, 20)
    assert (own.lr, own.layer_decay) == (8e-5, 0.65)
    own = resolved(frozenset({"warmup"}), head="linear", warmup=100, iterations=200, short_side=64, lr=1.0)
    assert (own.short_side, own.warmup, own.lr) == (64, 100, 1.0)
    with pytest.raises(ConfigError, match="--warmup 200 does not end before --iterations 200"):
        resolved(frozenset({"warmup"}), warmup=200, iterations=200)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"random_scale": (0.1, 1.0)}, "--random-scale 0.1 of a shorter side of 80 pixels is less than 16"),
        ({"scales": (1.0, 0.01)}, "--scales 0.01 of a shorter side of 80 pixels"),
    ],
)
def test_images_are_not_scaled_to_nothing(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(short_side=80, **changes)


@pytest.mark.parametrize(
    ("head", "architecture", "dropout", "drop_path"),
    [
        ("upernet", "vit-b/16", 0.1, 0.1),
        ("upernet", "vit-l/16", 0.1, 0.2),
        ("linear", "vit-b/16", 0.0, 0.1),
        ("setr-pup", "vit-b/16", 0.0, 0.1),
    ],
)
def test_what_is_dropped_is_as_released_unless_it_is_asked_for(
    head: Any, architecture: str, dropout: float, drop_path: float
) -> None:
    net = FakeBackbone()
    net.architecture = architecture
    own = Segment(SegmentConfig(head=head)).for_network(net, TRANSFORM, frozenset()).config
    assert (own.dropout, own.drop_path) == (dropout, drop_path)
    own = Segment(SegmentConfig(head=head, dropout=0.4, drop_path=0.3)).for_network(net, TRANSFORM, frozenset()).config
    assert (own.dropout, own.drop_path) == (0.4, 0.3)


def test_a_resnet_has_no_drop_path_unless_it_is_asked_for() -> None:
    net = ResNetBackbone(ResNet(BasicBlock, (1, 1, 1, 1), num_classes=0))
    assert Segment(SegmentConfig()).for_network(net, TRANSFORM, frozenset()).config.drop_path == 0
    # Refused once the network is built, since a ResNet cannot have any.
    assert Segment(SegmentConfig(drop_path=0.1)).for_network(net, TRANSFORM, frozenset()).config.drop_path == 0.1


def test_a_test_image_that_breaks_off_is_found_before_training_or_left_out(tmp_path: Path) -> None:
    prepared()
    folder = label_map_folder(tmp_path, 3, 3)
    file = folder / "images" / "validation" / "0001.jpg"
    # Only its header is left, and some of the pixels.
    file.write_bytes(file.read_bytes()[:1500])
    said = r"validation: images that cannot be decoded: 1 \(validation/0001\.jpg\)"
    with pytest.raises(DataError, match=said):
        checked(folder)
    with pytest.raises(DataError, match=said):
        Segment(SegmentConfig()).open(DataSettings(data=str(folder)))
    data = Segment(SegmentConfig()).open(DataSettings(data=str(folder), bad_images="skip"))
    assert list(data.splits["test"].image_ids) == ["validation/0000.jpg", "validation/0002.jpg"]
    assert any("left out of the test: 1 (validation/0001.jpg)" in warning for warning in data.warnings)


def checked(folder: Path, **changes: Any) -> str | None:
    protocol = Segment(SegmentConfig(check_data=True, **changes))
    return protocol.instead(RunSettings(data=DataSettings(data=str(folder))))


def test_check_data_shows_the_classes_and_needs_no_checkpoint(tmp_path: Path) -> None:
    text = checked(label_map_folder(tmp_path, 3, 2))
    assert text is not None
    for part in ("training: 3 images", "validation: 2 images", "background", "square", "disc", "bar"):
        assert part in text
    assert Segment(SegmentConfig()).instead(RunSettings(data=DataSettings(data=str(tmp_path)))) is None


def test_check_data_stops_at_labels_out_of_range(tmp_path: Path) -> None:
    folder = label_map_folder(tmp_path, 3, 2)
    path = folder / "annotations" / "training" / "0001.png"
    labels = np.array(Image.open(path))
    labels[5, 5] = 77
    Image.fromarray(labels).save(path)
    with pytest.raises(DataError, match="77"):
        checked(folder)
    # As one that does not count it is none.
    assert checked(label_map_folder(tmp_path / "other", 3, 2), ignore=255)


def test_a_picture_shows_image_prediction_and_label(tmp_path: Path) -> None:
    """What does not count is grey in both maps."""
    Image.new("RGB", (60, 40), (10, 200, 10)).save(tmp_path / "scene.png")
    label = np.zeros((40, 60), np.uint8)
    label[:, 30:], label[:10] = 1, 255
    file = draw_example(
        tmp_path / "pictures" / "0.png",
        tmp_path / "scene.png",
        1 - label.clip(max=1),
        label,
        "ab",
        [[255, 0, 0], [0, 0, 255]],
    )
    pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)
    colours = {(10, 200, 10): 0.15, (255, 0, 0): 0.1, (0, 0, 255): 0.1, (224, 224, 224): 0.05}
    for colour, share in colours.items():
        assert (abs(pixels - colour).max(-1) <= 2).mean() > share, colour


def test_colours_of_neighbouring_classes_differ() -> None:
    palette = np.array(palette_of(150))
    assert len(np.unique(palette, axis=0)) == 150
    assert abs(np.diff(palette, axis=0)).max(1).min() > 50
