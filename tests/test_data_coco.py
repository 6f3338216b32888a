"""Data in COCO's format: which files are found, what the class order is, and what pycocotools is given."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ibot_eval.data.coco import area_of, standardised
from ibot_eval.data.coco_check import check, check_data
from ibot_eval.errors import ConfigError, DataError

from .dense_data import SHAPES, changed, coco_folder, coco_split, opened_coco

TINY = Path("/work/shared/data/coco_tiny")


class TestOpening:
    def test_images_keep_the_order_of_the_file_and_classes_that_of_the_categories(self, tmp_path: Path) -> None:
        data = opened_coco(coco_folder(tmp_path, train=4, test=2))
        assert data.class_names == SHAPES
        train = coco_split(data)
        assert train.categories == {1: "square", 3: "disc", 7: "bar"}
        assert train.coco_ids.tolist() == [5, 15, 25, 35]
        assert list(train.image_ids) == [f"train/{i:04}.jpg" for i in range(4)]
        assert train.labels.tolist() == [-1] * 4
        assert train.has_masks
        assert data.split_names == {"train": "train", "test": "val"}
        assert data.data_name is None
        assert coco_split(data, "test").load(1).size == (128, 96)

    @pytest.mark.parametrize(
        ("names", "settings"),
        [
            (("train2017", "val2017"), {}),
            (("train2017", "val2017"), {"test_split": "val"}),
            (("train", "valid"), {}),
            (("training_a", "holdout"), {"train_split": "training_a", "test_split": "holdout"}),
        ],
    )
    def test_names_of_splits(self, tmp_path: Path, names: tuple[str, str], settings: dict[str, str]) -> None:
        data = opened_coco(coco_folder(tmp_path, names=names), **settings)
        assert tuple(data.split_names.values()) == names

    def test_other_lists_beside_the_instances_are_left_alone(self, tmp_path: Path) -> None:
        root = coco_folder(tmp_path, names=("train2017", "val2017"))
        (root / "annotations" / "captions_train2017.json").write_text("{}")
        (root / "annotations" / "image_info_test2017.json").write_text("{}")
        assert opened_coco(root).split_names == {"train": "train2017", "test": "val2017"}

    def test_a_json_file_beside_the_images(self, tmp_path: Path) -> None:
        root = coco_folder(tmp_path, names=("train", "valid"))
        for name in ("train", "valid"):
            shutil.move(root / "annotations" / f"instances_{name}.json", root / name / "_annotations.coco.json")
        (root / "annotations").rmdir()
        data = opened_coco(root)
        assert coco_split(data, "test").image_root == root / "valid"
        usual = opened_coco(coco_folder(tmp_path / "usual", names=("train", "valid")))
        assert check_data(data).text() == check_data(usual).text()

    @pytest.mark.parametrize("images", ["images", "images/train", "train"])
    def test_a_json_file_per_split_and_images_elsewhere(self, tmp_path: Path, images: str) -> None:
        root = coco_folder(tmp_path / "from")
        to = tmp_path / "to"
        to.mkdir()
        shutil.move(root / "annotations" / "instances_train.json", to / "train.json")
        (to / images).parent.mkdir(exist_ok=True)
        shutil.move(root / "train", to / images)
        split = coco_split(opened_coco(to, ("train",)))
        assert split.image_root == to / images
        assert not check(split).errors

    def test_file_names_may_hold_the_folder(self, tmp_path: Path) -> None:
        def change(content: dict[str, Any]) -> None:
            for image in content["images"]:
                image["file_name"] = f"train/{image['file_name']}"

        data = opened_coco(changed(coco_folder(tmp_path), change))
        assert coco_split(data).image_root == tmp_path
        assert not check_data(data).errors

    def test_what_is_not_there_is_explained(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="not there"):
            opened_coco(tmp_path / "nowhere")
        with pytest.raises(DataError, match=r"no annotations in COCO's format[\s\S]*instances_SPLIT"):
            opened_coco(tmp_path)
        root = coco_folder(tmp_path / "c")
        with pytest.raises(DataError, match=r"'holdout'[\s\S]*'train', 'val'[\s\S]*--test-split"):
            opened_coco(root, test_split="holdout")
        shutil.rmtree(root / "val")
        shutil.rmtree(root / "train")
        (root / "elsewhere").mkdir()
        with pytest.raises(DataError, match=r"images of .* are not there"):
            opened_coco(root)

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ('{"images": [', "not readable JSON"),
            ("[]", "holds a list"),
            ("3", "not in COCO's format"),
            ('{"images": []}', "is empty"),
            ('{"annotations": []}', "no list 'images'"),
            ('{"images": [{"id": 1, "file_name": "a.jpg"}]}', "no list 'categories'"),
            ('{"images": [{"id": "1", "file_name": "a.jpg"}], "categories": []}', "integer 'id'"),
            (f'{{"images": [{{"id": {2**63}, "file_name": "a.jpg"}}], "categories": []}}', "integer 'id'"),
            ('{"images": [{"id": 1}], "categories": []}', "'file_name'"),
            ('{"images": [{"id": 1, "file_name": "a\\u0000.jpg"}], "categories": []}', "one line of text"),
            ('{"images": [{"id": 1, "file_name": "a\\ud800.jpg"}], "categories": []}', "one line of text"),
            (
                '{"images": [{"id": 1, "file_name": "a"}], "categories": [{"id": 1, "name": "a\\nb"}]}',
                "one line of text",
            ),
            ('{"images": [{"id": 1, "file_name": "a"}], "categories": [{"id": 1, "name": " "}]}', "one line of text"),
            (
                '{"images": [{"id": 1, "file_name": "a"}], "categories": [{"id": 1, "name": "a"}], "annotations": [3]}',
                "not a list of objects",
            ),
        ],
    )
    def test_files_of_another_form_are_refused(self, tmp_path: Path, text: str, part: str) -> None:
        root = coco_folder(tmp_path)
        (root / "annotations" / "instances_train.json").write_text(text)
        with pytest.raises(DataError, match=part):
            opened_coco(root)

    def test_settings_for_images_with_one_class_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--train-per-class"):
            opened_coco(coco_folder(tmp_path), train_per_class=3)

    def test_the_fingerprint_covers_images_and_annotations(self, tmp_path: Path) -> None:
        def fingerprint(**settings: Any) -> str:
            return opened_coco(root, **settings).fingerprint

        root = coco_folder(tmp_path / "here")
        first, content = fingerprint(), fingerprint(fingerprint="content")
        assert first == fingerprint() != content
        moved = shutil.copytree(root, tmp_path / "moved")
        assert opened_coco(moved, fingerprint="content").fingerprint == content
        changed(root, lambda c: c["annotations"].pop())
        assert fingerprint() != first
        second = fingerprint(fingerprint="content")
        assert second != content
        Image.new("RGB", (128, 96)).save(root / "val" / "0000.jpg")
        assert fingerprint(fingerprint="content") != second

    def test_a_part_of_a_split_and_a_pickled_one(self, tmp_path: Path) -> None:
        split = coco_split(opened_coco(coco_folder(tmp_path)))
        part = pickle.loads(pickle.dumps(split.take([2, 0])))
        assert part.coco_ids.tolist() == [25, 5]
        assert part.paths == [split.paths[2], split.paths[0]]
        assert part.categories == split.categories
        assert check(part) == check(split)
        assert part.fingerprint == split.take([2, 0]).fingerprint != split.fingerprint


class TestStandardised:
    def test_a_file_in_order_stays_as_it_is(self, tmp_path: Path) -> None:
        split = coco_split(opened_coco(coco_folder(tmp_path)))
        assert standardised(split) == json.loads(split.annotation_file.read_text())

    def test_classes_go_by_train_and_gaps_are_filled(self, tmp_path: Path) -> None:
        def change(content: dict[str, Any]) -> None:
            content["categories"] = [{"id": 2, "name": "bar"}, {"id": 0, "name": "square"}, {"id": 9, "name": "disc"}]
            other = {1: 0, 3: 9, 7: 2}
            for number, annotation in enumerate(content["annotations"]):
                annotation["category_id"] = other[annotation["category_id"]]
                annotation["id"] = number
                del annotation["iscrowd"], annotation["area"]

        root = coco_folder(tmp_path)
        before = standardised(coco_split(opened_coco(root), "test"))
        split = coco_split(opened_coco(changed(root, change, "val")), "test")
        after = standardised(split)
        assert [c["name"] for c in after["categories"]] == list(SHAPES)
        assert [c["id"] for c in after["categories"]] == [0, 9, 2] == list(split.categories)
        assert [a["id"] for a in after["annotations"]] == list(range(1, len(after["annotations"]) + 1))
        assert all(a["iscrowd"] == 0 for a in after["annotations"])
        for old, new in zip(before["annotations"], after["annotations"], strict=True):
            assert new["area"] == pytest.approx(old["area"], rel=0.2)
            if isinstance(old["segmentation"], dict):
                assert new["area"] == old["area"]
        report = check_data(opened_coco(root))
        assert not report.errors
        assert [note.partition(": 4 (")[0] for note in report.notes] == [
            "val: objects without iscrowd, taken for no crowds",
            "val: objects without an area; it is computed",
            "val: classes without objects: 1 (bar)",
            "classes are numbered as in train; val has another order",
        ]

    def test_only_the_images_of_the_split(self, tmp_path: Path) -> None:
        content = standardised(coco_split(opened_coco(coco_folder(tmp_path))).take([1]))
        assert [image["id"] for image in content["images"]] == [15]
        assert {a["image_id"] for a in content["annotations"]} == {15}

    @pytest.mark.parametrize(
        ("annotation", "area"),
        [
            ({"area": 7.5, "bbox": [0, 0, 2, 3]}, 7.5),
            ({"area": 0, "bbox": [0, 0, 2, 3]}, 6),
            ({"area": None, "bbox": [0, 0, 2, 3], "segmentation": []}, 6),
            # A triangle of legs 4 and 3, and a unit square walked the other way round.
            ({"bbox": [0, 0, 9, 9], "segmentation": [[0, 0, 4, 0, 0, 3], [5, 5, 5, 6, 6, 6, 6, 5]]}, 7),
            ({"bbox": [0, 0, 9, 9], "segmentation": {"size": [3, 3], "counts": [2, 3, 1, 2, 1]}}, 5),
            ({}, 0),
        ],
    )
    def test_areas(self, annotation: dict[str, Any], area: float) -> None:
        assert area_of(annotation) == area


@pytest.mark.skipif(not TINY.is_dir(), reason="the shared data are not here")
def test_real_images() -> None:
    data = opened_coco(TINY)
    assert data.split_names == {"train": "train2017", "test": "val2017"}
    assert len(data.class_names) == 80
    assert data.data_name is None
    report = check_data(data)
    assert report.heads == [
        "train2017: 80 images, 705 objects, 80 classes (6 crowds)",
        "val2017: 80 images, 815 objects, 80 classes (11 crowds)",
    ]
    assert not report.errors
    assert not report.notes
    content = standardised(coco_split(data))
    original = json.loads(coco_split(data).annotation_file.read_text())
    renumbered = copy.deepcopy(original)
    for number, annotation in enumerate(renumbered["annotations"], start=1):
        annotation["id"] = number
    assert content == renumbered
