"""Class maps: read, refused and matched by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ibot_eval.errors import ConfigError, DataError
from ibot_eval.robustness.class_maps import imagenet_classes, match_by_name, read_class_map


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_map_is_read_in_the_order_of_the_classifier(tmp_path: Path) -> None:
    path = write(tmp_path / "map.json", {"2": 0, "0": 1, "1": -1, "3": 1})
    assert read_class_map(path, 4, 2).tolist() == [1, -1, 0, 1]


def test_classes_that_the_map_misses_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "map.json", {"0": 0, "2": 1})
    with pytest.raises(DataError, match=r"misses 2 of the classifier's 4 classes: '1', '3'"):
        read_class_map(path, 4, 2)
    with pytest.raises(DataError, match="nothing in the class map leads to 1 of the test set's 3 classes: '2'"):
        read_class_map(write(tmp_path / "map.json", {"0": 0, "1": 1}), 2, 3)
    with pytest.raises(DataError, match="leads to '7'"):
        read_class_map(write(tmp_path / "map.json", {"0": 0, "1": 7}), 2, 2)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {"0": None}])
def test_another_form_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ConfigError, match="not of the form"):
        read_class_map(write(tmp_path / "map.json", content), 2, 2)


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the class map"):
        read_class_map(tmp_path / "none.json", 2, 2)
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_class_map(tmp_path / "text.json", 2, 2)


def test_a_map_of_other_classes_than_the_classifiers(tmp_path: Path) -> None:
    path = write(tmp_path / "map.json", {str(i): i % 2 for i in range(5)})
    with pytest.raises(DataError, match="for 5 classes, and the classifier has 3: it lacks '3', '4'"):
        read_class_map(path, 3, 2)


def test_names_tell_imagenets_classes_in_another_order(tmp_path: Path) -> None:
    usual = imagenet_classes(1000)
    assert usual is not None
    assert (usual[0], usual[151], usual[999]) == ("n01440764", "n02085620", "n15075141")
    path = write(tmp_path / "map.json", {str(i): i % 9 for i in range(1000)})
    order = np.random.default_rng(0).permutation(1000)
    assert read_class_map(path, 1000, 9, [usual[i] for i in order]).tolist() == (order % 9).tolist()
    for names in (None, usual, [f"class {i}" for i in range(1000)]):
        assert read_class_map(path, 1000, 9, names).tolist() == (np.arange(1000) % 9).tolist()


def test_match_by_name() -> None:
    assert match_by_name(["c", "a", "b"], ["a", "x", "c"]).tolist() == [2, 0, -1]
    # tench, goldfish; 'crane' is two classes of ImageNet, a bird and a machine.
    assert match_by_name(["n01440764", "n01443537", "n02012849"], ["goldfish", "Tinca tinca", "crane"]).tolist() == [
        1,
        0,
        -1,
    ]
