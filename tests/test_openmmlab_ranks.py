"""mmengine models trained and tested on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval.training.logs import read_log
from tests.ranks import run_ranks

pytest.importorskip("mmengine")

from protocols.openmmlab import configuration
from tests.dense_training import TESTS, described, on_ranks, run

ALIKE = {"model__norm": "none", "train_dataloader__batch_size": 2}
"""Nothing that ranks would draw or average on their own; two images on each of two ranks are four on one."""
BAD = {"train_dataloader__dataset": {"type": "TinyData", "bad": [3], "folder": "/nowhere"}}
CASES: dict[str, tuple[int | None, dict[str, Any]]] = {
    "alike": (None, ALIKE),
    "stopped": (6, ALIKE),
    "synced": (None, {"model__norm": "SyncBN"}),
    "synced-stopped": (6, {"model__norm": "SyncBN"}),
    "bad": (None, {**ALIKE, **BAD}),
    "skipped": (None, {**ALIKE, **BAD, "bad_images": "skip"}),
    "nan": (None, {**ALIKE, "model__scale": 1e300}),
    "few": (None, {**ALIKE, "train_dataloader__dataset": {"type": "TinyData", "images": 1}}),
    "told": (None, {**ALIKE, "model__idle": True, "find_unused_parameters": True}),
    "idle": (None, {**ALIKE, "model__idle": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Rank 0's results of all cases, by name; rank 1 has the same, but for what it replaced."""
    both = run_ranks(2, on_ranks, str(folder), CASES, timeout=240)
    assert both[0] == both[1]
    return both[0]


def test_two_processes_train_and_test_as_one(folder: Path, results: dict[str, Any], tmp_path: Path) -> None:
    """Batches of two on each, and of four; seven test images, of which one rank has four."""
    one = run(tmp_path, configuration.finish(described(model__norm="none")))
    assert results["alike"]["places"] == one.results["tiny/places"].tolist() == list(range(TESTS))
    np.testing.assert_allclose(results["alike"]["logits"], one.results["tiny/logits"], rtol=1e-4, atol=1e-6)
    assert results["alike"]["right"] == one.results["tiny/right"]
    steps = [row["step"] for row in read_log(folder / "alike" / "log.jsonl")]
    assert steps == [row["step"] for row in read_log(tmp_path / "log.jsonl")]


@pytest.mark.parametrize("name", ["alike", "synced"])
def test_a_signal_to_one_rank_stops_both(folder: Path, results: dict[str, Any], name: str) -> None:
    """And the run gone on with is the one that never stopped, with batch norm that ranks keep for themselves too."""
    stopped = "stopped" if name == "alike" else f"{name}-stopped"
    assert results[stopped].pop("said") == "stopped after iteration 6 of 14; the same command goes on from there"
    assert {**results[name], "said": ""} == {**results[stopped], "said": ""}
    one, other = (torch.load(folder / n / "model.pth", weights_only=True)["state_dict"] for n in (name, stopped))
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_errors_end_all_ranks(results: dict[str, Any]) -> None:
    assert results["bad"]["kind"] == "BadImage"
    assert "/nowhere/3.png" in results["bad"]["error"]
    # In each of four whole epochs and half of one more, and its place may be among the images left out.
    assert 1 <= results["skipped"]["replaced"] <= 5
    assert results["nan"] == {"kind": "NotFinite", "error": "the loss is NaN or infinite at step 1"}
    assert results["few"]["kind"] == "ConfigError"
    assert "fewer than the 2 processes" in results["few"]["error"]


def test_weights_without_a_part(results: dict[str, Any]) -> None:
    assert results["idle"]["kind"] == "ConfigError"
    assert "had no part" in results["idle"]["error"]
    assert results["told"]["places"] == list(range(TESTS))
