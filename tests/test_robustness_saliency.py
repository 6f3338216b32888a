"""robustness.saliency: attention of a known network, on its own grid and on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import CheckpointError, ConfigError, DataError
from ibot_eval.models import wrap
from ibot_eval.own_network import from_module
from ibot_eval.protocol import Session
from ibot_eval.robustness.saliency import Saliency, check_saliency, open_saliency
from ibot_eval.settings import EngineSettings
from tests import layouts

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def images(side: int, n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(0))


def vit(**changes):
    network = wrap(layouts.vit(**changes)).eval()
    network.mean, network.std = MEAN, STD
    return network


@pytest.mark.parametrize("head", ["mean", 0, 2])
@torch.no_grad()
def test_attention_by_hand(head):
    """From the network's own projections: softmax of the [CLS] query against all keys."""
    network = vit(reg_tokens=2)
    found = Saliency(network, head, "", MEAN, STD, 32, (4, 4)).attention(images(32))
    tokens = network._tokens(network.embed(images(32)).flatten(1, 2), (4, 4))
    tokens = network.net.blocks[0](tokens)
    block = network.net.blocks[1]
    query, key, _ = block.attn.qkv(block.norm1(tokens)).view(2, 19, 3, 3, 16).permute(2, 0, 3, 1, 4)
    weights = (query[:, :, 0, None] @ key.transpose(2, 3) / 4).softmax(-1)[:, :, 0, 3:]
    expected = weights.mean(1) if head == "mean" else weights[:, head]
    torch.testing.assert_close(found.flatten(1), expected, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_images_are_normalised_for_the_saliency_network():
    network, pixels = vit(), torch.rand(2, 3, 32, 32)
    views = [
        (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        for mean, std in ((MEAN, STD), ((0.1, 0.2, 0.3), (0.5, 0.5, 1.0)))
    ]
    same = Saliency(network, "mean", "", MEAN, STD, 32, (4, 4)).attention(views[0])
    other = Saliency(network, "mean", "", (0.1, 0.2, 0.3), (0.5, 0.5, 1.0), 32, (4, 4)).attention(views[1])
    torch.testing.assert_close(same, other)


@torch.no_grad()
def test_other_patches_are_resampled_and_that_is_said():
    network = vit()
    own = Saliency(network, "mean", "x", MEAN, STD, 32, (4, 4))
    assert own.note is None
    coarse = Saliency(network, "mean", "x", MEAN, STD, 32, (2, 2))
    assert "4x4 attention is resampled to the 2x2 squares" in (coarse.note or "")
    expected = own.attention(images(32)).unflatten(2, (2, 2)).unflatten(1, (2, 2)).sum((2, 4))
    torch.testing.assert_close(coarse.attention(images(32)), expected)
    # 28 pixels hold no whole number of patches of 8: the network looks at 32.
    resized = Saliency(network, "mean", "x", MEAN, STD, 28, (4, 4))
    assert "images resized to 32 pixels" in (resized.note or "")
    bigger = torch.nn.functional.interpolate(images(28), (32, 32), mode="bilinear", antialias=True)
    torch.testing.assert_close(resized.attention(images(28)), own.attention(bigger))


@pytest.mark.parametrize("make", [layouts.swin, layouts.resnet])
def test_a_network_without_cls_attention_is_refused(make):
    with pytest.raises(ConfigError, match="no attention of a \\[CLS\\] token") as caught:
        check_saliency(wrap(make()), "mean", "--ckpt")
    assert "--kinds random" in str(caught.value)


@pytest.mark.parametrize("head", [3, -1])
def test_a_head_that_does_not_exist(head):
    with pytest.raises(ConfigError, match="has 3"):
        check_saliency(vit(), head, "--ckpt")


@torch.no_grad()
def test_attention_that_is_not_finite():
    network = vit()
    with pytest.raises(DataError, match="NaN or infinite"):
        Saliency(network, "mean", "x", MEAN, STD, 32, (4, 4)).attention(images(32) * float("nan"))


def test_the_network_under_test_unless_another_is_named(tmp_path: Path):
    loaded = from_module(layouts.vit())
    session = Session(torch.device("cpu"), tmp_path, ())
    session.transform = EvalTransform(32, 32, "bicubic", MEAN, STD)
    session.engine, session.loaded = EngineSettings(), loaded
    own = open_saliency(session, None, None, "mean", (4, 4))
    assert own.network is loaded.backbone
    assert own.name == "under test"
    with pytest.raises(CheckpointError):
        open_saliency(session, str(tmp_path / "missing.pth"), None, "mean", (4, 4))
    named = open_saliency(session, "random:vit_tiny_patch16_224", None, 1, (4, 4))
    assert named.network.architecture == "vit-ti/16"
    assert named.name.startswith("vit-ti/16 ")
