from __future__ import annotations

import gc
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ibot_eval.bank_writer import BankWriter, Shard, shards
from ibot_eval.cache import BankCache
from ibot_eval.errors import BadImage, CacheError, ConfigError, DataError
from ibot_eval.extraction import default_workers, extract_banks
from ibot_eval.features import FeatureRequest, compose
from ibot_eval.files import atomic_write_json
from tests.fakes import DEPTH, TRANSFORM, WIDTH, FakeBackbone, FakeSplit, fake_images, fake_loaded

CPU = torch.device("cpu")
CLS = FeatureRequest("train")
MANY = [
    CLS,
    FeatureRequest("train", DEPTH - 1),
    FeatureRequest("train", 0, "none"),
    FeatureRequest("train", -1, "final", "patches"),
    FeatureRequest("train", -2, "published", "norm_patch_mean"),
    FeatureRequest("train", -1, "published", "topk:2"),
    FeatureRequest("train", -1, "published", "head_argmax"),
    FeatureRequest("test"),
]


@pytest.fixture
def cache(tmp_path) -> BankCache:
    return BankCache(tmp_path / "cache")


@pytest.fixture
def splits() -> dict[str, FakeSplit]:
    return {"train": FakeSplit(7), "test": FakeSplit(5, "val")}


def extract(requests, cache, splits, backbone=None, **settings):
    loaded = fake_loaded(backbone or FakeBackbone(), settings.pop("head", None), settings.pop("sha256", "a" * 64))
    settings = {"device": CPU, "batch_size": 2, "workers": 0, "progress": False, **settings}
    return extract_banks(requests, loaded, splits, settings.pop("transform", TRANSFORM), cache, **settings)


def test_features_are_those_of_the_network(cache, splits):
    banks, stats = extract([CLS], cache, splits)
    bank = banks[CLS]
    backbone = FakeBackbone().eval()
    with torch.inference_mode():
        expected = backbone.outputs(fake_images(splits["train"], range(7))).blocks[0].cls
    np.testing.assert_allclose(bank.features, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert bank.features.dtype == np.float32
    assert bank.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert list(bank.image_ids) == splits["train"].image_ids
    assert (stats.images, stats.reused, stats.skipped) == (7, 0, {"train": []})
    assert stats.images_per_second is not None
    assert stats.images_per_second > 0
    assert 0 < stats.peak_memory < 100


def test_one_pass_serves_all_requests(cache, splits):
    backbone = FakeBackbone()
    head = nn.Linear(WIDTH, 4)
    banks, stats = extract(MANY, cache, splits, backbone, head=head)
    assert backbone.forwarded == stats.images == 7 + 5
    assert backbone.passes == 4 + 3
    assert set(banks) == set(MANY)
    assert banks[MANY[0]] is banks[MANY[1]]
    assert banks[MANY[3]].features.shape == (7, 2, 2, WIDTH)
    assert banks[MANY[3]].features.dtype == np.float16
    assert banks[MANY[6]].features.dtype == np.int64
    assert len(cache.ls()) == 7
    for request in MANY:
        alone, _ = extract([request], BankCache(cache.root / "alone"), splits, head=head)
        np.testing.assert_array_equal(alone[request].features, banks[request].features)


def test_the_second_time_nothing_is_forwarded(cache, splits):
    first, _ = extract([CLS], cache, splits)
    backbone = FakeBackbone()
    requests = [CLS, FeatureRequest("train", 0)]
    second, stats = extract(requests, cache, splits, backbone)
    assert (stats.reused, stats.images, backbone.forwarded) == (1, 7, 7)
    np.testing.assert_array_equal(first[CLS].features, second[CLS].features)
    _, stats = extract(requests, BankCache(cache.root), splits, backbone)
    assert (stats.reused, stats.images, backbone.forwarded) == (2, 0, 7)
    assert stats.images_per_second is None


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "b" * 64},
        {"precision": "bf16"},
        {"transform": replace(TRANSFORM, resize=9)},
        {"transform": replace(TRANSFORM, mean=(0.0, 0.0, 0.0))},
        {"splits": {"train": FakeSplit(7, "other")}},
        {"splits": {"train": FakeSplit(6)}},
    ],
)
def test_old_features_are_never_used_for_something_else(cache, splits, change):
    extract([CLS], cache, splits)
    settings = {"splits": splits, **change}
    backbone = FakeBackbone()
    _, stats = extract([CLS], cache, settings.pop("splits"), backbone, **settings)
    assert stats.reused == 0
    assert backbone.forwarded > 0


def test_overrides_identity_and_the_resize_rule_are_part_of_the_key(cache, splits):
    loaded = fake_loaded()
    settings = {"device": CPU, "batch_size": 2, "workers": 0, "progress": False}
    seen = set()
    changes = [({}, {}, None), ({"heads": 3}, {}, None), ({}, {}, "size"), ({}, {"eps": 1e-5}, None)]
    for overrides, identity, resize in changes:
        loaded.report.overrides, loaded.report.identity, loaded.backbone.resize = overrides, identity, resize
        banks, _ = extract_banks([CLS], loaded, splits, TRANSFORM, cache, **settings)
        seen.add(banks[CLS].manifest["key"])
    assert len(seen) == 4


def test_reduced_precision_is_used_and_stored_as_float32(cache, splits):
    full, _ = extract([CLS], cache, splits)
    half, _ = extract([CLS], cache, splits, precision="bf16")
    assert half[CLS].features.dtype == np.float32
    difference = np.abs(full[CLS].features - half[CLS].features).max()
    assert 0 < difference < 0.3


def test_workers_change_nothing(cache, splits):
    here, _ = extract([CLS], cache, splits)
    there, _ = extract([CLS], BankCache(cache.root / "other"), splits, workers=2)
    np.testing.assert_array_equal(here[CLS].features, there[CLS].features)
    assert default_workers(CPU) == 1
    assert 1 <= default_workers(torch.device("cuda")) <= 8


def test_bad_images_stop_and_are_named(cache):
    splits = {"train": FakeSplit(7, bad=[4])}
    with pytest.raises(BadImage, match=r"train/004\.png"):
        extract([CLS], cache, splits)
    assert not any(info.complete for info in cache.ls())


def test_bad_images_can_be_skipped(cache):
    splits = {"train": FakeSplit(7, bad=[2, 3, 6])}
    banks, stats = extract([CLS], cache, splits, bad_images="skip")
    whole, _ = extract([CLS], BankCache(cache.root / "whole"), {"train": FakeSplit(7)})
    kept = [0, 1, 4, 5]
    np.testing.assert_array_equal(banks[CLS].features, whole[CLS].features[kept])
    assert list(banks[CLS].image_ids) == [f"train/{i:03d}.png" for i in kept]
    assert banks[CLS].labels.tolist() == [0, 1, 1, 2]
    assert stats.images == 4
    assert stats.skipped == {"train": ["train/002.png", "train/003.png", "train/006.png"]}
    _again, stats = extract([CLS], cache, splits, bad_images="skip")
    assert (stats.images, stats.skipped["train"][0]) == (0, "train/002.png")
    # A bank that lacks images is not passed off as a whole one.
    with pytest.raises(DataError, match=r"3 images .* train/002\.png, train/003\.png, train/006\.png"):
        extract([CLS], cache, splits)


def test_shards_with_skipped_images_are_not_taken_for_whole_ones(cache):
    dying = FakeBackbone(nan_at=1)
    with pytest.raises(DataError, match="NaN"):
        # Batch 0 holds only one image, batch 1 two of which the second is NaN.
        extract([CLS], cache, {"train": FakeSplit(7, bad=[1])}, dying, bad_images="skip")
    with pytest.raises(BadImage, match=r"train/001\.png"):
        extract([CLS], cache, {"train": FakeSplit(7, bad=[1])})
    _, stats = extract([CLS], cache, {"train": FakeSplit(7, bad=[1])}, bad_images="skip")
    assert stats.images == 5, "the shard with the skipped image was there already"


def test_all_images_bad(cache):
    with pytest.raises(DataError, match="none of the 3 images"):
        extract([CLS], cache, {"train": FakeSplit(3, bad=range(3))}, bad_images="skip")


def test_banks_that_leave_out_different_images_are_not_mixed(cache):
    other = FeatureRequest("train", 0)
    extract([CLS], cache, {"train": FakeSplit(7, bad=[1])}, bad_images="skip")
    extract([other], cache, {"train": FakeSplit(7)}, bad_images="skip")
    with pytest.raises(CacheError, match="leave out different images"):
        extract([CLS, other], cache, {"train": FakeSplit(7)}, bad_images="skip")


@pytest.mark.parametrize("request_", [CLS, FeatureRequest("train", -1, "published", "patches")])
def test_features_that_are_not_finite_are_named(cache, splits, request_):
    with pytest.raises(DataError) as error:
        extract([request_], cache, splits, FakeBackbone(nan_at=1))
    text = str(error.value)
    assert "train/001.png" in text
    assert "train/000.png" not in text
    assert f"block {DEPTH - 1} ({request_.reducer})" in text
    assert cache.ls()[0].complete is False


def test_an_argmax_of_nan_is_an_error(cache, splits):
    request = FeatureRequest("train", reducer="head_argmax")
    with pytest.raises(DataError, match=r"head_argmax.*train/001\.png"):
        extract([request], cache, splits, FakeBackbone(nan_at=1), head=nn.Linear(WIDTH, 3))


def test_patches_beyond_half_precision_are_an_error(cache, splits):
    request = FeatureRequest("train", -1, "none", "patches")
    with pytest.raises(DataError, match="65504"):
        extract([request], cache, splits, FakeBackbone(scale=1e6))


@pytest.mark.parametrize(
    ("request_", "settings", "message"),
    [
        (FeatureRequest("train", 7), {}, "block 7 does not exist"),
        (FeatureRequest("train", reducer="head_argmax"), {}, "projection head"),
        (FeatureRequest("train", reducer="topk:5"), {}, "grid is 2x2 = 4"),
        (CLS, {"batch_size": 0}, "--batch-size 0"),
        (CLS, {"workers": -1}, "--workers -1"),
    ],
)
def test_requests_that_cannot_be_served(cache, splits, request_, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        extract([request_], cache, splits, **settings)


def test_a_split_that_the_data_lacks(cache, splits):
    with pytest.raises(ConfigError, match="split 'test'"):
        extract([FeatureRequest("test")], cache, {"train": splits["train"]})


def test_networks_without_a_hash_leave_no_banks(cache, splits, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    banks, stats = extract([CLS], cache, splits, cacheable=False)
    assert stats.images == 7
    assert not cache.root.exists()
    assert not list(tmp_path.glob("ibot-eval-*"))
    gc.collect()
    cached, _ = extract([CLS], cache, splits)
    np.testing.assert_array_equal(banks[CLS].features, cached[CLS].features)


def test_networks_are_given_back_in_their_own_mode(cache, splits):
    backbone = FakeBackbone()
    backbone.train()
    backbone.norm.eval()
    extract([CLS], cache, splits, backbone)
    assert backbone.training
    assert not backbone.norm.training


def test_the_callers_autograd_mode_is_left_alone(cache, splits):
    extract([CLS], cache, splits)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_progress_goes_to_stderr_only_when_asked_for(cache, splits, capfd):
    extract([CLS], cache, splits)
    assert capfd.readouterr() == ("", "")
    extract([FeatureRequest("test")], cache, splits, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "features of val" in err
    assert "image/s" in err
    assert err.count("\r") < 5


def test_the_same_images_under_two_names_take_one_pass(cache):
    split = FakeSplit(5)
    backbone = FakeBackbone()
    banks, stats = extract([CLS, FeatureRequest("test")], cache, {"train": split, "test": split}, backbone)
    assert (backbone.forwarded, stats.reused) == (5, 1)
    np.testing.assert_array_equal(banks[CLS].features, banks[FeatureRequest("test")].features)


def test_patches_are_stored_in_shards_that_memory_holds(cache, splits, monkeypatch):
    sizes = []

    def spy(n: int, batch_size: int, size: int) -> list[Shard]:
        sizes.append(size)
        return shards(n, batch_size, size)

    monkeypatch.setattr("ibot_eval.extraction.shards", spy)
    requests = [FeatureRequest("train", 0, "none", "patches"), FeatureRequest("train", 1)]
    banks, _ = extract(requests, cache, splits)
    assert sizes == [sum(banks[request].features[0].nbytes for request in requests)]


def test_a_bank_that_vanishes_is_said_to_be_removed(cache, splits, monkeypatch):
    finish = BankWriter.finish

    def removed_at_once(writer: BankWriter, *arguments: Any) -> None:
        finish(writer, *arguments)
        shutil.rmtree(cache.root / "banks" / writer.key)

    monkeypatch.setattr(BankWriter, "finish", removed_at_once)
    with pytest.raises(CacheError, match="was removed while this run"):
        extract([CLS], cache, splits)


def test_cache_ls_tells_whose_images_they_are(cache, splits):
    splits["train"].source = "demo/train"
    extract([CLS, FeatureRequest("test")], cache, splits)
    assert sorted(str(info.data) for info in cache.ls()) == ["demo/train", "val"]


def test_no_request_is_no_work(cache, splits):
    banks, stats = extract([], cache, splits)
    assert (banks, stats.images, stats.reused) == ({}, 0, 0)
    assert not Path(cache.root).exists()


def test_a_kill_before_the_manifest_costs_no_pass(cache, splits, monkeypatch):
    def killed(path: Path, value: object, **settings: object) -> None:
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        atomic_write_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr("ibot_eval.bank_writer.atomic_write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            extract([CLS], cache, splits)
    assert (cache.root / "banks" / cache.ls()[0].key / "features.npy").exists()
    assert not cache.ls()[0].complete
    banks, stats = extract([CLS], cache, splits)
    assert (stats.images, stats.reused) == (0, 0)
    whole, _ = extract([CLS], BankCache(cache.root / "whole"), splits)
    np.testing.assert_array_equal(banks[CLS].features, whole[CLS].features)


def test_banks_are_opened_without_hashing_them(cache, splits, monkeypatch):
    extract([CLS], cache, splits)
    monkeypatch.setattr("ibot_eval.cache.sha256_file", lambda path: pytest.fail("hashed"))
    _, stats = extract([CLS], cache, splits)
    assert stats.reused == 1


def test_another_batch_size_does_not_use_half_of_a_shard(cache, splits):
    with pytest.raises(BadImage):
        extract([CLS], cache, {"train": FakeSplit(7, bad=[5])}, batch_size=3)
    assert [p.name for p in cache.root.glob("partial/*/*.npy")] == ["shard-00000000-00000003.npy"]
    banks, _ = extract([CLS], cache, splits)
    whole, _ = extract([CLS], BankCache(cache.root / "whole"), splits)
    np.testing.assert_array_equal(banks[CLS].features, whole[CLS].features)


def test_atoms_of_one_split_can_be_composed(cache, splits):
    requests = [CLS, FeatureRequest("train", 0, "none")]
    banks, _ = extract(requests, cache, splits)
    joined = compose(banks, requests)
    assert joined.shape == (7, 2 * WIDTH)
    np.testing.assert_array_equal(joined[:, WIDTH:], banks[requests[1]].features)
    assert compose(banks, [CLS]) is banks[CLS].features
