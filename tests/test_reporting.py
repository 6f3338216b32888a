"""Tables of records."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from ibot_eval import cli
from ibot_eval.record import EvalRecord
from ibot_eval.reporting import records_table, run_table


def metric(k: int, value: float, **more: object) -> dict:
    base = {"name": "top1", "value": value, "unit": "%", "higher_is_better": True, "params": {"k": k}, "n": 400}
    return base | {"interval": [value - 1, value + 1], "published": None} | more


def record(run: str = "knn-a", **changes: object) -> EvalRecord:
    fields = {
        "status": "success",
        "primary": "top1",
        "metrics": [
            metric(10, 71.25),
            metric(10, 90.5, name="top5", interval=None),
            metric(20, 75.0, published={"value": 75.2, "source": "a paper"}),
        ],
        "config": {"method": "iBOT", "data_name": "ImageNet-1K"},
        "checkpoint": {"reference": "x.pth", "architecture": "vit-s/16", "key": "teacher"},
        "data": {
            "reference": "/data",
            "classes": 1000,
            "splits": {"train": {"images": 1281167}, "test": {"images": 5}},
        },
        "timing": {"started": "2026-01-01"},
    }
    return EvalRecord(run=run, protocol="knn", protocol_version=1, **(fields | changes))  # type: ignore[arg-type]


FAILED = record("knn-b", status="error", error={"kind": "DataError", "message": "no images\n  to do: look"}, metrics=[])


def test_a_run_prints_every_metric_once() -> None:
    text = run_table(record(), Path("runs/knn-a"))
    lines = [line.split() for line in text.splitlines()]
    assert ["10", "71.25", "70.25", "to", "72.25", "90.50"] in lines
    assert any(line[:5] == ["20", "75.00", "74.00", "to", "76.00"] for line in lines)
    assert "75.2 (a paper)" in text
    assert "train: 1,281,167 images" in text
    assert text.endswith("record: runs/knn-a/record.json")


def test_a_run_of_many_classes_prints_their_range() -> None:
    of_classes = [
        metric(0, value, name="per_class_top1", params={"class": name}, interval=None)
        for name, value in (("cat", 50.0), ("dog", 12.5), ("cow", 75.0))
    ]
    text = run_table(record(metrics=[*record().metrics, *of_classes]), Path("runs/knn-a"))
    assert "top-1 by class: 12.50 % (dog) to 75.00 % (cow); the record has all 3" in text
    assert "cat" not in text


def test_classes_have_a_line_for_each_metric_and_those_without_a_value_are_counted() -> None:
    of_classes = [
        metric(0, 0.0, name=name, params={"head": "linear", "class": label}, interval=None) | {"value": value}
        for name, values in (("miou", (50.0, None, 12.5)), ("macc", (None, None, None)))
        for label, value in zip(("cat", "dog", "cow"), values, strict=True)
    ]
    text = run_table(record(metrics=[*record().metrics, *of_classes]), Path("runs/knn-a"))
    assert "miou by class: 12.50 % (cow) to 50.00 % (cat), none for 1 of them; the record has all 3" in text
    assert "macc by class: no class has a value; the record has all 3" in text
    assert "dog" not in text


def test_the_table_has_a_line_a_run_with_the_published_number() -> None:
    text = records_table([record(), FAILED])
    first, second = text.splitlines()[2:]
    for part in ("knn-a", "success", "iBOT vit-s/16", "ImageNet-1K", "top1 k=20", "75.00 %", "74.00 to 76.00", "75.2"):
        assert part in first
    assert "error" in second
    assert "no images" in second
    assert "to do" not in second


def test_every_metric_can_be_listed() -> None:
    rows = list(csv.DictReader(io.StringIO(records_table([record()], "csv", every_metric=True))))
    assert [(row["metric"], row["value"]) for row in rows] == [
        ("top1 k=10", "71.25 %"),
        ("top5 k=10", "90.50 %"),
        ("top1 k=20", "75.00 %"),
    ]


def test_markdown() -> None:
    lines = records_table([record()], "md").splitlines()
    assert all(line.startswith("|") and line.endswith("|") for line in lines)
    assert lines[0].count("|") == lines[2].count("|")


def test_report_leaves_damaged_records_out_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    record().save(tmp_path / "good")
    (tmp_path / "bad" / "record.json").write_text('{"schema": 1, "pro')
    assert cli.main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "knn-a" in captured.out
    assert str(tmp_path / "bad" / "record.json") in captured.err
    (tmp_path / "good" / "record.json").unlink()
    assert cli.main(["report", str(tmp_path)]) == 2
    assert cli.main(["report", str(tmp_path), "--format", "xml"]) == 2
