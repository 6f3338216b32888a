"""robustness.classifier: heads, classifiers of checkpoints and neighbours against the networks themselves."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from ibot_eval.cache import BankCache
from ibot_eval.checkpoint import load_checkpoint
from ibot_eval.errors import CheckpointError, ConfigError, DataError
from ibot_eval.finetuning.network import build_classifier
from ibot_eval.finetuning.saving import save_classifier
from ibot_eval.heads import ProjectionHead
from ibot_eval.layouts import named
from ibot_eval.models.kept_tokens import KeptTokens
from ibot_eval.own_network import from_module
from ibot_eval.probes.head_file import HEAD_FILE
from ibot_eval.protocol import Predictions
from ibot_eval.robustness.class_maps import imagenet_classes
from ibot_eval.robustness.classifier import open_classifier
from ibot_eval.runner import extract_union
from ibot_eval.settings import CheckpointSettings, RunSettings
from protocols.knn import KNN, KNNConfig
from protocols.linear import Linear, LinearConfig
from tests import layouts
from tests.finetuning_runs import Colours, labels
from tests.ranks import run_ranks
from tests.robustness_classifiers import checkpoint, head, images, session, votes_on_ranks

CLS_AND_MEAN = [{"block": -1, "norm": "published", "reducer": reducer} for reducer in ("cls", "patch_mean")]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Heads from files.


def test_a_head_takes_the_features_that_its_file_names(tmp_path: Path):
    where = session(tmp_path)
    made = head(where, CLS_AND_MEAN, 96)
    made.save(tmp_path / HEAD_FILE)
    batch = images(where)
    with torch.no_grad():
        tokens = layouts.vit().forward_features(batch)
        expected = F.linear(torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1), made.weight, made.bias)
    for name in (tmp_path, tmp_path / HEAD_FILE):
        found = open_classifier(where, str(name))
        torch.testing.assert_close(found.logits(batch), expected, rtol=1e-4, atol=1e-4)
        assert found.classes.tolist() == [0, 1, 2]
        assert found.warnings == []
        assert found.about["head"] == "linear"
    torch.testing.assert_close(found.from_features(found.features(batch)), found.logits(batch), rtol=0, atol=0)


def test_a_head_of_linear_repeats_its_accuracy(tmp_path: Path):
    where = session(tmp_path, train=Colours(labels(30)))
    assert where.loaded is not None
    where.checkpoint = where.loaded.report.as_dict()
    protocol: Any = Linear(LinearConfig(features="cls+patch_mean", blocks=(-1, -2), epochs=3, save_head=True))
    requests = protocol.features()
    assert where.data is not None
    assert where.transform is not None
    banks, _ = extract_union(
        requests, where.loaded, where.data.splits, where.transform, BankCache(None), RunSettings(), where.device
    )
    (table,) = [e for e in protocol.score(banks, where) if isinstance(e, Predictions)]
    found = open_classifier(where, str(where.output))
    assert found.classes[found.logits(images(where)).argmax(1)].tolist() == table.values["top1"].tolist()


def test_classes_are_matched_by_name(tmp_path: Path):
    where = session(tmp_path, names=["ant", "bee", "cow"])
    made = head(where, CLS_AND_MEAN, 96, class_names=["cow", "dog", "ant"])
    found = open_classifier(where, str(made.save(tmp_path / HEAD_FILE)))
    assert found.classes.tolist() == [2, -1, 0]
    assert "knows 3 classes, 1 of which the data lack" in found.warnings[0]
    assert open_classifier(where, str(tmp_path), among="data").warnings == []
    strange = head(where, CLS_AND_MEAN, 96, class_names=["x", "y", "z"])
    strange.save(tmp_path / HEAD_FILE)
    with pytest.raises(ConfigError, match=r"none of the classifier's 3 classes \('x', 'y', 'z'\) is one of the data's"):
        open_classifier(where, str(tmp_path))
    found = open_classifier(where, str(tmp_path), among="mapped")
    assert found.classes.tolist() == [-1, -1, -1]
    assert found.class_names == ["x", "y", "z"]


def test_heads_that_do_not_fit(tmp_path: Path):
    where = session(tmp_path)
    path = tmp_path / HEAD_FILE
    with pytest.raises(ConfigError, match=r"there is no head 'liner'(.|\n)*linear --save-head(.|\n)*own, knn, auto"):
        open_classifier(where, "liner")
    with pytest.raises(CheckpointError, match="no classifier head at"):
        open_classifier(where, str(tmp_path))
    head(where, CLS_AND_MEAN, 50).save(path)
    with pytest.raises(ConfigError, match=r"takes 50 features, and .* gives 96"):
        open_classifier(where, str(path))
    head(where, [{"block": 11, "norm": "published", "reducer": "cls"}], 48).save(path)
    with pytest.raises(ConfigError, match="block 11 does not exist"):
        open_classifier(where, str(path))
    of = {"reference": "dino.pth", "sha256": "f" * 64, "key": "teacher"}
    head(where, CLS_AND_MEAN, 96, backbone=of).save(path)
    with pytest.raises(ConfigError, match=r"another checkpoint, dino\.pth"):
        open_classifier(where, str(path))
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        open_classifier(where, str(path))


def test_a_head_of_the_student_is_not_the_teachers(tmp_path: Path):
    where = session(tmp_path)
    assert where.loaded is not None
    made = head(where, CLS_AND_MEAN, 96)
    made.save(tmp_path / HEAD_FILE)
    made.backbone = {**made.backbone, "key": "student"}
    where.loaded.report.key = "teacher"
    with pytest.raises(ConfigError, match="of the student, not the teacher"):
        open_classifier(where, str(made.save(tmp_path / HEAD_FILE)))


def test_other_images_are_warned_about(tmp_path: Path):
    where = session(tmp_path)
    assert where.transform is not None
    transform = replace(where.transform, crop=16, interpolation="bilinear").describe()
    path = head(where, CLS_AND_MEAN, 96, transform=transform).save(tmp_path / HEAD_FILE)
    assert open_classifier(where, str(path)).warnings == ["the head was trained on images with crop 16 instead of 32"]


# Classifiers of checkpoints.


@pytest.mark.parametrize("kind", ["vit", "mean", "resnet", "swin", "test_efficientnet", "test_convnext"])
def test_a_checkpoints_own_classifier_gives_its_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    path = tmp_path / "net.safetensors"
    if kind == "vit":
        loaded = checkpoint(path, net := layouts.vit(num_classes=3), heads=3)
    elif kind == "mean":
        loaded = checkpoint(path, net := layouts.vit(num_classes=3, global_pool="avg", fc_norm=True), heads=3)
    elif kind == "resnet":
        loaded = checkpoint(path, net := layouts.resnet(num_classes=3))
    elif kind == "swin":
        loaded = checkpoint(path, net := layouts.swin(num_classes=3, img_size=32, window_size=4, patch_size=2))
    else:
        net = layouts.scrambled(timm.create_model(kind, num_classes=3))
        monkeypatch.setattr(named, "pretrained_network", lambda name: copy.deepcopy(net))
        loaded = load_checkpoint(CheckpointSettings(ckpt=f"timm:{kind}"))
    where = session(tmp_path, loaded)
    batch = images(where)
    for name in ("own", "auto"):
        found = open_classifier(where, name)
        with torch.no_grad():
            torch.testing.assert_close(found.logits(batch), net(batch), rtol=1e-4, atol=1e-4)
        assert found.classes.tolist() == [0, 1, 2]
        assert "taken in the order of the data's" in found.warnings[0]
        assert found.class_names is None
    assert open_classifier(where, "own", among="mapped").classes.tolist() == [0, 1, 2]


@pytest.mark.parametrize("layers", [0, 1])
def test_a_fine_tuned_file(tmp_path: Path, layers: int):
    start = from_module(layouts.vit())
    start.projection_head = ProjectionHead.from_state_dict(layouts.projection_head())
    tuned = build_classifier(start, 3, 32, head_layers=layers, head_scale=1.0).eval()
    path = tmp_path / "classifier.safetensors"
    save_classifier(path, tuned, {"class_names": ["class 2", "class 0", "other"], "image_size": 32})
    where = session(tmp_path, load_checkpoint(CheckpointSettings(ckpt=str(path))))
    found = open_classifier(where, "own")
    batch = images(where)
    with torch.no_grad():
        torch.testing.assert_close(found.logits(batch), tuned(batch), rtol=1e-4, atol=1e-4)
    assert found.classes.tolist() == [2, 0, -1]
    for head_name in (path, tmp_path):
        with pytest.raises(ConfigError, match="is a whole fine-tuned network"):
            open_classifier(where, str(head_name))
    where.class_names = ("x", "y", "z")
    with pytest.raises(ConfigError, match="none of the classifier's 3 classes"):
        open_classifier(where, "own")


def test_imagenet_classes_are_matched_by_id_and_by_name(tmp_path: Path):
    loaded = checkpoint(tmp_path / "net.safetensors", layouts.resnet(num_classes=1000))
    where = session(tmp_path, loaded, ["n01440764", "n03445777", "n99999999"])
    found = open_classifier(where, "own")
    assert np.flatnonzero(found.classes == 0).tolist() == [0]
    assert np.flatnonzero(found.classes == 1).tolist() == [574]
    assert sorted(set(found.classes.tolist())) == [-1, 0, 1]
    assert "knows 1000 classes, 998 of which the data lack" in found.warnings[0]
    where.class_names = ("('tench', 'Tinca tinca')", "golf_ball", "crane")
    assert open_classifier(where, "own").classes.tolist() == found.classes.tolist()
    where.class_names = ("red", "green", "blue")
    with pytest.raises(ConfigError, match="none of the classifier's 1000 classes"):
        open_classifier(where, "own")
    assert len(imagenet_classes(21841) or ()) == 21841
    assert imagenet_classes(3) is None


def test_no_classifier_and_no_train_split(tmp_path: Path):
    where = session(tmp_path)
    with pytest.raises(ConfigError, match="has no classifier"):
        open_classifier(where, "own")
    for name in ("knn", "auto"):
        with pytest.raises(ConfigError, match=r"no train split whose images could vote(.|\n)*linear --save-head"):
            open_classifier(where, name)


def test_a_classifier_that_takes_something_else(tmp_path: Path):
    loaded = replace(from_module(layouts.vit()), classifier=nn.Linear(77, 3))
    loaded.report.classifier = {"classes": 3, "input": "unknown"}
    where = session(tmp_path, loaded)
    with pytest.raises(ConfigError, match="takes neither"):
        open_classifier(where, "own")
    with pytest.raises(ConfigError, match=r"takes neither(.|\n)*no train split"):
        open_classifier(where, "auto")


# Neighbours.


def test_neighbours_vote_as_in_the_knn_protocol(tmp_path: Path):
    where = session(tmp_path, train=Colours([0, 2, 2, 0, 2, 0, 0, 2] * 4))
    assert where.loaded is not None
    assert where.data is not None
    assert where.transform is not None
    knn = KNN(KNNConfig(k=(5,), save_votes=True))
    banks, _ = extract_union(
        knn.features(), where.loaded, where.data.splits, where.transform, BankCache(None), RunSettings(), where.device
    )
    (table,) = [e for e in knn.score(banks, where) if isinstance(e, Predictions)]
    for name in ("knn", "auto"):
        found = open_classifier(where, name, k=5)
        logits = found.logits(images(where))
        assert found.classes.tolist() == [0, 2]
        assert found.classes[logits.argmax(1)].tolist() == table.values["top1@k=5"].tolist()
        np.testing.assert_allclose(logits.softmax(1), table.values["votes@k=5"][:, [0, 2]], rtol=1e-3, atol=1e-6)


def test_votes_by_hand(tmp_path: Path):
    where = session(tmp_path, train=Colours([0, 1, 1]))
    found: Any = open_classifier(where, "knn", k=2, temperature=0.5)
    gallery = torch.from_numpy(np.array(found.head.gallery._tiles[0]))
    query = gallery[1:2] + 0.1 * gallery[2:3]
    cosines = (F.normalize(query) @ gallery.T)[0]
    assert cosines.argmin() == 0
    logits = found.from_features(3 * query)
    # Both neighbours are of class 1: relative to the nearer, exp(0) and the exponential of the difference.
    expected = torch.log(1 + torch.exp(-(cosines[1] - cosines[2]).abs() / 0.5))
    torch.testing.assert_close(logits[0, 1], expected, rtol=1e-4, atol=1e-5)
    assert logits[0, 0] == -1e4
    assert torch.isnan(found.from_features(torch.full((1, 48), torch.nan))).all()


def test_neighbours_of_a_classifier_that_does_not_fit(tmp_path: Path):
    loaded = checkpoint(tmp_path / "net.safetensors", layouts.vit(num_classes=7), heads=3)
    where = session(tmp_path, loaded, train=Colours(labels(9)))
    found = open_classifier(where, "auto", k=3)
    assert found.about["head"] == "knn"
    assert "neighbours vote instead of the checkpoint's classifier: none of the classifier's 7" in found.warnings[0]


def test_more_neighbours_than_images(tmp_path: Path):
    where = session(tmp_path, train=Colours(labels(9)))
    found = open_classifier(where, "knn")
    assert found.about["k"] == 9
    assert found.warnings == ["k = 9 is used, since the train split has no more images"]
    with pytest.raises(ConfigError, match="20 neighbours of a gallery of 9"):
        open_classifier(replace(where, asked=frozenset({"k"})), "knn")


def test_a_train_split_without_labels(tmp_path: Path):
    with pytest.raises(DataError, match="2 of 4 images of the train split have no label"):
        open_classifier(session(tmp_path, train=Colours([0, -1, 1, -1])), "knn", k=2)


def test_three_ranks_vote_as_one(tmp_path: Path):
    ranks = run_ranks(3, votes_on_ranks, str(tmp_path), [4])
    (alone,) = run_ranks(1, votes_on_ranks, str(tmp_path / "alone"), [4])
    assert ranks == [alone] * 3


# A network that drops tokens in its place.


def test_a_network_that_drops_tokens_is_taken_as_it_is(tmp_path: Path):
    loaded = checkpoint(tmp_path / "net.safetensors", layouts.vit(num_classes=3), heads=3)
    dropping = KeptTokens(loaded.backbone)
    where = session(tmp_path, replace(loaded, backbone=dropping))
    found, batch = open_classifier(where, "own"), images(where, 4)
    clean = found.logits(batch)
    with dropping.keeping(torch.ones(4, 16, dtype=torch.bool)):
        torch.testing.assert_close(found.logits(batch), clean, rtol=1e-4, atol=1e-4)
    with dropping.keeping(torch.arange(16).expand(4, -1) < 5):
        assert not torch.allclose(found.logits(batch), clean, atol=1e-2)
