"""torchvision and Hugging Face sets through timm, and map-style data sets of the Python API."""

from __future__ import annotations

import errno
import io
import pickle
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset
from torchvision.datasets import ImageFolder

from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import Data
from ibot_eval.errors import BadImage, ConfigError, DataError, MissingExtra
from ibot_eval.settings import DataSettings

from . import images


def write_mnist(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A tiny MNIST in the raw idx format: 32-bit big-endian header, then bytes."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    sets = {}
    for role, prefix, n in (("train", "train", 30), ("test", "t10k", 20)):
        pixels = rng.integers(0, 256, (n, 28, 28), np.uint8)
        labels = (np.arange(n) % 10).astype(np.uint8)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, n, 28, 28) + pixels.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, n) + labels.tobytes())
        sets[role] = (pixels, labels)
    return sets


class TestTorch:
    def test_mnist(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        sets = write_mnist(tmp_path)
        data = open_data(DataSettings(data="torch/mnist", data_root=tmp_path))
        for role, (pixels, labels) in sets.items():
            split = data.splits[role]
            np.testing.assert_array_equal(split.labels, labels)
            np.testing.assert_array_equal(np.asarray(split.load(7))[..., 2], pixels[7])
            assert split.load(7).mode == "RGB"
        assert data.splits["train"].image_ids[7] == "train/0000007"
        assert len(data.class_names) == 10
        assert data.data_name == "MNIST"
        assert data.split_names == {"train": "train", "test": "test"}
        assert data.fingerprint == open_data(DataSettings(data="torch/MNIST", data_root=tmp_path)).fingerprint
        assert capfd.readouterr().out == ""  # stdout may carry a record

    def test_per_class_has_no_published_name(self, tmp_path: Path) -> None:
        write_mnist(tmp_path)
        data = open_data(DataSettings(data="torch/mnist", data_root=tmp_path, train_per_class=2, train_split="val"))
        assert data.data_name is None
        assert len(data.splits["train"]) == 20
        assert data.split_names == {"train": "test", "test": "test"}
        assert data.splits["train"].source == "torch/mnist/test"

    def test_cifar(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pixels = np.stack([images.picture(32, 32, seed) for seed in range(6)])
        fake = SimpleNamespace(data=pixels, targets=[5, 4, 3, 2, 1, 0], classes=list("abcdef"))
        monkeypatch.setattr("timm.data.dataset_factory.create_dataset", lambda *_, **__: fake)
        data = open_data(DataSettings(data="torch/cifar10"))
        np.testing.assert_array_equal(np.asarray(data.splits["test"].load(2)), pixels[2])
        assert data.splits["test"].labels.tolist() == [5, 4, 3, 2, 1, 0]
        assert data.data_name == "CIFAR-10"

    def test_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"cannot open torch/cifar10(.|\n)*--download(.|\n)*--data-root"):
            open_data(DataSettings(data="torch/cifar10", data_root=tmp_path))

    def test_wrong_names(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="did you mean 'cifar10"):
            open_data(DataSettings(data="torch/cifar-10"))
        with pytest.raises(ConfigError, match="--test-split query: torch/mnist has the splits train and test"):
            open_data(DataSettings(data="torch/mnist", data_root=tmp_path, test_split="query"), ("test",))


class FakeTable:
    """The part of a Hugging Face data set that is used."""

    column_names = ("image", "label")
    _fingerprint = "abc"

    def __init__(self, labels: list[int | None]) -> None:
        self.labels = labels

    def __getitem__(self, key: str) -> list[int | None]:
        assert key == "label"
        return self.labels


class FakeReader:
    label_key = "label"

    def __init__(self, labels: list[int | None], start: int, class_to_idx: dict[str, int]) -> None:
        self.dataset, self.start, self.class_to_idx = FakeTable(labels), start, class_to_idx

    def __len__(self) -> int:
        return len(self.dataset.labels)

    def __getitem__(self, i: int) -> tuple[io.BytesIO, int | None]:
        buffer = io.BytesIO()
        Image.fromarray(images.picture(seed=self.start + i)).save(buffer, "PNG")
        return io.BytesIO(buffer.getvalue()), self.dataset.labels[i]


class TestHfds:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        calls: list[Any] = []
        library = ModuleType("datasets")
        library.config = SimpleNamespace(HF_HUB_OFFLINE=False)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", library)

        def create(name: str, root: str | None, split: str) -> Any:
            calls.append((name, root, split, library.config.HF_HUB_OFFLINE))  # type: ignore[attr-defined]
            print("chatter")
            if split not in ("train", "test"):
                raise ValueError(f'Unknown split "{split}". Should be one of [train, test].')
            labels: list[int | None] = [1, 0, 1] if split == "train" else [0, None]
            return SimpleNamespace(reader=FakeReader(labels, 10 * (split == "test"), {"dog": 1, "cat": 0}))

        monkeypatch.setattr("timm.data.dataset_factory.create_dataset", create)
        return calls

    def test_reads(self, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
        data = open_data(DataSettings(data="hfds/Someone/Pets"), labelled=False)
        assert data.class_names == ("cat", "dog")
        assert data.splits["train"].labels.tolist() == [1, 0, 1]
        assert data.splits["test"].labels.tolist() == [0, -1]
        assert data.split_names == {"train": "train", "test": "test"}
        np.testing.assert_array_equal(np.asarray(data.splits["test"].load(1)), images.picture(seed=11))
        assert data.splits["train"].image_ids[2] == "train/0000002"
        again = pickle.loads(pickle.dumps(data.splits["train"]))
        assert again.fingerprint == data.splits["train"].fingerprint
        assert calls[0] == ("hfds/Someone/Pets", None, "train", True)  # kept from the network
        assert capsys.readouterr().out == ""

    def test_settings(self, calls: list[Any], tmp_path: Path) -> None:
        settings = DataSettings(data="hfds/x", data_root=tmp_path, download=True, fingerprint="content")
        data = open_data(settings, ("train",))
        assert calls == [("hfds/x", str(tmp_path), "train", False)]
        stat = open_data(DataSettings(data="hfds/x"), ("train",))
        assert stat.fingerprint != data.fingerprint

    def test_missing_labels(self, calls: list[Any]) -> None:
        with pytest.raises(DataError, match="1 of 2 images of the split 'test' have no label"):
            open_data(DataSettings(data="hfds/x"))

    def test_wrong_split(self, calls: list[Any]) -> None:
        with pytest.raises(DataError, match="split query: Unknown split"):
            open_data(DataSettings(data="hfds/x", test_split="query"))

    def test_library_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MissingExtra, match=r"ibot-eval\[hfds\]"):
            open_data(DataSettings(data="hfds/x"))


class TestFromDatasets:
    def test_image_folder(self, tmp_path: Path) -> None:
        images.tree(tmp_path, {"train/a": 2, "train/b": 1, "val/a": 1, "val/b": 1})
        data = Data.from_datasets(ImageFolder(str(tmp_path / "train")), ImageFolder(str(tmp_path / "val")), name="mine")
        assert data.class_names == ("a", "b")
        assert data.reference == "mine"
        assert data.splits["train"].labels.tolist() == [0, 0, 1]
        assert data.splits["train"].image_ids[0] == "train/0000000"
        np.testing.assert_array_equal(np.asarray(data.splits["train"].load(2)), images.picture(seed=1000))
        again = pickle.loads(pickle.dumps(data.splits["train"]))
        assert again.load(0).mode == "RGB"

    def test_fingerprint_follows_the_pixels(self) -> None:
        def build(seed: int, label: int = 0) -> str:
            items = [(Image.fromarray(images.picture(seed=s)), y) for s, y in ((0, label), (seed, 1))]
            return Data.from_datasets(items, items).fingerprint

        assert build(3) == build(3)
        assert len({build(3), build(4), build(3, 1)}) == 3

    def test_label_and_image_forms(self, tmp_path: Path) -> None:
        path = images.save(tmp_path / "a.png")
        train = [(path, np.int64(2)), (str(path), torch.tensor(0)), (Image.open(path), None)]
        data = Data.from_datasets(train)
        assert data.splits["train"].labels.tolist() == [2, 0, -1]
        assert data.class_names == ("0", "1", "2")
        assert list(data.splits) == ["train"]
        for i in range(3):
            np.testing.assert_array_equal(np.asarray(data.splits["train"].load(i)), images.picture())

    def test_warnings(self) -> None:
        white = Image.new("RGB", (2, 2), "white")
        data = Data.from_datasets([(white, 0), (white, 1)], [(white, 0), (white, 3)])
        assert any("'train' only, none in 'test': '1'" in w for w in data.warnings)
        assert any("'test' only, none in 'train': '3'" in w for w in data.warnings)
        assert any("1 of 4 classes have no images: '2'" in w for w in data.warnings)

    def test_subset_and_names(self, tmp_path: Path) -> None:
        images.tree(tmp_path, {"a": 2, "b": 2})
        part = Subset(ImageFolder(str(tmp_path)), [3, 0])
        data = Data.from_datasets(None, part, class_names=["A", "B"])
        assert data.splits["test"].labels.tolist() == [1, 0]
        assert data.class_names == ("A", "B")

    def test_bad_path_waits_for_loading(self, tmp_path: Path) -> None:
        (tmp_path / "bad.png").write_bytes(b"")
        data = Data.from_datasets([(tmp_path / "bad.png", 0)])
        with pytest.raises(BadImage, match=r"train/0000000 \(.*bad\.png\)"):
            data.splits["train"].load(0)

    def test_trouble_of_the_system_is_never_a_bad_image(self) -> None:
        class Items(list[Any]):
            error: OSError | None = None

            def __getitem__(self, i: Any) -> Any:
                if self.error is not None:
                    raise self.error
                return super().__getitem__(i)

        items = Items([(Image.new("RGB", (2, 2)), 0)])
        split = Data.from_datasets(items).splits["train"]
        items.error = OSError(errno.EIO, "Input/output error")
        with pytest.raises(DataError, match="Input/output error") as caught:
            split.load(0)
        assert not isinstance(caught.value, BadImage)
        items.error = OSError("image file is truncated")
        with pytest.raises(BadImage, match="truncated"):
            split.load(0)

    @pytest.mark.parametrize(
        ("train", "message"),
        [
            ([], "empty"),
            ([Image.new("RGB", (2, 2))], "not \\(image, label\\)"),
            ([(Image.new("RGB", (2, 2)), "cat")], "the label of train/0000000 is 'cat'"),
            ([(Image.new("RGB", (2, 2)), 0.5)], "not an integer"),
            (TensorDataset(torch.zeros(2, 3, 4, 4), torch.zeros(2)), "without a transform"),
        ],
    )
    def test_unusable_items(self, train: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            Data.from_datasets(train)

    def test_labels_beyond_the_names(self) -> None:
        with pytest.raises(DataError, match="has label 1, but there are 1 classes"):
            Data.from_datasets([(Image.new("RGB", (2, 2)), 1)], class_names=["only"])
        with pytest.raises(DataError, match="no data set was given"):
            Data.from_datasets()
