"""ibot_eval.probes.frozen_network: the same features as banks hold."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval.cache import BankCache
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.extraction import extract_banks
from ibot_eval.features import FeatureRequest, compose
from ibot_eval.probes.frozen_network import FrozenNetwork
from ibot_eval.probes.labelled import require_labels
from tests.fakes import TRANSFORM, FakeBackbone, FakeSplit, fake_images, fake_loaded

CPU = torch.device("cpu")
REQUESTS = [FeatureRequest("train", block, reducer=r) for block in (0, -1) for r in ("cls", "patch_mean")]


def test_equals_banks(tmp_path: Path) -> None:
    split, rows = FakeSplit(17), np.array([11, 2, 3, 16, 0, 7, 8])
    banks, _ = extract_banks(
        REQUESTS, fake_loaded(), {"train": split}, TRANSFORM, BankCache(tmp_path), device=CPU, workers=0, progress=False
    )
    network = FrozenNetwork(FakeBackbone(), REQUESTS, TRANSFORM, device=CPU, batch_size=3)
    with network.evaluating():
        found = network.labelled(split, rows, "train")
    np.testing.assert_array_equal(found.features, compose(banks, REQUESTS)[rows])
    np.testing.assert_array_equal(found.labels, split.labels[rows])
    assert list(found.image_ids) == [split.image_ids[i] for i in rows]
    assert network.width == found.features.shape[1] == 24


def test_batches_come_one_by_one_with_what_cannot_be_decoded() -> None:
    split = FakeSplit(12, bad=(3, 10))
    network = FrozenNetwork(
        FakeBackbone().eval(), REQUESTS[2:3], TRANSFORM, device=CPU, batch_size=2, bad_images="skip"
    )
    batches = [np.array([5, 3, 1]), np.array([10]), np.array([0, 11])]
    with closing(network.loader(split, TRANSFORM, batches)) as loader, network.bar("x", 6) as bar:
        for batch in batches:
            features, usable = network.features(loader, batch, CPU, bar)
            assert usable.tolist() == [int(i) not in split.bad for i in batch]
            assert not features[~usable].any()
            good = [int(i) for i in batch[usable.numpy()]]
            if good:
                with torch.no_grad():
                    wanted = FakeBackbone().eval().outputs(fake_images(split, good)).blocks[0].cls
                assert torch.equal(features[usable], wanted)


def test_precision() -> None:
    split, rows = FakeSplit(6), np.arange(6)
    full, half = (
        FrozenNetwork(FakeBackbone().eval(), REQUESTS, TRANSFORM, device=CPU, precision=p).labelled(
            split, rows, "train"
        )
        for p in ("fp32", "bf16")
    )
    assert half.features.dtype == np.float32
    assert not np.array_equal(half.features, full.features)
    np.testing.assert_allclose(half.features, full.features, atol=0.1)


def test_refusals() -> None:
    wrongs: list[dict[str, Any]] = [{"batch_size": 0}, {"workers": -1}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="at least 1 image"):
            FrozenNetwork(FakeBackbone(), REQUESTS, TRANSFORM, device=CPU, **wrong)
    with pytest.raises(ConfigError, match="block 3"):
        FrozenNetwork(FakeBackbone(), [FeatureRequest("train", 3)], TRANSFORM, device=CPU)
    with pytest.raises(DataError, match="no images"):
        require_labels(FakeSplit(0).labels, FakeSplit(0).image_ids, "test", "linear probing")
    network = FrozenNetwork(FakeBackbone().eval(), REQUESTS, TRANSFORM, device=CPU, bad_images="skip")
    with pytest.raises(DataError, match="no images"):
        network.labelled(FakeSplit(2, bad=(0, 1)), np.arange(2), "test")
