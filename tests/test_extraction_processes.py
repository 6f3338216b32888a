"""Extraction by several processes, together, at once or one after a killed one."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ibot_eval import distributed
from ibot_eval.cache import BankCache
from ibot_eval.errors import UserError
from ibot_eval.extraction import extract_banks
from ibot_eval.features import FeatureRequest
from tests.fakes import TRANSFORM, FakeBackbone, FakeSplit, fake_loaded
from tests.ranks import Running, run_ranks

REQUESTS = [FeatureRequest("train"), FeatureRequest("train", 0, "none", "patches")]


def extraction(
    folder: str,
    *,
    n: int = 10,
    bad: Sequence[int] = (),
    cacheable: bool = True,
    on: int | None = None,
    network: dict[str, Any] | None = None,
    sha256: str = "a" * 64,
) -> dict[str, Any]:
    """Extracts ``REQUESTS``; network and sha256 hold on rank ``on`` only, if given."""
    device = distributed.init("cpu")
    mine = on in (None, distributed.rank())
    backbone = FakeBackbone(**(network or {}) if mine else {})
    out: dict[str, Any] = {}
    try:
        banks, stats = extract_banks(
            REQUESTS,
            fake_loaded(backbone, sha256=sha256 if mine else "a" * 64),
            {"train": FakeSplit(n, bad=bad)},
            TRANSFORM,
            BankCache(folder),
            device=device,
            batch_size=2,
            workers=0,
            bad_images="skip",
            progress=False,
            cacheable=cacheable,
        )
        out = {"images": stats.images, "reused": stats.reused, "skipped": stats.skipped["train"]}
        out["features"] = [banks[request].features.tolist() for request in REQUESTS]
    except UserError as error:
        out["error"] = str(error)
    distributed.shutdown()
    return {**out, "own": backbone.forwarded}


def in_process(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return extraction(str(folder), **settings)


def files(folder) -> dict[str, bytes]:
    """Contents of all banks; the manifest, which holds the time, apart."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("banks/*/*") if p.name != "manifest.json"}


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_make_the_same_banks_as_one_process(world, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    alone = extraction(str(one), bad=[3])
    ranks = run_ranks(world, in_process, many, {"bad": [3]})
    assert files(one) == files(many)
    assert len(files(one)) == 6
    for out in ranks:
        assert (out["images"], out["reused"], out["skipped"]) == (9, 0, ["train/003.png"])
        assert out["features"] == alone["features"]
        assert 0 < out["own"] < 9, "every rank does a part"
    assert sum(out["own"] for out in ranks) == 9
    assert not list(many.glob("partial/*"))


def test_ranks_without_a_cache(tmp_path):
    alone = extraction(str(tmp_path / "one"))
    ranks = run_ranks(2, in_process, tmp_path / "many", {"cacheable": False})
    assert [out["features"] for out in ranks] == [alone["features"]] * 2
    assert not (tmp_path / "many").exists()


def test_an_error_on_one_rank_reaches_all(tmp_path):
    ranks = run_ranks(3, in_process, tmp_path, {"on": 1, "network": {"nan_at": 0}}, timeout=30)
    assert [("NaN" in out["error"], "train/002.png" in out["error"]) for out in ranks] == [(True, True)] * 3
    assert not any(info.complete for info in BankCache(tmp_path).ls())


def test_ranks_with_different_checkpoints_are_refused(tmp_path):
    ranks = run_ranks(2, in_process, tmp_path, {"on": 1, "sha256": "b" * 64}, timeout=30)
    assert ["rank 1 differs from rank 0 in checkpoint," in out.get("error", "") for out in ranks] == [True, True]
    assert [out["own"] for out in ranks] == [0, 0]


def test_a_killed_extraction_resumes(tmp_path):
    killed = Running(in_process, tmp_path, {"n": 20, "network": {"kill_after": 12}}).done()
    assert killed.code == -signal.SIGKILL
    assert not any(info.complete for info in BankCache(tmp_path).ls())
    again = extraction(str(tmp_path), n=20)
    # It died in its seventh pass of two images.
    assert again["images"] == again["own"] == 20 - 12
    assert again["features"] == extraction(str(tmp_path / "whole"), n=20)["features"]


def test_two_processes_do_the_work_once(tmp_path):
    slow = {"network": {"seconds_per_pass": 0.3}}
    both = [Running(in_process, tmp_path, slow) for _ in range(2)]
    done = [process.done() for process in both]
    assert [one.code for one in done] == [0, 0], done
    done.sort(key=lambda one: one.value["own"])
    waited, worked = done
    assert (waited.value["images"], waited.value["own"], waited.value["reused"]) == (0, 0, 2)
    assert (worked.value["images"], worked.value["own"]) == (10, 10)
    assert waited.value["features"] == worked.value["features"]
    assert "waiting for another process" in waited.stderr
    assert worked.stderr == ""


def test_who_waits_takes_over_from_the_killed(tmp_path):
    locked = tmp_path / "locks"
    first = Running(in_process, tmp_path, {"network": {"seconds_per_pass": 0.5, "kill_after": 6}})
    while not list(locked.glob("*")) and first.process.is_alive():
        time.sleep(0.02)
    second = Running(in_process, tmp_path, {}).done()
    assert first.done().code == -signal.SIGKILL
    assert "waiting for another process" in second.stderr
    assert second.value["images"] == 10 - 6


def test_different_requests_of_one_split_do_not_disturb_each_other(tmp_path):
    """The second process finds one bank made, and makes only the other."""
    extract_banks(
        REQUESTS[:1],
        fake_loaded(),
        {"train": FakeSplit(10)},
        TRANSFORM,
        BankCache(tmp_path),
        device=torch.device("cpu"),
        batch_size=2,
        workers=0,
        progress=False,
    )
    second = Running(in_process, tmp_path, {}).done()
    assert (second.value["reused"], second.value["images"]) == (1, 10)
    assert second.value["features"] == extraction(str(tmp_path / "alone"))["features"]
