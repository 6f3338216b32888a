"""probes.head_file: what is saved comes back, and what is no head is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from ibot_eval.errors import CheckpointError
from ibot_eval.probes.head_file import HEAD_FILE, METADATA_KEY, ClassifierHead, load_head


@pytest.fixture
def head():
    generator = torch.Generator().manual_seed(0)
    return ClassifierHead(
        weight=torch.randn(3, 8, generator=generator),
        bias=torch.randn(3, generator=generator),
        class_names=["ant", "bee", "größe"],
        labels=[0, 2, 7],
        features=[
            {"block": -1, "norm": "published", "reducer": "cls"},
            {"block": -1, "norm": "published", "reducer": "patch_mean"},
        ],
        protocol="linear",
        backbone={"reference": "a.pth", "sha256": "a" * 64, "key": "teacher", "architecture": "vit-s/16"},
        transform={"resize": 256, "crop": 224, "interpolation": "bicubic"},
    )


def test_round_trip(head, tmp_path):
    path = head.save(tmp_path / "run" / HEAD_FILE)
    for place in (path, path.parent, str(path)):
        found = load_head(place)
        assert torch.equal(found.weight, head.weight)
        assert torch.equal(found.bias, head.bias)
        for name in ("class_names", "labels", "features", "normalised", "protocol", "backbone", "transform"):
            assert getattr(found, name) == getattr(head, name), name


def test_equal_heads_give_equal_files(head, tmp_path):
    first, second = head.save(tmp_path / "a.safetensors"), head.save(tmp_path / "b.safetensors")
    assert first.read_bytes() == second.read_bytes()


def test_a_weight_that_is_a_view_is_saved_whole(head, tmp_path):
    head.weight = torch.randn(8, 3).T.requires_grad_()
    assert torch.equal(load_head(head.save(tmp_path / "a.safetensors")).weight, head.weight.detach())


def test_logits(head):
    features = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)) * 4
    expected = features @ head.weight.T + head.bias
    torch.testing.assert_close(head.logits(features), expected)
    torch.testing.assert_close(head.logits(features.double()), expected)
    head.normalised = True
    torch.testing.assert_close(head.logits(features * 3), F.normalize(features, dim=-1) @ head.weight.T + head.bias)


def test_parts_that_do_not_fit_together(head):
    for change in ({"bias": torch.zeros(4)}, {"class_names": ["a"]}, {"labels": []}, {"weight": torch.zeros(3)}):
        parts = {**{n: getattr(head, n) for n in ("weight", "bias", "class_names", "labels", "features")}, **change}
        with pytest.raises(ValueError, match="fit together"):
            ClassifierHead(**parts)


def test_what_is_no_head_is_refused(head, tmp_path):
    with pytest.raises(CheckpointError, match="no classifier head at"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no classifier head at"):
        load_head(tmp_path)
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2, 2)}, other)
    with pytest.raises(CheckpointError, match="is not a classifier head"):
        load_head(other)
    save_file({"weight": torch.zeros(2, 2)}, other, {METADATA_KEY: '{"format": 1}'})
    with pytest.raises(CheckpointError, match="damaged"):
        load_head(other)
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, other, {METADATA_KEY: '{"format": 1}'})
    with pytest.raises(CheckpointError, match="damaged"):
        load_head(other)
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, other, {METADATA_KEY: '{"format": 99}'})
    with pytest.raises(CheckpointError, match="format"):
        load_head(other)
    whole = head.save(tmp_path / "head.safetensors")
    whole.write_bytes(whole.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="damaged"):
        load_head(whole)
    whole.write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match="damaged"):
        load_head(whole)
