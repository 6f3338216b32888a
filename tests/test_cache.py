from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ibot_eval.bank_writer import Shard, npy_header, shards
from ibot_eval.cache import BankCache, bank_key
from ibot_eval.errors import CacheError, CheckpointError, ConfigError, DataError

SOURCE = {
    "checkpoint": {"sha256": "ab", "key": "teacher", "overrides": {}},
    "atom": {"block": 2, "norm": "published", "reducer": "cls"},
    "split": "val",
}
ABOUT = {"checkpoint": "a.pth", "data": "/data/val"}
LABELS = np.array([0, 1, 2, 0, 1])
IDS = [f"val/{i}.png" for i in range(5)]
PARTS = [Shard(0, 2), Shard(2, 4), Shard(4, 5)]
ROWS = np.arange(15, dtype=np.float32).reshape(5, 3)


def make(cache: BankCache, source: dict = SOURCE, skipped: dict[int, str] | None = None) -> str:
    skipped = skipped or {}
    key = bank_key(source)
    writer = cache.writer(key, source, ABOUT)
    writer.begin()
    for part in PARTS:
        kept = [i for i in range(*part) if i not in skipped]
        writer.put(part, ROWS[kept], [(i, skipped[i]) for i in range(*part) if i in skipped])
    writer.finish(PARTS, LABELS, IDS)
    return key


@pytest.fixture
def cache(tmp_path) -> BankCache:
    return BankCache(tmp_path)


def test_the_root(tmp_path, monkeypatch):
    monkeypatch.setenv("IBOT_EVAL_CACHE", str(tmp_path / "a"))
    assert BankCache().root == tmp_path / "a"
    assert BankCache(tmp_path / "b").root == tmp_path / "b"
    monkeypatch.delenv("IBOT_EVAL_CACHE")
    assert BankCache().root == Path.home() / ".cache" / "ibot-eval"
    assert not (tmp_path / "a").exists()


def test_keys_depend_on_everything():
    assert bank_key(SOURCE) == bank_key(dict(reversed(SOURCE.items())))
    others = [
        SOURCE | {"split": "train"},
        SOURCE | {"atom": SOURCE["atom"] | {"block": 1}},
        SOURCE | {"checkpoint": SOURCE["checkpoint"] | {"overrides": {"heads": 3}}},
        SOURCE | {"extra": None},
    ]
    assert len({bank_key(s) for s in [SOURCE, *others]}) == 5


def test_what_is_written_is_read_back(cache):
    key = make(cache)
    bank = cache.open(key)
    assert bank is not None
    assert isinstance(bank.features, np.memmap)
    assert bank.features.dtype == np.float32
    np.testing.assert_array_equal(bank.features, ROWS)
    np.testing.assert_array_equal(np.load(cache.root / "banks" / key / "features.npy"), ROWS)
    assert bank.labels.dtype == np.int64
    assert bank.labels.tolist() == LABELS.tolist()
    assert list(bank.image_ids) == IDS
    assert bank.manifest["source"] == SOURCE
    assert bank.manifest["skipped"] == []
    assert not (cache.root / "partial" / key).exists()
    assert cache.verify() == []


def test_what_a_killed_process_left_is_cleared_away(cache):
    folder = cache.root / "banks" / bank_key(SOURCE)
    folder.mkdir(parents=True)
    (folder / ".features.npy.123-abcd.tmp").write_bytes(b"half")
    make(cache)
    assert sorted(p.name for p in folder.iterdir()) == ["features.npy", "ids.json", "labels.npy", "manifest.json"]


def test_skipped_images_are_left_out_and_told(cache):
    bank = cache.open(make(cache, skipped={1: "cut short", 4: "not an image"}))
    assert bank is not None
    np.testing.assert_array_equal(bank.features, ROWS[[0, 2, 3]])
    assert bank.labels.tolist() == [0, 2, 0]
    assert list(bank.image_ids) == ["val/0.png", "val/2.png", "val/3.png"]
    assert bank.manifest["skipped"] == [["val/1.png", "cut short"], ["val/4.png", "not an image"]]


def test_no_image_left_is_an_error(cache):
    with pytest.raises(DataError, match="none of the 5 images of split 'val'"):
        make(cache, skipped=dict.fromkeys(range(5), "empty file"))


def test_half_precision_and_indices_keep_their_kind(cache):
    for name, rows in {"patches": ROWS.astype(np.float16).reshape(5, 1, 3, 1), "indices": np.arange(5)}.items():
        source = SOURCE | {"atom": name}
        writer = cache.writer(bank_key(source), source, ABOUT)
        writer.put(Shard(0, 5), rows, [])
        writer.finish([Shard(0, 5)], LABELS, IDS)
        bank = cache.open(bank_key(source))
        assert bank is not None
        assert bank.features.dtype == rows.dtype
        np.testing.assert_array_equal(bank.features, rows)


def test_a_writer_refuses_a_key_that_is_not_the_hash(cache):
    with pytest.raises(ValueError, match="hash"):
        cache.writer("0" * 64, SOURCE, ABOUT)


def test_unfinished_banks_are_not_read(cache):
    assert cache.open(bank_key(SOURCE)) is None
    key = make(cache)
    manifest = cache.root / "banks" / key / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[: len(text) // 2])
    assert cache.open(key) is None
    manifest.unlink()
    assert cache.open(key) is None
    assert not cache.ls()[0].complete


def damage_features(folder: Path) -> None:
    with open(folder / "features.npy", "r+b") as file:
        file.truncate(100)


def damage_ids(folder: Path) -> None:
    (folder / "ids.json").unlink()


def damage_key(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["source"]["atom"]["block"] = 1
    (folder / "manifest.json").write_text(json.dumps(manifest))


def damage_format(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


def damage_shape(folder: Path) -> None:
    np.save(folder / "features.npy", ROWS.reshape(3, 5))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_features, "features.npy has 100 bytes instead of"),
        (damage_ids, "ids.json has 0 bytes instead of"),
        (damage_key, "manifest belongs to another bank"),
        (damage_format, "format is 99"),
        (damage_shape, "where the manifest says"),
    ],
)
def test_a_mismatch_is_an_error_that_says_what_to_do(cache, damage, message):
    key = make(cache)
    damage(cache.root / "banks" / key)
    with pytest.raises(CacheError, match=message) as error:
        cache.open(key)
    assert f"ibot-eval cache rm {key[:12]}" in str(error.value)
    assert cache.verify() or damage is damage_shape
    cache.rm([key[:12]])
    assert cache.open(key) is None


def test_a_folder_under_another_name_is_an_error(cache):
    key = make(cache)
    (cache.root / "banks" / key).rename(cache.root / "banks" / ("0" * 64))
    with pytest.raises(CacheError, match="another bank"):
        cache.open("0" * 64)


def test_verify_finds_a_changed_byte(cache):
    key, other = make(cache), make(cache, SOURCE | {"split": "train"})
    path = cache.root / "banks" / key / "features.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cache.open(key) is not None
    (found,) = cache.verify()
    assert (found.key, found.file) == (key, "features.npy")
    assert str(found).startswith(key[:12])
    assert cache.verify([other]) == []


def test_shards_that_are_not_whole_do_not_count(cache):
    writer = cache.writer(bank_key(SOURCE), SOURCE, ABOUT)
    part = Shard(0, 2)
    assert not writer.has(part)
    writer.put(part, ROWS[:2], [])
    assert writer.has(part)
    (path,) = writer.partial.glob("shard-*.npy")
    whole = path.read_bytes()
    for cut in (0, 5, 40, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert not writer.has(part)
    writer.put(part, ROWS[:1], [])
    assert not writer.has(part)
    writer.put(part, ROWS[:1], [(1, "cut short")])
    assert writer.has(part)
    assert not writer.has(part, allow_skipped=False)
    assert writer.skipped(part) == [(1, "cut short")]
    writer.put(part, ROWS[:2], [])
    assert writer.skipped(part) == []


def test_a_missing_shard_is_an_error(cache):
    writer = cache.writer(bank_key(SOURCE), SOURCE, ABOUT)
    writer.put(PARTS[0], ROWS[:2], [])
    with pytest.raises(CacheError, match="2 of 3 shards") as error:
        writer.finish(PARTS, LABELS, IDS)
    assert "shared disk" in str(error.value)
    assert cache.open(writer.key) is None


def test_shards_of_different_kinds_do_not_fit(cache):
    writer = cache.writer(bank_key(SOURCE), SOURCE, ABOUT)
    for part, rows in zip(PARTS, (ROWS[:2], ROWS[2:4, :2], ROWS[4:]), strict=True):
        writer.put(part, rows, [])
    with pytest.raises(CacheError, match="do not fit together"):
        writer.finish(PARTS, LABELS, IDS)


@pytest.mark.parametrize(("n", "batch"), [(1, 64), (10, 2), (1500, 64), (1_281_167, 64), (1000, 3), (5000, 4096)])
def test_shards_are_whole_batches(n, batch):
    parts = shards(n, batch, 1536)
    assert parts[0].start == 0
    assert parts[-1].stop == n
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    assert all(p.start % batch == 0 and 0 < p.stop - p.start <= max(1024, batch) for p in parts)


def test_shards_are_bounded_in_bytes():
    patches = 1369 * 1024 * 2  # ViT-L/14 at 518 pixels
    parts = shards(1_281_167, 64, patches)
    assert parts[0] == (0, 64)
    assert shards(1_281_167, 16, patches)[0] == (0, 80), "five batches of 16 fit into 256 MiB"
    assert shards(1_281_167, 64, 0)[0] == (0, 1024)


def test_a_full_disk_leaves_nothing_that_looks_whole(cache, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    writer = cache.writer(bank_key(SOURCE), SOURCE, ABOUT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CacheError, match="No space left") as error:
            writer.put(PARTS[0], ROWS[:2], [])
    assert "--cache" in str(error.value)
    assert not writer.has(PARTS[0])
    assert not list(writer.partial.glob("*"))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write to the feature cache"):
        make(BankCache(tmp_path / "file"))


def test_ls_tells_what_banks_are(cache):
    assert cache.ls() == []
    key = make(cache)
    other = SOURCE | {"split": "train"}
    writer = cache.writer(bank_key(other), other, ABOUT)
    writer.begin()
    writer.put(PARTS[0], ROWS[:2], [])
    infos = {info.key: info for info in cache.ls()}
    done, unfinished = infos[key], infos[writer.key]
    assert (done.n, done.dim, done.complete, done.split) == (5, 3, True, "val")
    assert (done.block, done.norm, done.reducer) == (2, "published", "cls")
    assert (done.checkpoint, done.data) == ("a.pth", "/data/val")
    assert done.bytes == sum(p.stat().st_size for p in (cache.root / "banks" / key).iterdir())
    assert (unfinished.n, unfinished.complete, unfinished.split) == (0, False, "train")
    assert unfinished.bytes > 0


def test_rm(cache):
    keys = [make(cache, SOURCE | {"split": name}) for name in ("a", "b", "c")]
    with pytest.raises(ConfigError, match="which banks"):
        cache.rm()
    with pytest.raises(CacheError, match="no feature bank") as error:
        cache.rm(["zzz"])
    assert "cache ls" in str(error.value)
    with pytest.raises(CacheError, match="begin with ''"):
        cache.rm([""])
    assert [info.key for info in cache.rm([keys[0][:10]])] == [keys[0]]
    assert cache.rm(older_than=timedelta(hours=1)) == []
    assert {info.key for info in cache.ls()} == set(keys[1:])
    assert {info.key for info in cache.rm(everything=True)} == set(keys[1:])
    assert cache.ls() == []


def test_a_bank_in_the_making_is_not_removed(cache):
    key = make(cache)
    with cache.lock([key]), pytest.raises(CacheError, match="just now"):
        cache.rm([key])
    assert cache.open(key) is not None


def test_mapped_banks_outlive_their_removal(cache):
    bank = cache.open(key := make(cache))
    assert bank is not None
    cache.rm([key])
    np.testing.assert_array_equal(bank.features, ROWS)


def test_a_bank_removed_while_it_is_opened_is_no_damage(cache, monkeypatch):
    key = make(cache)
    load = np.load

    def removed_meanwhile(path: Path, **settings: Any) -> np.ndarray:
        if path.name == "labels.npy":
            BankCache(cache.root).rm([key])
        return load(path, **settings)

    monkeypatch.setattr("ibot_eval.cache.np.load", removed_meanwhile)
    assert cache.open(key) is None


def test_the_lock_waits_and_says_so(cache, capfd):
    order = []

    def second() -> None:
        with cache.lock(["b", "a"]):
            order.append("second")

    with cache.lock(["b", "c"]):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(timeout=10)
    assert order == ["first", "second"]
    assert capfd.readouterr().err.count("waiting for another process") == 1


def test_the_lock_of_a_dead_process_is_free(cache):
    code = (
        "import os, signal, sys\n"
        "from ibot_eval.cache import BankCache\n"
        "with BankCache(sys.argv[1]).lock(['a']):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(cache.root)], check=False).returncode == -9
    begin = time.perf_counter()
    with cache.lock(["a"]):
        assert time.perf_counter() - begin < 1


def aged(path: Path, seconds: float = 100) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_checkpoint_hashes_are_remembered(cache, tmp_path, monkeypatch):
    path = tmp_path / "a.pth"
    path.write_bytes(b"weights")
    aged(path)
    expected = hashlib.sha256(b"weights").hexdigest()
    assert cache.remembered_sha256(path) == expected
    with monkeypatch.context() as patch:
        patch.setattr("ibot_eval.cache.sha256_file", lambda path: pytest.fail("hashed again"))
        assert BankCache(cache.root).remembered_sha256(str(path)) == expected
    path.write_bytes(b"changed")
    aged(path, 50)
    assert cache.remembered_sha256(path) == hashlib.sha256(b"changed").hexdigest()
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"another")
    os.utime(path, ns=times)
    assert cache.remembered_sha256(path) == hashlib.sha256(b"another").hexdigest(), "same size, time restored"
    other = tmp_path / "b.pth"
    other.write_bytes(b"other")
    aged(other)
    cache.remembered_sha256(other)
    assert len(json.loads((cache.root / "checkpoints.json").read_text())) == 2


def test_a_file_written_just_now_is_not_remembered(cache, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(b"weights")
    assert cache.remembered_sha256(path) == hashlib.sha256(b"weights").hexdigest()
    assert not (cache.root / "checkpoints.json").exists()


def test_a_damaged_memory_is_forgotten(cache, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(b"weights")
    aged(path)
    for text in ("{", "[]", json.dumps({str(path): "x"}), json.dumps({str(path): {"size": 7}})):
        (cache.root / "checkpoints.json").write_text(text)
        assert cache.remembered_sha256(path) == hashlib.sha256(b"weights").hexdigest()


def test_a_missing_checkpoint(cache, tmp_path):
    with pytest.raises(CheckpointError, match=r"missing\.pth"):
        cache.remembered_sha256(tmp_path / "missing.pth")


def test_npy_header_agrees_with_numpy(tmp_path):
    path = tmp_path / "x.npy"
    for array in (ROWS, np.zeros((0, 4), np.float16), np.arange(3)):
        np.save(path, array)
        shape, dtype, offset = npy_header(path)
        assert (shape, dtype) == (array.shape, array.dtype)
        assert offset + array.nbytes == path.stat().st_size
    np.save(path, np.asfortranarray(ROWS))
    with pytest.raises(ValueError, match="C order"):
        npy_header(path)


@pytest.mark.parametrize(
    "change",
    [
        {"created": "yesterday"},
        {"created": 5},
        {"source": 1},
        {"about": []},
        {"shape": "x"},
        {"n": "many"},
        {"files": 3},
    ],
    ids=str,
)
def test_a_spoilt_manifest_keeps_no_bank_from_being_listed_and_removed(cache, change):
    key, other = make(cache), make(cache, SOURCE | {"split": "train"})
    path = cache.root / "banks" / key / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert {info.key for info in cache.ls()} == {key, other}
    cache.verify([key, other])
    cache.rm([key])
    assert {info.key for info in cache.ls()} == {other}


def test_the_command_that_removes_a_bank_names_the_cache_where_it_is_not_the_usual_one(cache, monkeypatch):
    assert cache.removal("0123456789abcdef") == f"`ibot-eval cache rm 0123456789ab --cache {cache.root}`"
    monkeypatch.setenv("IBOT_EVAL_CACHE", str(cache.root))
    assert cache.removal("0123456789abcdef") == "`ibot-eval cache rm 0123456789ab`"
