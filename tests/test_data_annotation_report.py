"""Reports of checks as people read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ibot_eval.data.annotation_report import Finding, Histogram, Report, found
from ibot_eval.data.coco_check import check_data
from ibot_eval.errors import DataError

from .dense_data import changed, coco_folder, opened_coco


def test_its_text() -> None:
    report = Report(
        [
            Finding("info", "all is well"),
            *found("note", "odd", range(5)),
            *found("error", "bad", ["a.jpg"], "mend it"),
            *found("error", "none", []),
        ],
        [
            Histogram("objects", {"cat": 3, "dog": 0, "eel": 30}),
            Histogram("sizes", {"small": 0, "large": 1}, sort=False),
        ],
        ["val: 2 images"],
    ).within("val")
    assert report.text() == (
        "val: 2 images\n"
        "\n"
        "error: val: bad: 1 (a.jpg)\n"
        "       -> mend it\n"
        "note:  val: odd: 5 (0, 1, 2, …)\n"
        "info:  val: all is well\n"
        "\n"
        "objects\n"
        "  eel  30   90.9 %  ##############################\n"
        "  cat   3    9.1 %  ###\n"
        "  (1 with none)\n"
        "\n"
        "sizes\n"
        "  small  0    0.0 %\n"
        "  large  1  100.0 %  ##############################"
    )
    assert report.notes == ["val: odd: 5 (0, 1, 2, …)"]
    assert report.overview() == report.text().replace(
        "error: val: bad: 1 (a.jpg)\n       -> mend it\nnote:  val: odd: 5 (0, 1, 2, …)\ninfo:  val: all is well\n\n",
        "",
    )


def test_many_classes_are_cut() -> None:
    counts = {f"c{i}": 100 - i for i in range(40)}
    lines = Histogram("many", counts).text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        *(f"c{i}" for i in range(20)),
        "…",
        *(f"c{i}" for i in range(35, 40)),
    ]
    assert "15 more" in lines[21]


def test_errors_stop(tmp_path: Path) -> None:
    root = changed(coco_folder(tmp_path), lambda c: c["annotations"][0].update(image_id=6))
    report = check_data(opened_coco(root))
    with pytest.raises(DataError) as caught:
        report.stop_at_errors("here")
    assert "an image that is not in the file: 1 (object 1: 6)" in str(caught.value)
    assert "objects per class" not in str(caught.value)
    with pytest.raises(DataError, match="objects per class"):
        report.stop_at_errors("here", whole=True)
    Report().stop_at_errors("here")
