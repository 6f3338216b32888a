"""Runs on several ranks: what they compute, and what becomes of the others when one ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval.data.epochs import ORDER
from ibot_eval.record import EvalRecord
from ibot_eval.training.logs import read_log
from tests import images
from tests.interrupting import KILLED_IN, RUN, STEPS, assert_same_end, comparable, run_killed
from tests.pretraining import FLAGS, run
from tests.ranks import Running, run_ranks

ON_TWO = [*RUN, "--accumulate", "1", "--sharing", "semi-shared-2"]

"""As many images per step as :data:`RUN`."""
PLAIN = [*ON_TWO, "--drop-path", "0", "--lr", "0.02"]


PHOTOS = [*FLAGS, "--data", "photos", "--train-split", ".", "--epochs", "2", "--seed", "5"]
del PHOTOS[PHOTOS.index("--train-per-class") : PHOTOS.index("--train-per-class") + 2]
"""Two steps of two images on each rank make an epoch."""
BROKEN = int(np.random.default_rng((ORDER, 5, 0)).permutation(8)[6])
"""The image that rank 1 comes to first in the second step."""


def run_on_two(folder: str) -> list[dict[str, Any]]:
    return [
        run(folder, "--name", "whole", *ON_TWO),
        run(folder, "--name", "plain", *PLAIN),
        run(folder, "--name", "replaced", *PHOTOS, "--bad-images", "skip"),
    ]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds three runs of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    for i in range(8):
        path = images.save(folder / "photos" / f"{i}.png", images.picture(16, 16, seed=i))
        if i == BROKEN:
            path.write_bytes(path.read_bytes()[:100])
    for rank in run_ranks(2, run_on_two, str(folder), timeout=120):
        assert [one["code"] for one in rank] == [0, 0, 0], rank
    return folder


def test_two_ranks_do_what_one_does_with_a_batch_twice_as_large(two_ranks: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "--name", "one", *PLAIN, "--batch-size", "4")
    assert done["code"] == 0, done["stderr"]
    one, two = (
        torch.load(path / "checkpoints" / f"step_{STEPS:08d}.pt", weights_only=True)
        for path in (tmp_path / "runs" / "one", two_ranks / "runs" / "plain")
    )
    for name in ("cls.mean", "patch.mean"):
        torch.testing.assert_close(two["centres"][name], one["centres"][name], rtol=0, atol=1e-5)
    for role in ("student", "teacher"):
        for name, tensor in one[role].items():
            # A bias of keys has no effect, and its gradient is rounding.
            if not name.endswith("qkv.bias"):
                torch.testing.assert_close(
                    two[role][name], tensor, rtol=0, atol=1e-4, msg=lambda t, n=name: f"{n}: {t}"
                )
    rows = [
        [row for row in read_log(path / "log.jsonl") if "event" not in row]
        for path in (tmp_path / "runs" / "one", two_ranks / "runs" / "plain")
    ]
    for ours, theirs in zip(*rows, strict=True):
        for name in ("lr", "loss", "cls_loss", "patch_loss", "teacher_entropy", "kl", "gradient_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), (ours["step"], name)


def test_two_ranks_one_of_which_is_killed(two_ranks: Path, tmp_path: Path) -> None:
    """Killed, then continued by --launch local:2; against two ranks that were never stopped."""
    arguments = ON_TWO
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(free.getsockname()[1])
    step = min(KILLED_IN, STEPS - 1)
    ranks = [
        Running(run_killed, str(tmp_path), step, 1, "--name", "killed", *arguments, **world, RANK=r, LOCAL_RANK=r)
        for r in "01"
    ]
    done = [rank.done() for rank in ranks]
    assert done[1].code == -signal.SIGKILL
    assert done[0].code != -signal.SIGKILL, "the other rank must end by itself"
    assert done[0].code != 0 or done[0].value["code"] != 0
    resumed = ["--name", "killed", "--resume", "auto"]
    again = launched(tmp_path, *resumed, *arguments)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "runs" / "killed", two_ranks / "runs" / "whole")
    assert comparable(tmp_path / "runs" / "killed") == comparable(two_ranks / "runs" / "whole")
    assert EvalRecord.load(tmp_path / "runs" / "killed").environment["world_size"] == 2


def test_replaced_images_are_counted_over_ranks(two_ranks: Path) -> None:
    warnings = EvalRecord.load(two_ranks / "runs" / "replaced").warnings
    assert [text.split(" (")[0] for text in warnings if "decoded" in text] == [
        "2 times an image could not be decoded and another took its place"
    ]


def test_an_image_that_another_rank_cannot_decode(two_ranks: Path) -> None:
    done = launched(two_ranks, *PHOTOS, "--name", "broken", "--save-steps", "1")
    assert done.returncode == 2, done.stderr
    assert f"error on rank 1: cannot decode the image photos/{BROKEN}.png" in done.stderr
    assert "Traceback" not in done.stderr
    folder = two_ranks / "runs" / "broken"
    record = EvalRecord.load(folder)
    assert record.status == "error"
    assert record.error is not None
    assert record.error["message"].startswith("rank 1: ")
    assert f"{BROKEN}.png" in record.error["message"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000001.pt"]
    assert not list(folder.glob("error_of_rank_*"))


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ibot_eval", "pretrain", "--launch", "local:2", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
