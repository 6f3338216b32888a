"""The figures of detection and segmentation, from records and logs that are written down here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocols.openmmlab import dense_figures, detection_pictures, segmentation_pictures

CLASSES = {"bar": 20.0, "disc": 60.0, "ring": None}


def record(run: str, name: str, folder: Path | None = None, rows: Any = (), classes: dict[str, Any] = CLASSES) -> Any:
    metrics = [{"name": name, "params": {}, "value": 40.0}]
    for size, share in (("all", 1), ("small", 0.5)):
        of_size = {} if size == "all" else {"view": size}
        metrics += [
            {"name": name, "params": {"class": c, **of_size}, "value": None if value is None else share * value}
            for c, value in classes.items()
        ]
    if folder is not None:
        folder.mkdir()
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SimpleNamespace(run=run, folder=folder, metrics=metrics)


ROWS = [
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": None},
    {"step": 2, "event": "test", "box_ap": 10.0, "mask_ap": 5.0, "miou": 30.0},
    {"step": 3, "loss": 1.0},
]


def test_detection_shows_boxes_and_masks(tmp_path: Path) -> None:
    drawn = detection_pictures.figures(record("a", "box_ap", tmp_path / "a", ROWS))
    losses, scores = drawn["learning_curve"].axes
    assert losses.lines[0].get_xydata().tolist() == [[1, 3], [3, 1]]
    assert [line.get_xydata().tolist() for line in scores.lines] == [[[2, 10]], [[2, 5]]]
    assert [line.get_label() for line in scores.lines] == ["a, box", "a, mask"]
    assert losses.get_xlim() == scores.get_xlim()
    assert set(drawn) == {"learning_curve", "ap_by_class"}


def test_segmentation_shows_one_score_and_its_headline() -> None:
    (axes,) = segmentation_pictures.figures(record("a", "miou"))["iou_by_class"].axes
    assert [bar.get_height() for bar in axes.patches] == [60, 20]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["disc", "bar"]


def test_several_runs_stand_side_by_side_and_none_loses_a_class(tmp_path: Path) -> None:
    runs = [record("a", "box_ap"), record("b", "box_ap", classes={"bar": 50.0, "star": 30.0})]
    (axes,) = detection_pictures.figures(*runs)["ap_by_class"].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["disc", "bar", "star"]
    assert [bar.get_height() for bar in axes.patches] == [60, 20, 0, 0, 50, 30]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_a_single_loss_is_seen(tmp_path: Path) -> None:
    drawn = detection_pictures.figures(record("a", "box_ap", tmp_path / "a", ROWS[:1]))
    assert drawn["learning_curve"].axes[0].lines[0].get_marker() == "."


def test_nothing_is_drawn_of_nothing() -> None:
    assert detection_pictures.figures(record("a", "box_ap", classes={"ring": None})) == {}


@pytest.mark.parametrize(("classes", "named"), [(150, True), (400, False)])
def test_names_of_as_many_classes_as_fit(classes: int, named: bool) -> None:
    (axes,) = segmentation_pictures.figures(record("a", "miou", classes={f"c{i}": 1.0 for i in range(classes)}))[
        "iou_by_class"
    ].axes
    assert (len(axes.get_xticks()) == classes) is named
    assert dense_figures.NAMED >= 150
