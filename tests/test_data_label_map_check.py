"""What the check of label maps says of each fault, and that it says nothing of good data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ibot_eval.data.label_map_check import check, check_data

from . import images
from .dense_data import label_map_folder, label_map_split, opened_label_maps

SHARED = Path("/work/shared/data")


def findings(root: Path, **settings: Any) -> list[str]:
    report = check_data(opened_label_maps(root, **settings))
    return [f"{finding.severity}: {finding.text()}" for finding in report.findings]


def says(root: Path, *parts: str, **settings: Any) -> None:
    """One finding of the check holds all of ``parts``."""
    listed = findings(root, **settings)
    assert any(all(part in line for part in parts) for line in listed), "\n".join(listed)


def edited(root: Path, change: Callable[[np.ndarray], Any], split: str = "training", every: bool = False) -> Path:
    """``root`` with the first label map (or all) of ``split`` changed in place, or replaced by what is returned."""
    files = sorted((root / "annotations" / split).iterdir())
    for file in files if every else files[:1]:
        labels = np.array(Image.open(file))
        new = change(labels)
        images.save(file, labels if new is None else new)
    return root


def fill(old: int, new: int) -> Callable[[np.ndarray], None]:
    def change(labels: np.ndarray) -> None:
        labels[labels == old] = new

    return change


def corner(value: int) -> Callable[[np.ndarray], None]:
    def change(labels: np.ndarray) -> None:
        labels[-1, -1] = value

    return change


def test_nothing_in_good_data(tmp_path: Path) -> None:
    assert findings(label_map_folder(tmp_path, train=8, test=8)) == []


def test_pixels_are_counted(tmp_path: Path) -> None:
    root = label_map_folder(tmp_path)
    report = check(label_map_split(opened_label_maps(root), "test"))
    stored = np.stack([np.array(Image.open(file)) for file in sorted((root / "annotations" / "validation").iterdir())])
    names = ("background", "square", "disc", "bar")
    assert dict(report.histograms[0].counts) == {name: int((stored == i).sum()) for i, name in enumerate(names)}
    assert report.heads == [
        "validation: 2 images with label maps, 4 classes, 1.0 % of the pixels without a class (255 in the files)"
    ]


def test_numbers_outside_the_range(tmp_path: Path) -> None:
    root = edited(label_map_folder(tmp_path), corner(7))
    says(root, "error: training: label values outside of 0 to 3 (or 255 for none): 7 in 1 label maps (0000.png")
    assert check_data(opened_label_maps(root)).errors[0].todo.startswith("if 7 means no class: --ignore 7")
    says(root, "error", "0 to 3 (or 7 for none): 255 in 4 label maps", ignore=7)
    edited(root, lambda labels: np.where(labels == 7, np.uint16(300), labels))
    says(root, "error", "more than 255 in 1 label maps")


def test_one_number_too_many_may_be_void_or_shifted(tmp_path: Path) -> None:
    root = edited(label_map_folder(tmp_path), corner(4), every=True)
    todo = check_data(opened_label_maps(root)).errors[0].todo
    assert "--reduce-zero" in todo
    assert "--ignore 4" in todo
    assert "0 (8" in todo  # per cent of the pixels


def test_reduced_without_need(tmp_path: Path) -> None:
    root = edited(label_map_folder(tmp_path), fill(3, 2), every=True)
    (root / "classes.txt").write_text("square\ndisc\nbar\n")
    says(root, "note: training: 0 means no class here", "3, the last class, never occurs", reduce_zero=True)
    says(root, "info: training: 0 means no class (reduce_zero_label), 1 is 'square'", reduce_zero=True)


def test_off_by_one_to_the_other_side(tmp_path: Path) -> None:
    root = edited(label_map_folder(tmp_path), lambda labels: np.clip(labels, 1, 2), every=True)
    says(root, "note: training: neither 0 ('background') nor 3 occurs", ignore=255)


def test_colours(tmp_path: Path) -> None:
    palette = np.array([(0, 0, 0), (10, 20, 30), (40, 50, 60), (70, 80, 90)], np.uint8)

    def paint(labels: np.ndarray) -> np.ndarray:
        return palette[np.where(labels == 255, 0, labels)]

    root = edited(label_map_folder(tmp_path), paint)
    says(root, "error: training: label maps that hold colours instead of class numbers: 1 (0000.png)")
    edited(root, lambda labels: paint(labels) if labels.ndim == 2 else labels, every=True)
    edited(root, paint, "validation", every=True)
    (root / "classes.txt").write_text("square,10,20,30\ndisc,40,50,60\n")
    # Of train's four scenes, bars are drawn in 70,80,90.
    says(root, "error: training: colours that are not in the class list: 1 (70,80,90 ")
    says(root, "info: training: colours that stand for no class: 1 (0,0,0 ")
    (root / "classes.txt").write_text("square,10,20,30\ndisc,40,50,60\nbar,70,80,90\n")
    assert not check_data(opened_label_maps(root)).errors
    # Where a list gives colours only to draw with, label maps may hold numbers.
    edited(root, lambda labels: labels[..., 0] // 30)
    assert not check_data(opened_label_maps(root)).errors


def test_black_and_white_masks(tmp_path: Path) -> None:
    root = label_map_folder(tmp_path, classes=False)
    for split in ("training", "validation"):
        edited(root, lambda labels: np.where((labels > 0) & (labels < 255), 255, 0).astype(np.uint8), split, every=True)
    says(root, "error: training: there is one class, so there is nothing to learn")
    assert "background,0,0,0" in check_data(opened_label_maps(root)).errors[0].todo
    (root / "classes.txt").write_text("background,0,0,0\nobject,255,255,255\n")
    assert findings(root) == []
    edited(root, corner(128))
    says(root, "error: training: label values outside of 0, 255", "128 in 1 label maps (0000.png")


def test_what_opening_guessed_is_said(tmp_path: Path) -> None:
    says(label_map_folder(tmp_path, classes=False), "info: there is no class list")


def test_files(tmp_path: Path) -> None:
    root = label_map_folder(tmp_path)
    maps, pictures = root / "annotations" / "training", root / "images" / "training"
    (maps / "0000.png").unlink()
    (maps / "0001.png").write_bytes(b"\x89PNG")
    images.save(maps / "0002.png", np.zeros((10, 20), np.uint8))
    images.save(maps / "extra.png", np.zeros((10, 20), np.uint8))
    images.save(pictures / "0003.jpg", np.zeros((96, 128), np.uint8))
    says(root, "error: training: images without a label map: 1 (0000.jpg)")
    says(root, "error: training: label maps that cannot be read: 1", "0001.png")
    says(root, "error: training: images of another size than the label map has: 1", "0002.jpg: 128x96, not 20x10")
    says(root, "note: training: label maps without an image: 1 (extra.png)")
    says(root, "note: training: greyscale images, read as RGB: 1 (0003.jpg)")


def test_label_maps_as_jpeg(tmp_path: Path) -> None:
    root = label_map_folder(tmp_path)
    file = root / "annotations" / "validation" / "0000.png"
    Image.open(file).save(file.with_suffix(".jpg"), quality=70)
    file.unlink()
    says(root, "error: validation: label maps saved as JPEG", "0000.jpg")


def test_empty_label_maps(tmp_path: Path) -> None:
    root = edited(label_map_folder(tmp_path), lambda labels: np.full_like(labels, 255))
    says(root, "note: training: label maps without any class: 1 (0000.png)")
    edited(root, lambda labels: np.full_like(labels, 255), every=True)
    says(root, "error: training: no pixel has a class")
    edited(root, lambda labels: np.zeros_like(labels), every=True)
    says(root, "note: training: all pixels with a class are of one class")
    says(root, "note: training: classes without pixels: 3 (square, disc, bar)")
    says(root, "note: classes that validation has and training lacks; they cannot be found: 2 (square, disc)")


def test_images_in_both_splits(tmp_path: Path) -> None:
    root = label_map_folder(tmp_path)
    says(root, "all test images are train images", test_split="training")
    file = root / "images" / "validation" / "0000.jpg"
    file.unlink()
    file.symlink_to(root / "images" / "training" / "0001.jpg")
    says(root, "note: images that are in both train and test: 1 (0001.jpg)")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
def test_real_images(tmp_path: Path) -> None:
    report = check_data(opened_label_maps(SHARED / "camvid_tiny", ignore=11))
    assert [finding.severity for finding in report.findings] == ["info"]
    assert report.heads[0].startswith("training: 60 images with label maps, 11 classes, 3.5 % of the pixels without")
    (tmp_path / "names.txt").write_text("\n".join(f"class {i}" for i in range(11)))
    errors = check_data(opened_label_maps(SHARED / "camvid_tiny", classes=tmp_path / "names.txt")).errors
    assert [error.text().partition(" label maps")[0] for error in errors] == [
        "training: label values outside of 0 to 10 (or 255 for none): 11 in 60",
        "validation: label values outside of 0 to 10 (or 255 for none): 11 in 20",
    ]
    sample = check_data(opened_label_maps(SHARED / "ade20k_sample", ("test",), test_split="."))
    assert not sample.errors
