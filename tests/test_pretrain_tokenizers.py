"""Where targets of patches come from: the teacher, or a frozen checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ibot_eval.backbone import IMAGENET_MEAN, IMAGENET_STD
from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.heads import ProjectionHead
from pretrain import setup
from pretrain.ibot import IBOT, Temperatures
from pretrain.networks import Network, Tokens, build, freeze_unused
from pretrain.setup import check_cells, online_tokenizer
from pretrain.tokenizers import FrozenTokenizer, OnlineTokenizer
from tests import fakes
from tests.pretraining import noise, tiny


def test_frozen_tokenizer_asks_its_own_backbone() -> None:
    backbone, head = _tokenizer_parts()
    tokenizer = FrozenTokenizer(fakes.fake_loaded(backbone, head), torch.device("cpu"), backbone.mean, backbone.std)
    assert (tokenizer.num_words, tokenizer.cell) == (20, 8)
    images = torch.randn(2, 3, 32, 32)
    _, teacher = build(tiny())
    outputs = tokenizer.patches(images, teacher.trunk(images))
    tokens = backbone.outputs(images, norm="final").blocks[-1].patches
    expected = head.forward_patches(tokens.flatten(1, 2))
    torch.testing.assert_close(outputs.mean(), expected.mean((0, 1)))
    torch.testing.assert_close(outputs.logits_at(torch.arange(32)), expected.flatten(0, 1))


def test_frozen_tokenizer_sees_pixels_as_it_was_trained_to() -> None:
    """Whatever the run normalises its images with."""
    backbone, head = _tokenizer_parts()
    pixels = torch.rand(2, 3, 32, 32)
    unused = Tokens(torch.empty(0), torch.empty(0))
    found = []
    for mean, std in (
        (backbone.mean, backbone.std),
        ((0.1, 0.7, 0.4), (0.5, 0.2, 1.0)),
        ((0.5, 0.5, 0.5), backbone.std),
    ):
        tokenizer = FrozenTokenizer(fakes.fake_loaded(backbone, head), torch.device("cpu"), mean, std)
        images = torch.stack([(pixels[:, c] - mean[c]) / std[c] for c in range(3)], 1)
        before = images.clone()
        found.append(tokenizer.patches(images, unused).logits_at(torch.arange(32)))
        assert torch.equal(images, before), "student and teacher see them too"
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-5)


def test_settings_say_what_images_are_normalised_with(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, head = _tokenizer_parts()
    monkeypatch.setattr(setup, "load_checkpoint", lambda _: fakes.fake_loaded(backbone, head))
    for flags in ({}, {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}):
        settings = tiny(tokenizer="fake.pth", **flags)
        tokenizer = setup.tokenizer_of(settings, torch.device("cpu"))
        assert tokenizer is not None
        used = setup.augmentation_of(settings)
        undone = [
            (0.3 - m) / s * scale + offset
            for m, s, scale, offset in zip(used.mean, used.std, tokenizer.scale, tokenizer.offset, strict=True)
        ]
        assert undone == pytest.approx([(0.3 - m) / s for m, s in zip(backbone.mean, backbone.std, strict=True)])


def test_step_with_a_frozen_tokenizer_of_another_k() -> None:
    backbone, head = _tokenizer_parts()
    tokenizer = FrozenTokenizer(fakes.fake_loaded(backbone, head), torch.device("cpu"), backbone.mean, backbone.std)
    settings = tiny()
    student, teacher = build(settings, tokenizer.num_words)
    freeze_unused(student, settings)
    assert student.head.patch_prototypes == 20
    assert teacher.head.patch_prototypes == 32
    assert check_cells(tokenizer, student) is tokenizer
    found = IBOT(student, teacher, tokenizer, settings.objective, torch.device("cpu")).losses(
        noise(settings), Temperatures(0.04, 0.04)
    )
    assert found.patch_targets is not None
    assert found.patch_targets.probabilities.shape[1] == 20
    found.loss.backward()
    assert all(p.grad is not None for p in student.parameters() if p.requires_grad)
    assert all(p.grad is None for p in tokenizer.backbone.parameters())


def test_tokenizer_that_does_not_fit() -> None:
    with pytest.raises(CheckpointError, match="no projection head"):
        FrozenTokenizer(fakes.fake_loaded(), torch.device("cpu"), IMAGENET_MEAN, IMAGENET_STD)
    backbone, head = _tokenizer_parts()
    tokenizer = FrozenTokenizer(fakes.fake_loaded(backbone, head), torch.device("cpu"), backbone.mean, backbone.std)
    with pytest.raises(ConfigError, match=r"cells of 8 px and the student into 4 px(.|\n)*--patch-size 8"):
        check_cells(tokenizer, build(tiny(patch_size=4))[0])


def test_online_tokenizer_only_where_patches_have_a_loss() -> None:
    _, teacher = build(tiny())
    assert online_tokenizer(tiny(patch_weight=0.0), teacher) is None
    assert isinstance(online_tokenizer(tiny(), teacher), OnlineTokenizer)


def _tokenizer_parts() -> tuple[Any, ProjectionHead]:
    """An 8-pixel backbone and a head with 20 words, as a checkpoint would give them."""
    torch.manual_seed(9)
    network = build(tiny(width=12, depth=1, seed=8))[1]
    assert isinstance(network, Network)
    head = ProjectionHead(12, 20, hidden=16, bottleneck=8).requires_grad_(False)
    return network.backbone.eval(), head
