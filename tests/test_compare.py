"""``ibot-eval compare``: what is paired, what is refused, and what is said."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ibot_eval import cli, registry
from ibot_eval.commands.compare import Compare
from ibot_eval.comparison import judge_all
from ibot_eval.errors import ConfigError, RecordError, UserError
from ibot_eval.metrics.paired import paired_difference
from ibot_eval.prediction_columns import column_of
from ibot_eval.record import EvalRecord, save_predictions

N = 120
IDS = [f"val/{i % 3}/{i:03d}.png" for i in range(N)]
LABELS = np.arange(N) % 3
CLASSES = {"ant": 0, "bee": 1, "cat": 2}


def guesses(share: float, seed: int) -> np.ndarray:
    """Predicted classes of which about ``share`` are right."""
    generator = np.random.default_rng(seed)
    return np.where(generator.random(N) < share, LABELS, (LABELS + 1) % 3)


def data(**changes: Any) -> dict[str, Any]:
    splits = {
        "train": {"name": "train", "images": 300, "fingerprint": "t1"},
        "test": {"name": "val", "images": N, "fingerprint": "v1"},
    }
    base = {"reference": "/data", "fingerprint": "f1", "splits": splits, "classes": 3, "class_to_idx": CLASSES}
    return base | {"transform": {"resize": 256, "crop": 224}, "skipped_images": {}} | changes


def write(
    folder: Path,
    values: Mapping[str, np.ndarray] | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    value: float | None = None,
    ids: list[str] | None = None,
    **fields: Any,
) -> Path:
    """A run of a protocol that is not installed, with one headline number."""
    folder.mkdir(parents=True)
    values = {"label": LABELS, "top1": guesses(0.7, 0)} if values is None else dict(values)
    first = next((array for name, array in values.items() if name.startswith("top1")), LABELS)
    known = 100 * float(np.mean(first == values.get("label", LABELS)[: len(first)])) if value is None else value
    metric = {"name": "top1", "value": known, "unit": "%", "params": dict(params or {}), "n": N, "interval": None}
    record: dict[str, Any] = {
        "run": folder.name,
        "protocol": "probe",
        "protocol_version": 1,
        "status": "success",
        "primary": "top1",
        "metrics": [metric],
        "data": data(),
        "config": {"fingerprint": "stat"},
        "timing": {"started": folder.as_posix()},
        "artifacts": [{"path": "predictions.npz", "kind": "predictions"}],
    }
    save_predictions(folder / "predictions.npz", IDS if ids is None else ids, values)
    EvalRecord(**(record | fields)).save(folder)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    better = {"label": LABELS, "top1": guesses(0.9, 1)}
    return write(tmp_path / "plain"), write(tmp_path / "better", better)


def said(capsys: pytest.CaptureFixture[str], *runs: Path, **settings: Any) -> str:
    assert Compare(runs, **settings).run() == 0
    return capsys.readouterr().out


def refused(*runs: Path, **settings: Any) -> UserError:
    with pytest.raises(UserError) as error:
        Compare(runs, **settings).run()
    return error.value


def test_numbers_are_those_of_the_predictions(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.reader(io.StringIO(said(capsys, *pair, format="csv"))))
    right = [guesses(0.7, 0) == LABELS, guesses(0.9, 1) == LABELS]
    expected = paired_difference(*right)
    assert rows[1][:5] == ["plain", "probe", "top1", "120", f"{100 * right[0].mean():.2f}"]
    low, high = expected.interval
    assert rows[2] == [
        *("better", "probe", "top1", "120", f"{100 * right[1].mean():.2f}", f"{expected.difference:+.2f}"),
        *(f"{low:+.2f} to {high:+.2f}", f"{expected.mcnemar_p:.3g}", str(expected.only_b), str(expected.only_a)),
    ]


def test_says_it_in_words(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = write(tmp_path / "same")
    nearly = guesses(0.7, 0)
    nearly[:2] = LABELS[:2]
    nearly[2] = (LABELS[2] + 1) % 3
    near = write(tmp_path / "near", {"label": LABELS, "top1": nearly})
    text = said(capsys, *pair, same, near)
    assert "better is better than plain: +" in text
    assert "same is right on the same images as plain." in text
    assert "No difference between near and plain can be shown" in text
    assert "note: the p-values are not corrected for 3 comparisons" in text
    assert "plain is worse than better: -" in said(capsys, *reversed(pair))


def test_as_a_user_calls_it(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert "compare" in registry.entries("commands")
    assert cli.main(["compare", *map(str, pair), "--format", "md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("|") for line in lines[:4])
    assert cli.main(["compare", str(pair[0])]) == 2
    assert "one run cannot be compared" in capsys.readouterr().err


def test_order_of_the_images_does_not_matter(tmp_path: Path) -> None:
    order = np.random.default_rng(5).permutation(N)
    values = {"label": LABELS[order], "top1": guesses(0.7, 0)[order]}
    runs = judge_all([write(tmp_path / "a"), write(tmp_path / "b", values, ids=[IDS[i] for i in order])])
    assert np.array_equal(runs[0].right, runs[1].right)
    assert list(runs[1].image_ids) == sorted(IDS)


def test_classes_that_gain_and_lose_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = LABELS.copy(), LABELS.copy()
    before[LABELS == 2] = 0
    after[(LABELS == 0) & (np.arange(N) < 60)] = 1
    runs = [write(tmp_path / name, {"label": LABELS, "top1": v}) for name, v in (("a", before), ("b", after))]
    rows = list(csv.reader(io.StringIO(said(capsys, *runs, classes=2, format="csv"))))
    assert rows[1:] == [
        ["b", "cat", "40", "0.00", "100.00", "+100.00"],
        ["b", "ant", "40", "100.00", "50.00", "-50.00"],
    ]
    assert "cat" in said(capsys, *runs, classes=1)
    same = write(tmp_path / "same", {"label": LABELS, "top1": before})
    assert "No class is more or less often right than in a." in said(capsys, runs[0], same, classes=1)


def test_columns_are_found_by_name_and_params() -> None:
    def found(params: Mapping[str, Any], *columns: str, name: str = "top1") -> str | None:
        return column_of({"name": name, "params": params}, columns)

    ks = ("top1@k=10", "top1@k=20", "top1@k=200", "top5@k=20")
    assert found({"k": 20, "temperature": 0.07}, *ks) == "top1@k=20"
    assert found({"k": 20}, *ks, name="top5") == "top5@k=20"
    assert found({"k": 7}, *ks) is None
    assert found({"lr": 0.1, "selection": "held-out"}, "label", "top1") == "top1"
    assert found({}, "cluster@method=head", name="nmi") is None
    orders = ("top1@k=7,order=attention", "top1@k=7,order=reverse", "top1@k=14,order=attention")
    assert found({"order": "reverse", "k": 7}, *orders) == "top1@k=7,order=reverse"
    # The record's JSON made lists of tuples; the values themselves may hold commas.
    assert found({"blocks": [8, 11], "k": 5}, "top1@blocks=(8,),k=5", "top1@blocks=(8, 11),k=5").endswith("11),k=5")  # type: ignore[union-attr]
    # A mean over draws: the first of them; and a column of its own is better than that.
    draws = (
        "top1@labels=1%,scorer=knn,draw=0",
        "top1@labels=1%,scorer=linear,draw=0",
        "top1@labels=1%,scorer=linear,draw=1",
    )
    assert found({"labels": "1%", "scorer": "linear", "draws": 2}, *draws) == draws[1]
    assert found({"labels": "1%"}, *draws, "top1@labels=1%") == "top1@labels=1%"


def test_another_column_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"label": LABELS, "top1@k=1": guesses(0.5, 3), "top1@k=20": guesses(0.7, 0), "right": guesses(0.8, 4) == 0}
    one = write(tmp_path / "one", values, params={"k": 20}, value=100 * float(np.mean(guesses(0.7, 0) == LABELS)))
    two = write(tmp_path / "two")
    assert [run.column for run in judge_all([one, two])] == ["top1@k=20", "top1"]
    assert [run.column for run in judge_all([one, two], ["top1@k=1", "top1"])] == ["top1@k=1", "top1"]
    chosen = judge_all([one, two], ["right", "top1"])[0]
    assert np.array_equal(chosen.right, values["right"][np.argsort(IDS)])
    text = said(capsys, one, two, column=("top1@k=1", "top1"))
    assert "top1@k=1" in text
    assert "note" not in text
    error = refused(one, two, column=("top1@k=2", "top1"))
    assert "top1@k=20" in str(error.todo)
    assert "no column 'label'" in refused(one, two, column=("label",)).what
    assert "3 columns for 2 runs" in refused(one, two, column=("a", "b", "c")).what


def test_says_that_a_column_is_not_the_headline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draws = {f"top1@labels=5,draw={i}": guesses(0.6, 10 + i) for i in range(3)}
    mean = write(tmp_path / "mean", {"label": LABELS, **draws}, params={"labels": "5", "draws": 3}, value=61.25)
    text = said(capsys, write(tmp_path / "one"), mean)
    assert "note: mean: " in text
    assert "top1@labels=5,draw=0, while the headline is 61.25 % (top1 labels=5 draws=3)" in text
    assert "'top1@labels=5,draw=1'" in text
    assert "note: one" not in text


def test_says_what_else_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = data(transform={"resize": 512, "crop": 448})
    other = write(tmp_path / "b", {"label": LABELS, "top1": guesses(0.9, 1)}, protocol_version=2, data=large)
    text = said(capsys, write(tmp_path / "a"), other)
    assert "note: a ran version 1 of probe, b version 2" in text
    assert "note: a saw the images at resize 256 and crop 224, b at resize 512 and crop 448" in text


def splits(role: str, **changes: Any) -> dict[str, Any]:
    return {r: {**s, **(changes if r == role else {})} for r, s in data()["splits"].items()}


@pytest.mark.parametrize(
    ("changes", "config", "message", "todo"),
    [
        ({"splits": splits("train", fingerprint="t2")}, {}, "train: 300 images in both, but", "content"),
        (
            {"splits": splits("test", fingerprint="v2"), "skipped_images": {"test": []}},
            {},
            "the images that were scored have the same names",
            "content",
        ),
        (
            {"splits": splits("train", fingerprint="t2", images=30)},
            {"train_per_class": 10},
            "train: 300 images in a, 30 in b\n    --train-per-class: not given in a, 10 in b",
            "same options",
        ),
        ({"splits": {"test": data()["splits"]["test"]}}, {}, "train: used by a, not by b", "same options"),
        ({"class_to_idx": {"bee": 0, "ant": 1, "cat": 2}}, {}, "order of the classes: number 0 is 'ant'", "same"),
        ({"class_to_idx": {"ant": 0, "bee": 1, "cow": 2}}, {}, "classes: number 2 is 'cat' in a, 'cow' in b", "same"),
        ({"class_to_idx": {"ant": 0}}, {}, "classes: 3 in a, 1 in b", "same"),
        (
            {"splits": splits("test", fingerprint="v2")},
            {"fingerprint": "content"},
            "--fingerprint: stat in a, content in b",
            "--fingerprint content",
        ),
        ({}, {}, "fingerprint: f1 in a, f2 in b", "same"),
    ],
)
def test_other_data_is_refused_and_the_difference_named(
    tmp_path: Path, changes: dict[str, Any], config: dict[str, Any], message: str, todo: str
) -> None:
    other = write(tmp_path / "b", data=data(fingerprint="f2", **changes), config={"fingerprint": "stat", **config})
    error = refused(write(tmp_path / "a"), other)
    assert isinstance(error, RecordError)
    assert "a and b cannot be paired" in error.what
    assert message in error.what
    assert todo in str(error.todo)


def test_copied_images_are_counted_before_unreadable_ones_were_left_out(tmp_path: Path) -> None:
    fewer = splits("test", fingerprint="v2", images=N - 1)
    changed = data(fingerprint="f2", splits=fewer, skipped_images={"test": [IDS[0]]})
    keep = {"label": LABELS[1:], "top1": guesses(0.7, 0)[1:]}
    other = write(tmp_path / "b", keep, ids=IDS[1:], data=changed)
    assert f"test: {N} images in both" in refused(write(tmp_path / "a"), other).what


def test_images_of_one_run_only_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    keep = {"label": LABELS[1:], "top1": guesses(0.7, 0)[1:]}
    skipped = write(tmp_path / "skipped", keep, ids=IDS[1:], data=data(skipped_images={"test": [IDS[0]]}))
    assert f"left out of skipped only: '{IDS[0]}'" in refused(first, skipped).what
    assert f"left out of skipped only: '{IDS[0]}'" in refused(skipped, first).what
    fewer = write(tmp_path / "fewer", keep, ids=IDS[1:])
    assert f"a alone classified '{IDS[0]}'" in refused(first, fewer).what
    relabelled = write(tmp_path / "relabelled", {"label": (LABELS + 1) % 3, "top1": LABELS})
    assert f"{IDS[0]} has label 0 in one, 1 in the other" in refused(first, relabelled).what
    both = write(tmp_path / "both", keep, ids=IDS[1:], data=data(skipped_images={"test": [IDS[0]]}))
    write_again = {"label": LABELS[1:], "top1": LABELS[1:]}
    third = write(tmp_path / "third", write_again, ids=IDS[1:], data=data(skipped_images={"test": [IDS[0]]}))
    assert len(judge_all([both, third])[0].right) == N - 1


def test_runs_that_cannot_be_paired(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first = pair[0]
    clusters = {"label": LABELS, "cluster@method=head": LABELS}
    nmi = [{"name": "nmi", "value": 60.0, "unit": "%", "params": {"method": "head"}, "n": N, "interval": None}]
    error = refused(first, write(tmp_path / "clustering", clusters, metrics=nmi, primary="nmi"))
    assert isinstance(error, ConfigError)
    assert "nmi method=head, is not the share of images that are right" in error.what
    assert "no headline" in refused(first, write(tmp_path / "empty", metrics=[])).what
    assert "saved no result of each image" in refused(first, write(tmp_path / "silent", artifacts=[])).what
    failed = write(tmp_path / "failed", status="error", error={"kind": "DataError", "message": "no space\nsecond line"})
    assert refused(first, failed).what == "failed did not end well (error: no space)"
    assert "(interrupted)" in refused(first, write(tmp_path / "killed", status="interrupted")).what
    unmarked = data(fingerprint=None)
    runs = [write(tmp_path / name, data=unmarked) for name in ("x", "y")]
    assert "fingerprint: None in x" in refused(*runs).what


def test_damaged_files(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first, other = pair
    saved = (other / "predictions.npz").read_bytes()
    (other / "predictions.npz").write_bytes(saved[: len(saved) // 2])
    assert "cannot read the predictions of better" in refused(first, other).what
    (other / "predictions.npz").write_bytes(b"no archive")
    assert "pickle" not in refused(first, other).what, "no advice to open it unsafely"
    (other / "predictions.npz").unlink()
    assert "are not beside its record" in refused(first, other).what
    short = write(tmp_path / "short", {"label": LABELS, "top1": LABELS[:5]})
    assert "columns differ in length" in refused(first, short).what
    newer = write(tmp_path / "newer")
    content = json.loads((newer / "record.json").read_text())
    (newer / "record.json").write_text(json.dumps(content | {"schema": 99}))
    error = refused(first, newer)
    assert "schema 99" in error.what
    assert error.todo == "upgrade ibot-eval"


def test_the_same_run_twice(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first, other = pair
    assert "are the same run" in refused(first, other, first / "record.json").what
    shutil.copytree(first, tmp_path / "copy")
    assert "are the same run" in refused(first, tmp_path / "copy").what


def test_a_folder_of_runs_is_not_a_run(pair: tuple[Path, Path], tmp_path: Path) -> None:
    error = refused(tmp_path, pair[0])
    assert "is a folder of 2 runs" in error.what
    assert str(pair[1]) in str(error.todo)
    assert "no run at" in refused(pair[0], tmp_path / "nowhere").what
    assert "no runs are named" in refused().what
    assert "one run" in refused(pair[0]).what
    assert "--classes" in str(refused(*pair, classes=-1).where)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [write(tmp_path / suite / "knn") for suite in ("one", "two")]
    third = write(tmp_path / "two" / "linear")
    assert [run.name for run in judge_all([*runs, third])] == ["one/knn", "two/knn", "two/linear"]


def test_the_name_of_one_suite_is_not_repeated(tmp_path: Path) -> None:
    runs = [write(tmp_path / suite / name, run=f"{suite}/{name}") for suite in ("s", "t") for name in ("knn", "linear")]
    assert [run.name for run in judge_all(runs[:2])] == ["knn", "linear"]
    assert [run.name for run in judge_all(runs[1:3])] == ["s/linear", "t/knn"]


def test_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shared = ["--ckpt", "demo", "--data", "demo", "--train-per-class", "3", "--test-per-class", "8", "--workers", "0"]
    for name, pooling in (("a", "cls"), ("b", "patch_mean")):
        assert (
            cli.main(["knn", *shared, "--pooling", pooling, "--name", name, "--k", "1", "20", "--device", "cpu"]) == 0
        )
    capsys.readouterr()
    runs = judge_all([Path("runs/a"), Path("runs/b")])
    for run in runs:
        assert run.column == "top1@k=20"
        assert run.note is None
        assert run.accuracy == pytest.approx(next(m for m in run.record.metrics if m["params"]["k"] == 20)["value"])
    text = said(capsys, Path("runs/a"), Path("runs/b"), classes=3)
    assert f"{runs[1].accuracy:.2f}" in text
