"""Records: the schema, reading back, damaged and foreign files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from ibot_eval.errors import RecordError
from ibot_eval.record import SCHEMA_FILE, EvalRecord, find_records, load_predictions, load_records, save_predictions

SCHEMA = json.loads(SCHEMA_FILE.read_text())
OLD = Path(__file__).parent / "records"


def small_record(**changes: object) -> EvalRecord:
    metric = {
        "name": "top1",
        "value": 50.0,
        "unit": "%",
        "higher_is_better": True,
        "params": {"k": 10},
        "n": 4,
        "interval": [15.0, 85.0],
        "published": None,
    }
    fields = {"run": "r", "status": "success", "primary": "top1", "metrics": [metric], "timing": {"started": "2026"}}
    return EvalRecord(protocol="knn", protocol_version=1, **(fields | changes))  # type: ignore[arg-type]


def test_record_keeps_the_schema_and_reads_back_equal(tmp_path: Path) -> None:
    record = small_record(warnings=["w"], artifacts=[{"path": "predictions.npz", "kind": "predictions"}])
    path = record.save(tmp_path)
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    assert EvalRecord.load(path) == record
    assert EvalRecord.load(tmp_path) == record


def test_a_record_of_a_run_that_has_hardly_begun_keeps_the_schema(tmp_path: Path) -> None:
    jsonschema.validate(json.loads(EvalRecord("r", "knn", 1).save(tmp_path).read_text()), SCHEMA)


def test_a_record_knows_its_folder_without_writing_it_down(tmp_path: Path) -> None:
    record = small_record()
    assert record.folder is None
    (tmp_path / "before").mkdir()
    path = record.save(tmp_path / "before")
    assert record.folder == tmp_path / "before"
    assert "folder" not in json.loads(path.read_text())
    moved = (tmp_path / "before").rename(tmp_path / "after")
    assert EvalRecord.load(moved).folder == EvalRecord.load(moved / "record.json").folder == moved
    content = json.loads((moved / "record.json").read_text()) | {"folder": "/elsewhere"}
    (moved / "record.json").write_text(json.dumps(content))
    assert EvalRecord.load(moved).folder == moved


def test_numbers_that_json_cannot_hold_become_null(tmp_path: Path) -> None:
    record = small_record(timing={"started": "x", "a": math.nan, "b": np.float32(1.5), "c": Path("p"), "d": (1, 2)})
    timing = json.loads(record.save(tmp_path).read_text())["timing"]
    assert timing == {"started": "x", "a": None, "b": 1.5, "c": "p", "d": [1, 2]}


@pytest.mark.parametrize("name", ["schema1_knn.json", "schema1_error.json"])
def test_old_records_stay_readable(name: str) -> None:
    record = EvalRecord.load(OLD / name)
    jsonschema.validate(record.as_dict(), SCHEMA)
    assert record.run
    assert bool(record.metrics) == (record.status == "success")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot read the record"),
        ('{"schema": 1, "proto', "cannot read the record"),
        ("[1, 2]", "not an ibot-eval record"),
        ('{"some": "json"}', "not an ibot-eval record"),
        ('{"schema": 2, "protocol": "knn"}', "has schema 2"),
        ('{"schema": "x", "protocol": "knn"}', "unknown schema 'x'"),
        ('{"schema": 1, "protocol": "knn"}', "lacks metrics, protocol_version, run, status"),
    ],
)
def test_files_that_are_not_records_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=message) as caught:
        EvalRecord.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": None},
        {"timing": None},
        {"config": []},
        {"checkpoint": "x"},
        {"error": "text"},
        {"status": "fine"},
        {"metrics": [1]},
        {"metrics": [{"name": "top1", "value": 1.0, "unit": "%"}]},
        {"metrics": [{"name": "top1", "value": "high", "unit": "%", "params": {}}]},
        {"metrics": [{"name": "top1", "value": 1.0, "unit": "%", "params": {}, "interval": [1.0]}]},
    ],
    ids=str,
)
def test_records_with_wrong_content_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(small_record().as_dict() | change))
    with pytest.raises(RecordError, match="is damaged"):
        EvalRecord.load(path)


def test_records_are_found_below_a_folder_and_sorted_by_start(tmp_path: Path) -> None:
    for name, started in (("b", "2026-01-02"), ("a", "2026-01-03"), ("c/d", "2026-01-01")):
        (tmp_path / name).mkdir(parents=True)
        small_record(run=name.replace("/", "-"), timing={"started": started}).save(tmp_path / name)
    assert [record.run for record in load_records(tmp_path)] == ["c-d", "b", "a"]
    assert len(list(find_records(tmp_path / "a"))) == 1
    assert len(load_records(tmp_path, tmp_path / "a")) == 3, "none twice"
    with pytest.raises(RecordError, match="no such folder"):
        load_records(tmp_path / "nowhere")


def test_predictions_read_back(tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    save_predictions(path, ["a/1.png", "b/é 2.png"], {"label": np.array([0, 1]), "votes": np.eye(2, dtype=np.float32)})
    back = load_predictions(path)
    assert back["image_ids"].tolist() == ["a/1.png", "b/é 2.png"]
    np.testing.assert_array_equal(back["label"], [0, 1])
    np.testing.assert_array_equal(back["votes"], np.eye(2))
