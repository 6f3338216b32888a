"""Images and label maps: which belong together, what the classes are called and which number is which class."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ibot_eval.data.class_lists import ADE20K, CITYSCAPES
from ibot_eval.data.splits import Data
from ibot_eval.errors import ConfigError, DataError

from . import images
from .dense_data import SHAPES, coco_folder, label_map_folder, label_map_split, opened_label_maps

SHARED = Path("/work/shared/data")


def pair(root: Path, image: str, label: str, values: Sequence[int] | np.ndarray = (0, 1)) -> None:
    """A picture of 2x4 pixels and a label map whose rows are ``values``."""
    images.save(root / image, images.picture(2, 4))
    rows = np.asarray(values, np.uint8)
    images.save(root / label, np.resize(rows, (2, 4)) if rows.ndim == 1 else rows)


def both(root: Path, image: str, label: str, values: Sequence[int] | np.ndarray = (0, 1)) -> Path:
    """:func:`pair` for training and validation, whose name stands for SPLIT in the paths."""
    for split in ("training", "validation"):
        pair(root, image.replace("SPLIT", split), label.replace("SPLIT", split), values)
    return root


def classes_of(data: Data, role: str = "train", i: int = 0) -> list[int]:
    return np.unique(label_map_split(data, role).read_labels(i)).tolist()


class TestFiles:
    def test_ade20ks_folders(self, tmp_path: Path) -> None:
        data = opened_label_maps(label_map_folder(tmp_path))
        assert data.class_names == ("background", *SHAPES)
        assert data.split_names == {"train": "training", "test": "validation"}
        train = label_map_split(data)
        assert list(train.image_ids) == [f"training/{i:04}.jpg" for i in range(4)]
        assert train.label_paths == [tmp_path / "annotations" / "training" / f"{i:04}.png" for i in range(4)]
        assert train.labels.tolist() == [-1] * 4
        stored = np.asarray(Image.open(train.label_paths[2]))
        np.testing.assert_array_equal(train.read_labels(2), stored)
        assert train.read_labels(2).dtype == np.uint8
        assert (train.ignore_index, train.reduce_zero_label, data.data_name, data.warnings) == (255, False, None, [])

    @pytest.mark.parametrize(
        ("image", "label"),
        [
            ("images/SPLIT/a.jpg", "labels/SPLIT/a.png"),
            ("img_dir/SPLIT/a.jpg", "ann_dir/SPLIT/a.png"),
            ("SPLIT/images/a.jpg", "SPLIT/masks/a.png"),
            ("images/SPLIT/city/a.b.png", "masks/SPLIT/city/a.b.tif"),
            ("images/SPLIT/a.jpg", "labels/SPLIT/a_mask.png"),
            ("images/SPLIT/a_1.png", "labels/SPLIT/a_1_L.png"),
        ],
    )
    def test_other_folders_and_names(self, tmp_path: Path, image: str, label: str) -> None:
        data = opened_label_maps(both(tmp_path, image, label, (0, 2)))
        assert label_map_split(data).label_paths == [tmp_path / label.replace("SPLIT", "training")]
        assert data.class_names == ("0", "1", "2")
        assert data.warnings == ["there is no class list, so classes are called by their numbers, 0 to 2"]

    def test_names_of_splits(self, tmp_path: Path) -> None:
        root = label_map_folder(tmp_path, names=("train", "val"))
        assert opened_label_maps(root).split_names == {"train": "train", "test": "val"}
        named = opened_label_maps(
            label_map_folder(tmp_path / "b", names=("left", "right")), train_split="left", test_split="right"
        )
        assert named.split_names == {"train": "left", "test": "right"}
        with pytest.raises(DataError, match=r"no split 'train'[\s\S]*'left', 'right'[\s\S]*--train-split"):
            opened_label_maps(tmp_path / "b")

    def test_a_split_whose_label_maps_are_missing(self, tmp_path: Path) -> None:
        root = label_map_folder(tmp_path)
        shutil.rmtree(root / "annotations" / "validation")
        with pytest.raises(DataError, match=r"images/validation has no label maps: .*/annotations/validation"):
            opened_label_maps(root)

    def test_a_folder_without_splits_is_asked_for(self, tmp_path: Path) -> None:
        pair(tmp_path, "images/a.jpg", "labels/a.png")
        with pytest.raises(DataError, match=r"give --train-split \."):
            opened_label_maps(tmp_path)
        data = opened_label_maps(tmp_path, train_split=".", test_split=".")
        assert list(data.splits["test"].image_ids) == ["a.jpg"]

    def test_images_and_label_maps_alone(self, tmp_path: Path) -> None:
        root = both(tmp_path, "images/SPLIT/a.jpg", "labels/SPLIT/a.png")
        images.save(root / "images" / "training" / "b.jpg")
        images.save(root / "labels" / "training" / "c.png")
        split = label_map_split(opened_label_maps(root))
        assert (len(split), split.unlabelled, split.orphans) == (1, ("b.jpg",), ("c.png",))

    def test_what_is_not_there_is_explained(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="not there"):
            opened_label_maps(tmp_path / "nowhere")
        with pytest.raises(DataError, match=r"no images with label maps[\s\S]*annotations/SPLIT"):
            opened_label_maps(tmp_path)
        both(tmp_path, "images/SPLIT/a.jpg", "labels/SPLIT/b.png")
        with pytest.raises(DataError, match=r"no image in .* has a label map[\s\S]*'a.jpg' there, 'b.png' here"):
            opened_label_maps(tmp_path)
        with pytest.raises(ConfigError, match="--test-per-class"):
            opened_label_maps(tmp_path, test_per_class=1)

    @pytest.mark.parametrize("kind", ["images", "annotations"])
    def test_an_empty_folder_is_named(self, tmp_path: Path, kind: str) -> None:
        root = label_map_folder(tmp_path, 2, 1)
        for file in (root / kind / "training").iterdir():
            file.unlink()
        with pytest.raises(DataError, match=f"there is no image in .*{kind}"):
            opened_label_maps(root)

    def test_the_fingerprint_covers_label_maps_and_what_they_mean(self, tmp_path: Path) -> None:
        def fingerprint(**own: Any) -> str:
            return opened_label_maps(root, fingerprint="content", **own).fingerprint

        root = label_map_folder(tmp_path / "here")
        first = fingerprint()
        moved = opened_label_maps(shutil.copytree(root, tmp_path / "moved"), fingerprint="content")
        assert moved.fingerprint == first != fingerprint(ignore=1)
        images.save(root / "annotations" / "validation" / "0001.png", np.zeros((96, 128), np.uint8))
        assert fingerprint() != first

    def test_a_part_of_a_split_and_a_pickled_one(self, tmp_path: Path) -> None:
        split = label_map_split(opened_label_maps(label_map_folder(tmp_path), ignore=3))
        part = pickle.loads(pickle.dumps(split.take([3, 1])))
        assert part.label_paths == [split.label_paths[3], split.label_paths[1]]
        assert part.paths == [split.paths[3], split.paths[1]]
        np.testing.assert_array_equal(part.read_labels(0), split.read_labels(3))


class TestClasses:
    def test_ade20k_is_known_by_its_file_names(self, tmp_path: Path) -> None:
        pair(tmp_path, "images/training/ADE_train_00000001.jpg", "annotations/training/ADE_train_00000001.png", (0, 1))
        pair(
            tmp_path, "images/validation/ADE_val_00000001.jpg", "annotations/validation/ADE_val_00000001.png", (150, 2)
        )
        data = opened_label_maps(tmp_path)
        assert data.class_names == ADE20K
        assert len(set(ADE20K)) == 150
        assert (ADE20K[0], ADE20K[12], ADE20K[149]) == ("wall", "person", "flag")
        assert label_map_split(data).reduce_zero_label
        assert classes_of(data) == [0, 255]
        assert classes_of(data, "test") == [1, 149]
        assert data.data_name is None
        assert not label_map_split(opened_label_maps(tmp_path, reduce_zero=False)).reduce_zero_label

    @pytest.mark.parametrize("kind", ["labelTrainIds", "labelIds"])
    def test_cityscapes(self, tmp_path: Path, kind: str) -> None:
        # Ids: 7 road, 11 building, 33 bicycle, 1 ego vehicle, 16 tunnel; train ids 0, 2, 18.
        values = (0, 2, 18, 255) if kind == "labelTrainIds" else (7, 11, 33, 1, 16)
        for split in ("train", "val"):
            stem = f"{split}/bochum/bochum_000000_000313"
            pair(tmp_path, f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_{kind}.png", values)
            images.save(tmp_path / "gtFine" / f"{stem}_gtFine_color.png")
        data = opened_label_maps(tmp_path)
        assert data.class_names == CITYSCAPES
        assert classes_of(data) == [0, 2, 18, 255]
        assert label_map_split(data).orphans == ()
        assert list(data.splits["test"].image_ids) == ["val/bochum/bochum_000000_000313_leftImg8bit.png"]

    def test_a_class_list_beside_the_data_or_given(self, tmp_path: Path) -> None:
        root = both(tmp_path, "images/SPLIT/a.jpg", "labels/SPLIT/a.png", (0, 1, 2))
        (root / "classes.txt").write_text("sky\n\nroad \r\ngrass, dry\n")
        assert opened_label_maps(root).class_names == ("sky", "road", "grass, dry")
        (tmp_path / "mine.txt").write_text("\ufeffa\nb\nc\n")
        assert opened_label_maps(root, classes=tmp_path / "mine.txt").class_names == ("a", "b", "c")

    def test_colours(self, tmp_path: Path) -> None:
        pixels = np.zeros((2, 4, 3), np.uint8)
        pixels[:, 1], pixels[:, 2], pixels[:, 3] = (128, 64, 128), (70, 70, 70), (1, 2, 3)
        root = both(tmp_path, "images/SPLIT/a.jpg", "labels/SPLIT/a.png", pixels)
        with pytest.raises(DataError, match=r"classes are unknown[\s\S]*name,R,G,B"):
            opened_label_maps(root)
        (root / "classes.txt").write_text("name,r,g,b\nroad,128,64,128\nhouse,70,70,70\n")
        data = opened_label_maps(root)
        assert data.class_names == ("road", "house")
        labels = label_map_split(data).read_labels(0)
        assert labels.tolist() == [[255, 0, 1, 255]] * 2
        # A palette goes by its colours, numbers by the order of the classes, and grey may be a colour like any other.
        palette = Image.fromarray(np.resize(np.array([5, 6, 7, 8], np.uint8), (2, 4)))
        palette.putpalette([0, 0, 0] * 5 + [70, 70, 70, 9, 9, 9, 128, 64, 128, 70, 70, 70])
        palette.save(root / "labels" / "training" / "a.png")
        assert label_map_split(data).read_labels(0).tolist() == [[1, 255, 0, 1]] * 2
        images.save(root / "labels" / "training" / "a.png", np.resize(np.array([0, 1, 2, 70], np.uint8), (2, 4)))
        assert label_map_split(data).read_labels(0).tolist() == [[0, 1, 255, 255]] * 2
        images.save(root / "labels" / "training" / "a.png", np.full((2, 4, 3), 70, np.uint8))
        assert label_map_split(data).read_labels(0).tolist() == [[1, 1, 1, 1]] * 2

    @pytest.mark.parametrize("channels", [1, 3])
    def test_black_and_white(self, tmp_path: Path, channels: int) -> None:
        values = np.resize(np.array([0, 255, 128, 0], np.uint8), (2, 4))
        stored = values if channels == 1 else np.repeat(values[..., None], 3, axis=2)
        root = both(tmp_path, "images/SPLIT/a.jpg", "masks/SPLIT/a.png", stored)
        (root / "classes.txt").write_text("ground,0,0,0\nobject,255,255,255\n")
        split = label_map_split(opened_label_maps(root))
        assert split.read_labels(0).tolist() == [[0, 1, 255, 0]] * 2
        assert not split.reduce_zero_label

    def test_annotations_of_another_kind(self, tmp_path: Path) -> None:
        root = coco_folder(tmp_path, names=("images", "val"))
        with pytest.raises(DataError, match="no images with label maps"):
            opened_label_maps(root)

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("", "is empty"),
            ("a\na\n", "names 'a' twice"),
            ("a,1,2,3\nb\n", "colours to 1 of 2"),
            ("a,1,2,3\nb,1,2,3\n", "one colour to two"),
            ("\n".join(f"c{i}" for i in range(256)), "256 classes"),
        ],
    )
    def test_class_lists_that_cannot_be_used(self, tmp_path: Path, text: str, part: str) -> None:
        root = both(tmp_path, "images/SPLIT/a.jpg", "labels/SPLIT/a.png")
        (root / "classes.txt").write_text(text)
        with pytest.raises(ConfigError, match=part):
            opened_label_maps(root)
        with pytest.raises(ConfigError, match="cannot read"):
            opened_label_maps(root, classes=root / "none.txt")


class TestNumbers:
    @pytest.mark.parametrize(
        ("values", "names", "settings", "expected", "reduced"),
        [
            # mmsegmentation's reduce_zero_label: 0 becomes 255, all others one less, 255 stays.
            ((0, 1, 2, 255), "ab", {"reduce_zero": True}, [255, 0, 1, 255], True),
            ((0, 1, 2, 255), "abc", {}, [0, 1, 2, 255], False),
            # Labels from 1 to the number of names.
            ((1, 2, 1, 255), "ab", {}, [0, 1, 0, 255], True),
            ((1, 2, 1, 255), "ab", {"reduce_zero": False}, [1, 255, 1, 255], False),
            # Of 2 classes, 2 may be void, or 0 "other": nothing is guessed.
            ((0, 1, 2, 1), "ab", {}, [0, 1, 255, 1], False),
            ((0, 1, 2, 1), "ab", {"ignore": 2}, [0, 1, 255, 1], False),
            ((0, 1, 2, 9), "ab", {"reduce_zero": True, "ignore": 9}, [255, 0, 1, 255], True),
            ((0, 1, 2, 3), "", {"ignore": 3}, [0, 1, 2, 255], False),
            ((0, 1, 2, 255), "", {"reduce_zero": True}, [255, 0, 1, 255], True),
        ],
    )
    def test_what_they_become(
        self,
        tmp_path: Path,
        values: Sequence[int],
        names: str,
        settings: dict[str, Any],
        expected: list[int],
        reduced: bool,
    ) -> None:
        root = both(tmp_path, "images/SPLIT/a.jpg", "labels/SPLIT/a.png", values)
        if names:
            (root / "classes.txt").write_text("\n".join(names))
        data = opened_label_maps(root, **settings)
        split = label_map_split(data)
        assert split.read_labels(0)[0].tolist() == expected
        assert split.reduce_zero_label is reduced
        if not names:
            assert data.class_names == (("1", "2") if reduced else ("0", "1", "2"))

    def test_how_label_maps_may_be_stored(self, tmp_path: Path) -> None:
        root = both(tmp_path, "images/SPLIT/a.jpg", "labels/SPLIT/a.png", (0, 1, 2, 3))
        (root / "classes.txt").write_text("a\nb\nc\nd\n")
        file = root / "labels" / "training" / "a.png"
        split = label_map_split(opened_label_maps(root))
        values = np.resize(np.array([0, 1, 2, 3], np.uint8), (2, 4))

        palette = Image.fromarray(values)
        palette.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200, 9, 9, 9])
        palette.save(file)
        assert Image.open(file).mode == "P"
        np.testing.assert_array_equal(split.read_labels(0), values)

        Image.fromarray(values.astype(np.uint16)).save(file)
        np.testing.assert_array_equal(split.read_labels(0), values)
        Image.fromarray(np.where(values == 3, 1000, values).astype(np.uint16)).save(file)
        np.testing.assert_array_equal(split.read_labels(0), np.where(values == 3, 255, values))

        odd = values.astype(np.float32)
        odd[0, :2] = np.nan, 1.5
        Image.fromarray(odd).save(file, format="TIFF")
        assert split.read_labels(0)[0].tolist() == [255, 255, 2, 3]

        Image.fromarray(np.repeat(values[..., None], 3, axis=2)).save(file)
        np.testing.assert_array_equal(split.read_labels(0), values)

        Image.fromarray(values > 1).save(file)
        assert Image.open(file).mode == "1"
        np.testing.assert_array_equal(split.read_labels(0), values > 1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
def test_real_images() -> None:
    data = opened_label_maps(SHARED / "camvid_tiny", ignore=11)
    assert {role: len(split) for role, split in data.splits.items()} == {"train": 60, "test": 20}
    assert data.class_names == tuple(str(i) for i in range(11))
    sample = opened_label_maps(SHARED / "ade20k_sample", ("test",), test_split=".")
    assert sample.class_names == ADE20K
    raw = np.asarray(Image.open(label_map_split(sample, "test").label_paths[0]))
    np.testing.assert_array_equal(label_map_split(sample, "test").read_labels(0), raw - np.uint8(1))
