"""What the check of COCO-format annotations says of each fault, and that it says nothing of good data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ibot_eval.data.coco_check import check, check_data

from . import images as image_files
from .dense_data import SHAPES, changed, coco_folder, coco_split, opened_coco, scene


def findings(root: Path, **settings: Any) -> list[str]:
    report = check_data(opened_coco(root, **settings))
    return [f"{finding.severity}: {finding.text()}" for finding in report.findings]


def says(root: Path, *parts: str) -> None:
    """One finding of the check holds all of ``parts``."""
    listed = findings(root)
    assert any(all(part in line for part in parts) for line in listed), "\n".join(listed)


def test_none_in_good_data(tmp_path: Path) -> None:
    gaps = "class ids run from 1 to 7 with gaps, 3 of them: that is fine"
    expected = []
    for name, seed in (("train", 0), ("val", 1000)):
        discs = sum(SHAPES[one["label"]] == "disc" for i in range(8) for one in scene(seed + i)[1])
        masks = f"masks: {16 - discs} polygons, {discs} run lengths"
        expected += [f"info: {name}: {gaps}", f"info: {name}: {masks}"]
    assert findings(coco_folder(tmp_path, train=8, test=8)) == expected


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda c: c["images"].append(c["images"][0]), ("error: train: ids that several images have: 1 (5)",)),
        (
            lambda c: c["images"].append({**c["images"][0], "id": 99}),
            ("error: train: files that several images name: 1 (0000.jpg)",),
        ),
        (
            lambda c: c["categories"].append({"id": 1, "name": "x"}),
            (
                "error",
                "ids that several classes have: 1",
            ),
        ),
        (
            lambda c: c["categories"].append({"id": 8, "name": "bar"}),
            (
                "error",
                "names that several classes have",
            ),
        ),
        (lambda c: c["annotations"][0].update(id=2), ("note", "ids that several objects have", "(2)")),
        (lambda c: c["annotations"][0].pop("id"), ("note", "objects without an id", "object None of image 5")),
        (
            lambda c: c["annotations"][0].update(image_id=6),
            ("error", "an image that is not in the file: 1 (object 1: 6)"),
        ),
        (
            lambda c: c["annotations"][0].update(category_id=2),
            ("error", "a class that is not in the file: 1 (object 1: 2)"),
        ),
        (
            lambda c: c["annotations"][0].update(category_id="3"),
            ("error", "a class that is not in the file: 1 (object 1: '3')"),
        ),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), ("error", "four finite numbers", "[1, 2, 3]")),
        (
            lambda c: c["annotations"][0].update(bbox=[1, 2, float("nan"), 3]),
            ("error", "four finite numbers: 1 (object 1: [1, 2, nan, 3])"),
        ),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 10**400, 3]), ("error", "four finite numbers: 1")),
        (lambda c: c["annotations"][0].pop("bbox"), ("error", "four finite numbers", "object 1: None")),
        (
            lambda c: c["annotations"][0].update(bbox=[1, 2, 0, 3]),
            ("boxes without width or height", "object 1: [1, 2, 0, 3] in 0000.jpg of 128x96"),
        ),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, -5, 3]), ("boxes without width or height: 1",)),
        (lambda c: c["annotations"][0].update(bbox=[128, 2, 5, 3]), ("outside of their image", ": 1 (object 1")),
        (lambda c: c["annotations"][0].update(bbox=[1, -9, 5, 9]), ("outside of their image", ": 1 (object 1")),
        (lambda c: c["annotations"][0].update(bbox=[120, 2, 12, 3]), ("note", "over the border", ": 1 (object 1")),
        (lambda c: c["images"][0].pop("width"), ("error", "images without width and height", "0000.jpg")),
        (
            lambda c: c["images"][0].update(width=96, height=128),
            ("error", "another size than the annotation file has: 1", "0000.jpg: 128x96, not 96x128"),
        ),
        (lambda c: c["images"][0].update(width=10**400), ("error", "images without width and height", "0000.jpg")),
        (lambda c: c["images"][0].update(file_name="C:\\x\\0.jpg"), ("error", "backslashes", "C:\\x\\0.jpg")),
        # Both are true to Python.
        (
            lambda c: c["annotations"][0].update(iscrowd="0"),
            (
                "error",
                "iscrowd is neither 0 nor 1: 1 (object 1",
            ),
        ),
        (
            lambda c: c["annotations"][0].update(iscrowd=2),
            (
                "error",
                "iscrowd is neither 0 nor 1: 1 (object 1",
            ),
        ),
        (lambda c: c["annotations"][0].update(iscrowd=None), ("note", "objects without iscrowd", ": 1 (object 1")),
        (lambda c: c["annotations"][0].update(area=float("inf")), ("note", "without an area", ": 1 (object 1")),
        (lambda c: c["annotations"][0].update(area=10**400), ("note", "without an area", ": 1 (object 1")),
        # No area, and nothing to compute it from.
        (
            lambda c: c["annotations"][0].update(area=0, segmentation=[[10**400] * 6]),
            (
                "error",
                "no numbers: 1",
            ),
        ),
        (
            lambda c: c["annotations"][0].update(area=0, segmentation=[["a"] * 6]),
            (
                "error",
                "no numbers: 1",
            ),
        ),
        (
            lambda c: c["annotations"][0].update(area=0, segmentation=[[[1, 2]] * 6]),
            (
                "error",
                "no numbers: 1",
            ),
        ),
        (
            lambda c: c["annotations"][0].update(area=0, segmentation=0, bbox=["1"] * 4),
            (
                "error",
                "finite numbers: 1",
            ),
        ),
        (lambda c: c["annotations"].clear(), ("error: train: no image has an object",)),
        (lambda c: c.pop("annotations"), ("error: train: the file has no annotations",)),
        (lambda c: c["images"].append({**c["images"][0], "id": 9, "file_name": "b.jpg"}), ("error", "not there")),
        (lambda c: c["categories"].append({"id": 9, "name": "ring"}), ("note: train: classes without objects",)),
        (lambda c: c["categories"].append({"id": 9, "name": "ring"}), ("note: classes of train that val lacks",)),
        (lambda c: c["categories"][2].update(name="Bar "), ("error", "only in case or spaces", "'bar' and 'Bar '")),
        (lambda c: c["categories"][2].update(name="rod"), ("error: classes of val that train lacks: 1 ('bar')",)),
    ],
)
def test_each_is_found(tmp_path: Path, change: Callable[[dict[str, Any]], Any], parts: tuple[str, ...]) -> None:
    says(changed(coco_folder(tmp_path), change), *parts)


def test_images_without_objects(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 15]
        for annotation in content["annotations"]:
            if annotation["image_id"] == 25:
                annotation["iscrowd"] = 1

    root = changed(coco_folder(tmp_path), change)
    says(root, "note: train: images without objects", ": 2 (0001.jpg, 0002.jpg)")
    assert check_data(opened_coco(root)).heads[0] == "train: 4 images, 6 objects, 3 classes (2 crowds)"


def test_few_odd_boxes_are_slips_and_many_are_an_error(tmp_path: Path) -> None:
    def flatten(count: int) -> Callable[[dict[str, Any]], None]:
        def change(content: dict[str, Any]) -> None:
            first = content["annotations"][0]
            extra = [{**first, "id": 100 + i} for i in range(400 - len(content["annotations"]))]
            content["annotations"] += extra
            for annotation in content["annotations"][:count]:
                annotation["bbox"] = [*annotation["bbox"][:2], 0, 5]

        return change

    says(changed(coco_folder(tmp_path / "a"), flatten(4)), "note: train: boxes without width or height", ": 4 (")
    says(changed(coco_folder(tmp_path / "b"), flatten(5)), "error: train: boxes without width or height", ": 5 (")


def test_boxes_as_corners(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for annotation in content["annotations"]:
            x, y, w, h = annotation["bbox"]
            annotation["bbox"] = [x, y, x + w, y + h]

    says(changed(coco_folder(tmp_path, train=8), change), "error: train: boxes look like two corners")


def test_boxes_as_fractions(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for annotation in content["annotations"]:
            x, y, w, h = annotation["bbox"]
            annotation["bbox"] = [x / 128, y / 96, w / 128, h / 96]

    says(changed(coco_folder(tmp_path), change), "error: train: all boxes lie within 0 and 1")


def test_files_that_are_damaged_turned_or_grey(tmp_path: Path) -> None:
    root = coco_folder(tmp_path)
    (root / "train" / "0000.jpg").write_bytes(b"")
    exif = Image.Exif()
    exif[0x0112] = 6
    # 128x96 in the file, 96x128 when upright.
    Image.new("RGB", (128, 96)).save(root / "train" / "0001.jpg", exif=exif)
    Image.new("L", (128, 96)).save(root / "train" / "0002.jpg")
    says(root, "error: train: images that cannot be read: 1", "0000.jpg")
    says(root, "error: train: images that their EXIF tag turns", ": 1", "0001.jpg")
    says(root, "note: train: greyscale images", "0002.jpg")


def test_images_annotated_upright_are_fine(tmp_path: Path) -> None:
    root = coco_folder(tmp_path)
    upright = image_files.picture(96, 128)
    image_files.with_orientation(root / "train" / "0003.png", upright, 6)
    changed(root, lambda c: c["images"][3].update(file_name="0003.png"))
    assert not check_data(opened_coco(root)).errors


def test_images_in_both_splits(tmp_path: Path) -> None:
    root = coco_folder(tmp_path)

    def change(content: dict[str, Any]) -> None:
        content["images"][0]["file_name"] = "../train/0001.jpg"

    says(changed(root, change, "val"), "note: images that are in both train and test: 1 (0001.jpg)")
    assert any("the same file" in line for line in findings(root, test_split="train"))


def test_some_objects_without_or_all(tmp_path: Path) -> None:
    def drop(number: int) -> Callable[[dict[str, Any]], None]:
        def change(content: dict[str, Any]) -> None:
            for annotation in content["annotations"][:number]:
                annotation["segmentation"] = []

        return change

    says(changed(coco_folder(tmp_path / "a"), drop(1)), "error: train: objects without a mask, where others have")
    root = changed(coco_folder(tmp_path / "b"), drop(99))
    says(root, "note: train: no object has a mask")
    assert not coco_split(opened_coco(root)).has_masks
    assert not check(coco_split(opened_coco(root))).errors
