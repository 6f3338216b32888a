from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

from ibot_eval.files import (
    atomic_open,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    canonical_json,
    sha256_file,
)


def test_writes_make_parents_and_replace(tmp_path):
    path = tmp_path / "a" / "b.txt"
    atomic_write_bytes(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    atomic_write_text(path, "naïve\r\n")
    assert path.read_bytes() == b"na\xc3\xafve\r\n"
    atomic_write_json(path, {"b": 1, "a": ["ü", None]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"b": 1, "a": ["ü", None]}
    assert os.listdir(path.parent) == ["b.txt"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")

    def fail() -> None:
        with atomic_open(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_killed_write_is_not_there(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from ibot_eval.files import atomic_open\n"
        "with atomic_open(sys.argv[1]) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "x").exists()


def test_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write_bytes(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_json_refuses_nan_and_keeps_odd_names(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match="JSON"):
        atomic_write_json(path, {"value": float("nan")})
    assert not path.exists()
    name = os.fsdecode(b"caf\xe9.jpg")
    atomic_write_json(path, [name])
    assert json.loads(path.read_bytes()) == [name]


def test_canonical_json_ignores_order_and_kind_of_sequence():
    assert canonical_json({"b": (1, 2.5), "a": "é"}) == canonical_json({"a": "é", "b": [1, 2.5]})
    assert canonical_json({"b": (1, 2.5), "a": None}) == '{"a":null,"b":[1,2.5]}'
    assert canonical_json(1) != canonical_json("1")


def test_sha256_of_a_large_file(tmp_path):
    data = b"0123456789" * 300_000
    (tmp_path / "x").write_bytes(data)
    assert sha256_file(tmp_path / "x") == hashlib.sha256(data).hexdigest()
