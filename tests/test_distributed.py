from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ibot_eval import distributed
from ibot_eval.errors import ConfigError, DataError
from tests.ranks import run_ranks

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def message(function: Callable[[], object]) -> str | None:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Odd(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, a: str, b: int) -> None:
        super().__init__(a)


def collectives(order: str) -> dict[str, Any]:
    """What every collective gives on this rank; in one function, since starting ranks takes a second."""
    d = distributed
    device = d.init("cpu")
    r, w = d.rank(), d.world_size()
    last = r == w - 1
    out: dict[str, Any] = {"rank": r, "world": w, "main": d.is_main(), "local": d.local_world_size()}
    out["device"] = str(device)
    out["objects"] = d.gather_objects({"r": r})
    out["broadcast"] = d.broadcast_object(f"from {r}")

    rows = torch.arange(10 * 3, dtype=torch.float64).reshape(10, 3).exp2().to(torch.bfloat16)
    mine = torch.arange(r, 10, w).flip(0)
    got = d.gather_rows(rows[mine], mine, 10)
    out["rows"] = got.dtype == torch.bfloat16 and torch.equal(got, rows)
    nan = torch.tensor([float("nan"), -0.0, 1e-45] + [0.0] * 7)
    got = d.gather_rows(nan[mine], mine, 10)
    out["bits"] = torch.equal(got.view(torch.int32), nan.view(torch.int32))
    ints = torch.arange(10) * 2**40
    out["ints"] = d.gather_rows(ints[mine], mine, 10).tolist() == ints.tolist()
    flags = torch.arange(10) % 3 == 0
    out["flags"] = d.gather_rows(flags[mine], mine, 10).tolist() == flags.tolist()

    # Everything on the last rank, the others bring nothing of the right kind.
    part, where = (rows, torch.arange(10)) if last else (torch.empty(0), torch.empty(0, dtype=torch.int64))
    got = d.gather_rows(part, where, 10)
    out["empty"] = got.dtype == torch.bfloat16 and torch.equal(got, rows)
    out["nothing"] = list(d.gather_rows(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), 0).shape)
    out["wide"] = list(d.gather_rows(torch.empty(len(mine), 0), mine, 10).shape)

    out["double"] = message(lambda: d.gather_rows(rows[:1], torch.tensor([0]), 1))
    out["missing"] = message(lambda: d.gather_rows(rows[mine], mine, 11))
    out["outside"] = message(lambda: d.gather_rows(rows[mine], mine + 5, 10))
    out["kinds"] = message(lambda: d.gather_rows(rows[mine].to(torch.float32 if last else torch.float64), mine, 10))

    errors: list[Exception | None] = [None] * w
    errors[-1] = DataError("broken", where="last rank")
    out["agree"] = message(lambda: d.agree(errors[r]))
    out["no error"] = message(lambda: d.agree(None))
    out["odd"] = message(lambda: d.agree(Odd("cannot travel", 1) if last else None))
    out["from_main"] = d.from_main(lambda: [r, "main"])
    out["from_main error"] = message(lambda: d.from_main(lambda: 1 / 0))
    out["everywhere"] = message(lambda: d.everywhere(lambda: 1 / (0 if last else 1)))
    out["own"] = d.everywhere(lambda: r * 10)

    with d.main_first(), open(order, "a") as file:
        file.write(str(r))
    out["order"] = d.from_main(lambda: Path(order).read_text())

    def fails_on(chosen: bool, what: str) -> None:
        with d.main_first():
            if chosen:
                raise DataError(what)

    out["main fails"] = message(lambda: fails_on(d.is_main(), "no network"))
    out["last fails"] = message(lambda: fails_on(last, "disk full"))
    d.barrier()
    d.shutdown()
    out["after"] = [d.rank(), d.world_size()]
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_collectives(world, tmp_path):
    done = run_ranks(world, collectives, str(tmp_path / "order"))
    for rank, out in enumerate(done):
        assert (out["rank"], out["world"], out["local"], out["device"]) == (rank, world, world, "cpu")
        assert out["main"] == (rank == 0)
        assert out["objects"] == [{"r": r} for r in range(world)]
        assert out["broadcast"] == "from 0"
        assert all(out[name] for name in ("rows", "bits", "ints", "flags", "empty"))
        assert out["nothing"] == [0, 4]
        assert out["wide"] == [10, 0]
        assert "given" in out["double"]
        assert out["missing"].startswith("ValueError: 1 of 11 rows are missing or double; the first is 10")
        assert "index 1" in out["outside"]
        assert "different kinds" in out["kinds"]
        assert out["agree"] == "DataError: broken\n  where: last rank"
        assert out["no error"] is None
        assert "cannot travel" in out["odd"]
        assert out["from_main"] == [0, "main"]
        assert out["from_main error"] == out["everywhere"] == "ZeroDivisionError: division by zero"
        assert out["own"] == rank * 10
        assert out["order"][0] == "0"
        assert sorted(out["order"]) == [str(r) for r in range(world)]
        assert out["main fails"] == "DataError: no network"
        assert out["last fails"] == "DataError: disk full"
        assert out["after"] == [0, 1]


@pytest.fixture
def alone(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_needs_no_group(alone):
    assert distributed.init("cpu") == torch.device("cpu")
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    distributed.barrier()
    distributed.agree(None)
    assert distributed.broadcast_object("x") == "x"
    assert distributed.from_main(lambda: 3) == distributed.everywhere(lambda: 3) == 3
    with distributed.main_first():
        pass
    distributed.shutdown()
    with pytest.raises(DataError, match="gone"), distributed.main_first():
        raise DataError("gone")


def test_rows_of_one_process_are_put_in_order():
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    got = distributed.gather_rows(rows, torch.tensor([2, 0, 1]), 3)
    assert got.tolist() == [[2.0], [3.0], [1.0]]
    with pytest.raises(ValueError, match="2 of 3 rows are missing or double; the first is 0, given 2 times"):
        distributed.gather_rows(rows, torch.tensor([2, 0, 0]), 3)
    with pytest.raises(ValueError, match="3 rows with 2 indices"):
        distributed.gather_rows(rows, torch.tensor([2, 0]), 3)
    with pytest.raises(ValueError, match="index -1 is outside"):
        distributed.gather_rows(rows, torch.tensor([0, 1, -1]), 3)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:1", "", "tpu"])
def test_unknown_devices(alone, device):
    with pytest.raises(ConfigError, match="unknown device"):
        distributed.init(device)


def test_absent_devices(alone):
    alone.setattr(torch.cuda, "is_available", lambda: False)
    alone.setattr(torch.backends.mps, "is_available", lambda: False)
    assert distributed.init("auto") == torch.device("cpu")
    for device in ("cuda", "cuda:1", "mps"):
        with pytest.raises(ConfigError, match=f"--device {device} was asked for"):
            distributed.init(device)


def test_gpus_are_shared_out(alone):
    taken = []
    alone.setattr(torch.cuda, "is_available", lambda: True)
    alone.setattr(torch.cuda, "device_count", lambda: 2)
    alone.setattr(torch.cuda, "set_device", taken.append)
    assert distributed.init("auto") == torch.device("cuda:0")
    assert distributed.init("cuda:1") == torch.device("cuda:1")
    assert taken == [torch.device("cuda:0"), torch.device("cuda:1")]
    with pytest.raises(ConfigError, match="no GPU 2 on this machine: it has 2"):
        distributed.init("cuda:2")
    for name, value in {"RANK": 2, "WORLD_SIZE": 3, "LOCAL_RANK": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        alone.setenv(name, str(value))
    with pytest.raises(ConfigError, match="no GPU 2") as error:
        distributed.init("cuda")
    assert "at most 2 processes" in str(error.value)
    with pytest.raises(ConfigError, match="3 processes on one GPU"):
        distributed.init("cuda:0")


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
    ],
)
def test_incomplete_environments(alone, variables):
    for name, value in variables.items():
        alone.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        distributed.init("cpu")
    assert "torchrun" in str(error.value)


def test_a_world_of_one_is_one_process(alone):
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", "1")
    assert distributed.init("cpu") == torch.device("cpu")
    assert not torch.distributed.is_initialized()
