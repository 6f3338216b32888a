"""WebDataset shards, written with the standard library's tarfile."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import Data
from ibot_eval.errors import BadImage, DataError
from ibot_eval.settings import DataSettings

from . import images


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(images.picture(seed=seed)).save(buffer, "PNG")
    return buffer.getvalue()


def shard(path: Path, members: dict[str, bytes], mode: Any = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(seed: int, label: int | None, key: str | None = None) -> dict[str, bytes]:
    key = key or f"{seed:04d}"
    return {f"{key}.png": png(seed)} | ({} if label is None else {f"{key}.cls": str(label).encode()})


def opened(folder: Path, labelled: bool = True, **settings: Any) -> Data:
    return open_data(DataSettings(data=f"wds/{folder}", **settings), labelled=labelled)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    shard(root / "train-10.tar", sample(4, 0))
    shard(root / "train-9.tar", sample(0, 1) | sample(1, 0))
    label_last = {"a/3.jpg": png(3), "a/3.json": json.dumps({"label": 2, "caption": "x"}).encode(), "a/3.txt": b"x"}
    shard(root / "val-0.tar", {"2.cls": b"1\n", "2.seg.png": png(9), "2.PNG": png(2)} | label_last)
    return root


def test_index_and_pixels(folder: Path) -> None:
    data = opened(folder)
    train, test = data.splits["train"], data.splits["test"]
    assert list(train.image_ids) == ["train-9/0000", "train-9/0001", "train-10/0004"]
    assert train.labels.tolist() == [1, 0, 0]
    assert list(test.image_ids) == ["val-0/2", "val-0/a/3"]
    assert test.labels.tolist() == [1, 2]
    assert data.class_names == ("0", "1", "2")
    assert data.split_names == {"train": "train", "test": "val"}
    for split, seeds in ((train, [0, 1, 4]), (test, [2, 3])):
        for i, seed in reversed(list(enumerate(seeds))):
            np.testing.assert_array_equal(np.asarray(split.load(i)), images.picture(seed=seed))
    assert any("'val' only, none in 'train': '2'" in w for w in data.warnings)


def test_folders_of_shards_under_a_data_root(tmp_path: Path) -> None:
    shard(tmp_path / "root/birds/train/0.tar", sample(0, 0))
    shard(tmp_path / "root/birds/validation/0.tar", sample(1, 1))
    (tmp_path / "root/birds/classes.txt").write_text("crow\nwren\n")
    data = open_data(DataSettings(data="wds/birds", data_root=tmp_path / "root"))
    assert data.class_names == ("crow", "wren")
    assert data.split_names["test"] == "validation"
    assert list(data.splits["train"].image_ids) == ["train/0/0000"]


def test_pickle_per_class_and_fingerprint(folder: Path, tmp_path: Path) -> None:
    split = opened(folder, train_per_class=1).splits["train"]
    assert split.labels.tolist() == [1, 0]
    again = pickle.loads(pickle.dumps(split))
    np.testing.assert_array_equal(np.asarray(again.load(1)), images.picture(seed=1))
    assert again.fingerprint == split.fingerprint
    whole = opened(folder).splits["train"].fingerprint
    assert whole != split.fingerprint
    content = opened(folder, fingerprint="content").splits["train"].fingerprint
    shard(folder / "train-10.tar", sample(5, 0, "0004"))
    assert opened(folder).splits["train"].fingerprint != whole
    assert opened(folder, fingerprint="content").splits["train"].fingerprint != content
    assert opened(folder.rename(tmp_path / "moved")).splits["test"].fingerprint


def test_missing_labels(folder: Path) -> None:
    shard(folder / "val-1.tar", sample(7, None, "bare"))
    with pytest.raises(DataError, match="1 of 3 images of the split 'val' have no label, such as 'val-1/bare'"):
        opened(folder)
    assert opened(folder, labelled=False).splits["test"].labels.tolist() == [1, 2, -1]


@pytest.mark.parametrize("label", [b"cat", b"1.5", b"true", b"", b"[1]"])
def test_labels_that_are_not_integers(folder: Path, label: bytes) -> None:
    shard(folder / "val-1.tar", {"x.jpg": png(0), "x.cls": label})
    with pytest.raises(DataError, match=r"is not an integer\n.*val-1\.tar, x\.cls"):
        opened(folder)


def test_damaged_and_compressed_shards(folder: Path) -> None:
    path = shard(folder / "val-1.tar", sample(7, 0) | sample(8, 0))
    whole = path.read_bytes()
    path.write_bytes(whole[:700])
    with pytest.raises(DataError, match=r"cannot read the shard .*val-1\.tar"):
        opened(folder)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read the shard .*val-1\.tar"):
        opened(folder)
    shard(path, sample(7, 0), "w:gz")
    with pytest.raises(DataError, match=r"val-1\.tar.*\n.*uncompressed"):
        opened(folder)


def test_a_key_that_occurs_twice(folder: Path) -> None:
    shard(folder / "val-1.tar", {"x.jpg": png(0), "x.png": png(1), "x.cls": b"0"})
    with pytest.raises(DataError, match="the sample 'x' occurs twice"):
        opened(folder)


def test_a_bad_image_is_named(folder: Path) -> None:
    shard(folder / "val-1.tar", {"x.jpg": b"nonsense", "x.cls": b"0"})
    with pytest.raises(BadImage, match=r"val-1/x \(.*val-1\.tar\)"):
        opened(folder).splits["test"].load(2)


def test_a_shard_that_cannot_be_read_is_no_bad_image(folder: Path) -> None:
    split = opened(folder).splits["test"]
    for path in folder.glob("val*.tar"):
        path.unlink()
    with pytest.raises(DataError, match="cannot read") as caught:
        split.load(0)
    assert not isinstance(caught.value, BadImage)


def test_nothing_there(folder: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        opened(folder / "none")
    with pytest.raises(DataError, match=r"no shards of 'query'; it holds .*'train-10\.tar'"):
        opened(folder, test_split="query")
