"""Runs that go on while their images were moved, removed or damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ibot_eval.record import EvalRecord
from ibot_eval.training.logs import read_log
from tests import images
from tests.pretraining import FLAGS, run

PHOTOS = [*FLAGS, "--data", "photos", "--train-split", ".", "--batch-size", "4", "--epochs", "3", "--log-every", "1"]
del PHOTOS[PHOTOS.index("--train-per-class") : PHOTOS.index("--train-per-class") + 2]
"""Two steps in an epoch."""
AGAIN = [*PHOTOS, "--name", "run", "--resume", "auto"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds photos and a run that has done one epoch of three."""
    folder = tmp_path_factory.mktemp("begun")
    for i in range(8):
        images.save(folder / "photos" / f"{i}.png", images.picture(16, 16, seed=i))
    done = run(folder, *PHOTOS, "--name", "run", "--stop-after", "1")
    assert done["code"] == 0, done["stderr"]
    record = EvalRecord.load(folder / "runs" / "run")
    assert record.status == "interrupted"
    assert record.error is not None
    assert record.error["kind"] == "Stopped"
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "copy"))


def test_other_images_are_refused_and_nothing_is_written(folder: Path) -> None:
    (folder / "photos" / "7.png").unlink()
    before = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    done = run(folder, *AGAIN)
    assert done["code"] == 2
    assert "started on 8 images, and there are 7 now" in done["stderr"]
    assert {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()} == before


def test_images_that_were_moved(folder: Path) -> None:
    (folder / "photos").rename(folder / "elsewhere")
    done = run(folder, *AGAIN, "--data", "elsewhere", "--stop-after", "2")
    assert done["code"] == 0, done["stderr"]
    assert "resumed after step 2 of 6" in done["stderr"]
    # The names tell, whatever the number.
    (folder / "elsewhere" / "7.png").rename(folder / "elsewhere" / "8.png")
    done = run(folder, *AGAIN, "--data", "elsewhere")
    assert done["code"] == 2
    assert "names" in done["stderr"]


def test_an_image_that_was_damaged(folder: Path) -> None:
    path = folder / "photos" / "3.png"
    path.write_bytes(path.read_bytes()[:100])
    done = run(folder, *AGAIN)
    assert done["code"] == 2
    assert "3.png" in done["stderr"]
    done = run(folder, *AGAIN, "--bad-images", "skip", "--stop-after", "2")
    assert done["code"] == 0, done["stderr"]
    assert told(folder) == ["1 times an image could not be decoded and another took its place (--bad-images skip)"]
    done = run(folder, *AGAIN, "--bad-images", "skip")
    assert done["code"] == 0, done["stderr"]
    # Once in each epoch since; what was counted before the second resumption counts.
    assert told(folder) == ["2 times an image could not be decoded and another took its place (--bad-images skip)"]
    assert done["stderr"].count("could not be decoded") == 1
    rows: list[dict[str, Any]] = read_log(folder / "runs" / "run" / "log.jsonl")
    assert [row["step"] for row in rows if "event" not in row] == [1, 2, 3, 4, 5, 6]


def told(folder: Path) -> list[str]:
    return [text for text in EvalRecord.load(folder / "runs" / "run").warnings if "could not be decoded" in text]
