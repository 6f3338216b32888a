"""Folders of images: classes, order, odd contents, fingerprints, and the errors of wrong layouts."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.image_folder import is_imagenet_1k
from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import Data, first_per_class, natural_sort
from ibot_eval.errors import BadImage, ConfigError, DataError
from ibot_eval.settings import DataSettings

from . import images
from .conftest import SHARED, needs_shared


def opened(root: Path, roles: tuple[str, ...] = ("train", "test"), labelled: bool = True, **settings: Any) -> Data:
    return open_data(DataSettings(data=str(root), **settings), roles, labelled)


def error(kind: type[Exception], root: Path, *parts: str, **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        opened(root, **settings)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return images.tree(tmp_path / "set", {"train/b": 2, "train/a": 3, "val/a": 1, "val/b": 2})


def test_two_splits(plain: Path) -> None:
    data = opened(plain)
    assert data.class_names == ("a", "b")
    assert data.class_to_idx == {"a": 0, "b": 1}
    assert data.split_names == {"train": "train", "test": "val"}
    train, test = data.splits["train"], data.splits["test"]
    assert list(train.image_ids) == [f"train/{x}.png" for x in ("a/0", "a/1", "a/2", "b/0", "b/1")]
    assert train.labels.tolist() == [0, 0, 0, 1, 1]
    assert train.labels.dtype == np.int64
    assert list(test.image_ids) == ["val/a/0.png", "val/b/0.png", "val/b/1.png"]
    assert (len(train), len(test), test.name) == (5, 3, "val")
    assert data.warnings == []
    assert data.data_name is None
    assert data.reference == str(plain)
    np.testing.assert_array_equal(np.asarray(train.load(4)), images.picture(seed=1))


def test_equals_image_folder_where_text_order_is_natural(plain: Path) -> None:
    images.tree(plain, {"train/a/deep/er": 2, "train/a/Deep": ["x.JPG", "y.Jpeg"]})
    reference = ImageFolder(str(plain / "train"))
    split = opened(plain).splits["train"]
    expected = {(Path(p).relative_to(plain).as_posix(), label) for p, label in reference.samples}
    assert set(zip(split.image_ids, split.labels.tolist(), strict=True)) == expected
    assert list(split.image_ids) == sorted(split.image_ids)


def test_classes_sort_naturally(tmp_path: Path) -> None:
    images.tree(tmp_path, {f"{s}/{c}": 1 for s in ("train", "val") for c in ("10", "2", "1", "a10", "a9")})
    assert opened(tmp_path).class_names == ("1", "2", "10", "a9", "a10")
    assert natural_sort(["02", "2", "b", "1a", "a1", "a", "10"]) == ("1a", "02", "2", "10", "a", "a1", "b")


@pytest.mark.parametrize(("present", "expected"), [(("test", "validation"), "validation"), (("test",), "test")])
def test_default_test_split(tmp_path: Path, present: tuple[str, ...], expected: str) -> None:
    images.tree(tmp_path, {f"{s}/a": 1 for s in ("train", *present)} | {"train/b": 1})
    assert opened(tmp_path).split_names["test"] == expected


def test_split_names(plain: Path) -> None:
    images.tree(plain, {"extra/queries/a": 1, "extra/queries/b": 1})
    data = opened(plain, train_split="val", test_split="extra/queries")
    assert data.split_names == {"train": "val", "test": "extra/queries"}
    assert data.splits["test"].image_ids[0] == "extra/queries/a/0.png"


def test_union_of_classes_and_what_is_missing(tmp_path: Path) -> None:
    images.tree(tmp_path, {"train/a": 2, "train/c": 1, "train/empty": 0, "val/a": 1, "val/b": 2, "val/c": 0})
    data = opened(tmp_path)
    assert data.class_names == ("a", "b", "c", "empty")
    assert data.splits["test"].labels.tolist() == [0, 1, 1]
    assert any("images in 'train' only, none in 'val': 'c'" in w for w in data.warnings)
    assert any("images in 'val' only, none in 'train': 'b'" in w for w in data.warnings)
    assert any("1 of 4 classes have no images: 'empty'" in w for w in data.warnings)
    one = opened(tmp_path, roles=("test",))
    assert one.splits["test"].labels.tolist() == [0, 1, 1]  # the numbering does not depend on the roles asked for


def test_other_files_are_reported(plain: Path) -> None:
    (plain / "train/a/notes.txt").write_text("x")
    (plain / "train/readme").write_text("x")
    (plain / "train/a/.DS_Store").write_text("x")
    images.tree(plain, {"train/.git": 1, "train": ["loose.png"]})
    data = opened(plain)
    assert data.class_names == ("a", "b")
    assert len(data.splits["train"]) == 5
    text = "\n".join(data.warnings)
    assert "train: 2 entries left out (not images by their extension): 'a/notes.txt', 'readme'" in text
    assert "train: 2 entries left out (hidden): '.git', 'a/.DS_Store'" in text
    assert "train: 1 images outside of class folders left out: 'loose.png'" in text


def test_names_with_spaces_and_other_scripts(tmp_path: Path) -> None:
    folders = ["polar bear", "Äpfel, süß", "猫", "a'b\"c"]
    images.tree(tmp_path, {f"{s}/{c}": ["ein bild.png", "图 1.PNG"] for s in ("train", "val") for c in folders})
    data = opened(tmp_path)
    assert set(data.class_names) == set(folders)
    assert len(data.splits["train"]) == 8
    for i in range(8):
        assert data.splits["train"].load(i).mode == "RGB"
    assert len(data.splits["train"].fingerprint) == 64


def test_a_name_that_is_not_utf8_is_refused(plain: Path) -> None:
    raw = os.fsencode(plain / "train/a") + b"/\xff.png"
    try:
        os.link(os.fsencode(plain / "train/a/0.png"), raw)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    error(DataError, plain, "not valid UTF-8", r"\xff.png", "rename")


def test_links_are_followed_and_loops_cut(plain: Path) -> None:
    (plain / "train/c").symlink_to(plain / "val/b", target_is_directory=True)
    (plain / "val/c").symlink_to(plain / "val/b", target_is_directory=True)
    (plain / "train/a/link.png").symlink_to(plain / "val/a/0.png")
    (plain / "train/a/again").symlink_to(plain / "train", target_is_directory=True)
    (plain / "train/a/lost.png").symlink_to(plain / "nowhere.png")
    data = opened(plain)
    train = data.splits["train"]
    assert train.labels.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2]
    assert any("links to a folder that holds them): 'a/again'" in w for w in data.warnings)
    assert len(train.fingerprint) == 64
    with pytest.raises(BadImage, match=r"lost\.png: the file does not exist"):
        train.load(list(train.image_ids).index("train/a/lost.png"))


def test_bad_image_names_the_whole_path(plain: Path) -> None:
    (plain / "train/a/0.png").write_bytes(b"")
    with pytest.raises(BadImage, match=str(plain / "train/a/0.png")):
        opened(plain).splits["train"].load(0)


def test_no_permission_to_list(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    error(DataError, plain, "cannot list", "Permission denied", "chmod")


def test_per_class_takes_the_first_by_name(tmp_path: Path) -> None:
    images.tree(tmp_path, {"train/a": ["10.png", "9.png", "1.png"], "train/b": 1, "val/a": 2, "val/b": 2})
    data = opened(tmp_path, train_per_class=2, test_per_class=1)
    assert list(data.splits["train"].image_ids) == ["train/a/1.png", "train/a/10.png", "train/b/0.png"]
    assert list(data.splits["test"].image_ids) == ["val/a/0.png", "val/b/0.png"]
    assert data.warnings == ["--train-per-class 2: 1 of 2 classes have fewer images: 'b (1)'"]
    assert data.splits["train"].fingerprint != opened(tmp_path).splits["train"].fingerprint
    error(ConfigError, tmp_path, "--test-per-class 0", test_per_class=0)


def test_first_per_class_keeps_the_order() -> None:
    assert first_per_class(np.array([2, 0, 2, 2, 1, 0, 0]), 2).tolist() == [0, 1, 2, 4, 5]


def test_one_class_and_the_same_split_twice(tmp_path: Path) -> None:
    images.tree(tmp_path, {"train/a": 3})
    data = opened(tmp_path, test_split="train")
    assert data.splits["test"].fingerprint == data.splits["train"].fingerprint
    assert any("one class" in w for w in data.warnings)
    assert any("same split" in w for w in data.warnings)


class TestFingerprint:
    def test_moves_with_the_folder(self, plain: Path, tmp_path: Path) -> None:
        before = opened(plain).fingerprint
        moved = plain.rename(tmp_path / "elsewhere")
        assert opened(moved).fingerprint == before
        assert opened(Path(f"{moved}/")).fingerprint == before

    def test_changes_with_name_time_size_and_label(self, plain: Path) -> None:
        seen = {opened(plain).fingerprint}
        file = plain / "train/a/0.png"
        stat = file.stat()
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        seen.add(opened(plain).fingerprint)
        file.write_bytes(file.read_bytes() + b"\0")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        seen.add(opened(plain).fingerprint)
        file.rename(plain / "train/a/00.png")
        seen.add(opened(plain).fingerprint)
        images.tree(plain, {"val/aa": 0})  # b becomes class 2
        seen.add(opened(plain).fingerprint)
        assert len(seen) == 5

    def test_content_ignores_time_and_sees_bytes(self, plain: Path) -> None:
        before = opened(plain, fingerprint="content").fingerprint
        assert before != opened(plain).fingerprint
        file = plain / "train/a/0.png"
        stat = file.stat()
        os.utime(file, ns=(1, 1))
        assert opened(plain, fingerprint="content").fingerprint == before
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert opened(plain, fingerprint="content").fingerprint != before

    def test_per_split(self, plain: Path) -> None:
        before = opened(plain).splits
        images.save(plain / "val/a/9.png")
        after = opened(plain).splits
        assert after["train"].fingerprint == before["train"].fingerprint
        assert after["test"].fingerprint != before["test"].fingerprint


def test_splits_pickle(plain: Path) -> None:
    split = opened(plain).splits["train"]
    again = pickle.loads(pickle.dumps(split))
    assert isinstance(again, FolderSplit)
    assert again.image_ids == split.image_ids
    assert again.fingerprint == split.fingerprint
    np.testing.assert_array_equal(np.asarray(again.load(1)), np.asarray(split.load(1)))


class TestFlat:
    def test_unlabelled(self, tmp_path: Path) -> None:
        images.tree(tmp_path, {"train/a": 2, "train/b": 1, "val": 4})
        data = opened(tmp_path, labelled=False)
        assert data.class_names == ("a", "b")  # not the number of images
        assert data.splits["test"].labels.tolist() == [-1] * 4
        assert list(data.splits["test"].image_ids) == [f"val/{i}.png" for i in range(4)]
        error(DataError, tmp_path, "4 of 4 images of the split 'val' have no label", "--test-labels")
        error(ConfigError, tmp_path, "no labels to count by", labelled=False, test_per_class=1)

    def test_both_flat(self, tmp_path: Path) -> None:
        images.tree(tmp_path, {"train": 2, "val": 1, "val/stray": 0})
        data = opened(tmp_path, labelled=False)
        assert data.class_names == ()
        assert len(data.splits["train"]) == 2
        assert len(data.fingerprint) == 64

    def test_images_directly_in_the_folder(self, tmp_path: Path) -> None:
        images.tree(tmp_path, {"": 3})
        error(DataError, tmp_path, "no folder 'train'", "no sub-folders", "--train-split .", labelled=False)
        data = opened(tmp_path, ("train",), False, train_split=".")
        assert list(data.splits["train"].image_ids) == ["0.png", "1.png", "2.png"]
        assert data.splits["train"].load(2).size == (9, 6)


class TestLayoutErrors:
    def test_no_such_folder(self, plain: Path) -> None:
        error(DataError, plain.parent / "sett", "no such folder", "did you mean 'set'")
        error(DataError, plain / "no/where", "no such folder", "does not exist either")

    def test_a_file(self, plain: Path) -> None:
        error(DataError, plain / "train/a/0.png", "is a file, not a folder")

    def test_no_data(self) -> None:
        with pytest.raises(ConfigError, match="--data FOLDER"):
            open_data(DataSettings())

    def test_misspelt_split(self, plain: Path) -> None:
        error(DataError, plain, "no folder 'vall'", "'train', 'val'", "did you mean 'val'", test_split="vall")

    def test_class_folders_without_splits(self, plain: Path) -> None:
        error(DataError, plain / "train", "no folder 'train'", "hold images directly: 'a', 'b'", "--leave-one-out")
        data = opened(plain / "train", roles=("train",), train_split=".")
        assert data.class_names == ("a", "b")
        assert data.splits["train"].image_ids[0] == "a/0.png"

    def test_empty_folder(self, tmp_path: Path) -> None:
        error(DataError, tmp_path, "no sub-folders")
        images.tree(tmp_path, {"train/a": 0, "val/a": 1})
        error(DataError, tmp_path, "no images in the split 'train'")

    def test_folder_of_other_files(self, plain: Path) -> None:
        shutil.rmtree(plain / "train")
        (plain / "train/a").mkdir(parents=True)
        (plain / "train/a/x.npy").write_bytes(b"x")
        error(DataError, plain, "no images in the split 'train'", "not images by their extension", "a/x.npy")

    def test_streams(self) -> None:
        with pytest.raises(ConfigError, match="no fixed order"):
            open_data(DataSettings(data="tfds/mnist"))


def test_imagenet_is_recognised_by_classes_and_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"n{i:08d}" for i in range(1000)]
    assert is_imagenet_1k(names, 50_000)
    assert not is_imagenet_1k(names, 49_999)
    assert not is_imagenet_1k(names[:999], 50_000)
    assert not is_imagenet_1k([*names[:999], "cat"], 50_000)
    images.tree(tmp_path, {"train/n00000001": 2, "val/n00000001": 2})
    monkeypatch.setattr("ibot_eval.data.opening.is_imagenet_1k", lambda *_: True)
    assert opened(tmp_path).data_name == "ImageNet-1K"
    assert opened(tmp_path, train_per_class=2).data_name is None
    assert opened(tmp_path, ("train",)).data_name is None


class TestDemo:
    def test_digits(self) -> None:
        from sklearn.datasets import load_digits

        data = open_data(DataSettings(data="demo"))
        train, test = data.splits["train"], data.splits["test"]
        assert len(train) + len(test) == 1797
        assert data.class_names == tuple("0123456789")
        for label, count in enumerate(np.bincount(load_digits().target)):  # type: ignore[union-attr]
            assert (test.labels == label).sum() == count // 4
        kind, label, place = train.image_ids[500].split("/")
        assert (kind, int(label)) == ("train", train.labels[500])
        original = load_digits().images[int(place)]  # type: ignore[union-attr]
        got = np.asarray(train.load(500))
        assert got.shape == (8, 8, 3)
        np.testing.assert_allclose(got[..., 0], original / 16 * 255, atol=0.5)
        assert not {i.rpartition("/")[2] for i in train.image_ids} & {i.rpartition("/")[2] for i in test.image_ids}

    def test_same_every_time(self) -> None:
        one, two = open_data(DataSettings(data="demo")), open_data(DataSettings(data="demo"))
        assert one.fingerprint == two.fingerprint
        small = open_data(DataSettings(data="demo", train_per_class=5))
        assert len(small.splits["train"]) == 50
        assert small.splits["train"].source == one.splits["train"].source == "demo/train"
        assert small.splits["train"].fingerprint != one.splits["train"].fingerprint
        assert pickle.loads(pickle.dumps(small.splits["train"])).fingerprint == small.splits["train"].fingerprint


@needs_shared
def test_imagenette() -> None:
    data = opened(SHARED / "data/imagenette128", train_per_class=150, test_per_class=80)
    assert (len(data.splits["train"]), len(data.splits["test"])) == (1500, 800)
    assert len(data.class_names) == 10
    assert data.warnings == []
    assert data.splits["test"].load(799).size == (128, 128)
