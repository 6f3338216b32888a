"""Labels files for flat test folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ibot_eval.data.label_file import read_labels
from ibot_eval.data.opening import open_data
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.settings import DataSettings

from . import images

FILES = ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG", "ILSVRC2012_val_00000003.JPEG"]
CLASSES = ["n01440764", "n01443537", "n01751748", "polar bear"]


def read(tmp_path: Path, text: str, files: list[str] = FILES, classes: list[str] = CLASSES) -> Any:
    (tmp_path / "labels.txt").write_text(text, encoding="utf-8")
    labels, names = read_labels(tmp_path / "labels.txt", files, classes)
    return labels.tolist(), names


def refused(tmp_path: Path, text: str, *parts: str, **settings: Any) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, text, **settings)
    for part in parts:
        assert part in str(caught.value)


KAGGLE = """ImageId,PredictionString
ILSVRC2012_val_00000003,n01751748 3 0 0 4
ILSVRC2012_val_00000001,n01443537 85 1 499 272 n01443537 131 0 499 254
ILSVRC2012_val_00000002,n01440764 131 0 499 254
"""


@pytest.mark.parametrize(
    "text",
    [
        KAGGLE,
        "\ufeff" + KAGGLE.replace("\n", "\r\n"),
        "".join(f"{f} {c}\n" for f, c in zip(FILES, ["n01443537", "n01440764", "n01751748"], strict=True)),
        "".join(f"val/{f}\t{c}\n" for f, c in zip(FILES, "102", strict=True)),
        "filename, label\n" + "".join(f"./{f}, {c}\n" for f, c in zip(FILES, "102", strict=True)) + "\n\n",
        "".join(f"ILSVRC\\Data\\val\\{f[:-5]} {c}\n" for f, c in zip(FILES, "102", strict=True)),
        "image label\n" + "".join(f"{f} {c}\n" for f, c in zip(FILES, "102", strict=True)),
        "n01443537\nn01440764\nn01751748\n",
        "1\n0\n2\n",
    ],
)
def test_accepted_forms(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == ([1, 0, 2], tuple(CLASSES))


def test_spaces_in_names(tmp_path: Path) -> None:
    files = ["a b.jpg", "b.jpg"]
    assert read(tmp_path, "a b.jpg n01443537\nb.jpg polar bear\n", files)[0] == [1, 3]
    assert read(tmp_path, 'a b.jpg,"polar bear"\nb.jpg,n01440764\n', files)[0] == [3, 0]
    assert read(tmp_path, "polar bear\nn01440764\n", files)[0] == [3, 0]


def test_class_names_that_are_numbers_are_names(tmp_path: Path) -> None:
    text = "".join(f"{f} {c}\n" for f, c in zip(FILES, ["2", "10", "7"], strict=True))
    assert read(tmp_path, text, classes=["2", "7", "10"])[0] == [0, 2, 1]


def test_classes_from_the_file_where_nothing_else_names_them(tmp_path: Path) -> None:
    text = "".join(f"{f} {c}\n" for f, c in zip(FILES, ["c10", "c9", "c10"], strict=True))
    assert read(tmp_path, text, classes=[]) == ([1, 0, 1], ("c9", "c10"))
    numbers = "".join(f"{f} {c}\n" for f, c in zip(FILES, "203", strict=True))
    assert read(tmp_path, numbers, classes=[]) == ([2, 0, 3], ("0", "1", "2", "3"))


def test_nested_files_by_path_or_name(tmp_path: Path) -> None:
    files = ["x/1.jpg", "y/1.jpg", "y/2.jpg"]
    assert read(tmp_path, "y/1.jpg 1\nx/1.jpg 0\n2 2\n", files)[0] == [0, 1, 2]
    refused(tmp_path, "1.jpg 1\n2.jpg 0\n", "'1.jpg'", "fits several images", files=files)


@pytest.mark.parametrize("text", ["1\n3\n4\n", "1\n2\n2\n"])
def test_the_ilsvrc_ground_truth_file_is_refused(tmp_path: Path, text: str) -> None:
    refused(tmp_path, text, "do not name their images", "development kit", "LOC_val_solution.csv")


def test_integers_from_1_with_images_are_refused(tmp_path: Path) -> None:
    text = "".join(f"{f} {c}\n" for f, c in zip(FILES, "124", strict=True))
    refused(tmp_path, text, "run from 1 to 4", "4 classes are numbered 0 to 3")


@pytest.mark.parametrize("wrong", ["0", "5", "n1"])
def test_one_wrong_line_does_not_turn_names_into_indices(tmp_path: Path, wrong: str) -> None:
    text = "".join(f"{f} {c}\n" for f, c in zip(FILES, ["1", "2", wrong], strict=True))
    refused(tmp_path, text, "line 3", f"'{wrong}'", "'1' in line 1", classes=["1", "2", "3", "4"])


def test_an_index_among_names_is_refused(tmp_path: Path) -> None:
    text = "".join(f"{f} {c}\n" for f, c in zip(FILES, ["n01440764", "1", "n01443537"], strict=True))
    refused(tmp_path, text, "line 2", "'1'")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is empty"]),
        (KAGGLE + "ILSVRC2012_val_00000009,n01751748 3 0 0 4\n", ["1 of the images", "ILSVRC2012_val_00000009"]),
        (KAGGLE + "ILSVRC2012_val_00000002,n01751748 3 0 0 4\n", ["more than once", FILES[1]]),
        (f"{FILES[0]} 1\n", ["2 of 3 images have no label", FILES[1], FILES[2]]),
        (f"{FILES[0]} 1\n{FILES[1]} 1\n{FILES[2]} n0175174\n", ["line 3", "'n0175174'", "did you mean 'n01751748'"]),
        ("0\n1\n", ["2 bare labels", "3 images"]),
        ("0\n1\n2\n3\n", ["4 bare labels", "3 images"]),
        ("a.jpg 1\nb.jpg 2\n", ["no line of", "'a.jpg 1'", FILES[0]]),
        ("n01440764\nn01440764\nn0144\n", ["line 3", "'n0144'"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    refused(tmp_path, text, *parts)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the labels file"):
        read_labels(tmp_path / "none.txt", FILES, CLASSES)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(DataError, match="cannot read the labels file"):
        read_labels(tmp_path / "binary", FILES, CLASSES)


class TestThroughOpenData:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return images.tree(tmp_path / "set", {"train/a": 2, "train/b": 1, "val": ["z.png", "y.png", "x.png"]})

    def test_flat_test_folder(self, root: Path) -> None:
        labels = root / "labels.csv"
        labels.write_text("x,b\ny,a\nz,a\n")
        settings = DataSettings(data=str(root), test_labels=labels)
        data = open_data(settings)
        assert data.class_names == ("a", "b")
        assert list(data.splits["test"].image_ids) == ["val/x.png", "val/y.png", "val/z.png"]
        assert data.splits["test"].labels.tolist() == [1, 0, 0]
        assert open_data(settings, ("test",)).splits["test"].labels.tolist() == [1, 0, 0]
        before = data.splits["test"].fingerprint
        labels.write_text("x,b\ny,a\nz,b\n")
        assert open_data(settings).splits["test"].fingerprint != before

    def test_per_class(self, root: Path) -> None:
        (root / "labels.csv").write_text("x,b\ny,a\nz,a\n")
        data = open_data(DataSettings(data=str(root), test_labels=root / "labels.csv", test_per_class=1))
        assert list(data.splits["test"].image_ids) == ["val/x.png", "val/y.png"]

    def test_only_for_folders(self, tmp_path: Path) -> None:
        for data in ("demo", "torch/mnist", "wds/x"):
            with pytest.raises(ConfigError, match="--test-labels belongs to data in a folder"):
                open_data(DataSettings(data=data, test_labels=tmp_path / "x"))
