"""Reducers and the pass that computes several atomic outputs at once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ibot_eval import reducers
from ibot_eval.atoms import Atom, atomic_outputs, resolve, row_bytes
from ibot_eval.errors import ConfigError
from ibot_eval.features import FeatureRequest
from ibot_eval.models import ModuleBackbone, wrap
from ibot_eval.models.swin import SwinBackbone
from ibot_eval.models.vit import ViTBackbone
from tests.fakes import DEPTH, WIDTH, FakeBackbone, FakeSplit, fake_images


@pytest.fixture
def patches() -> torch.Tensor:
    return torch.randn(2, 3, 2, 5, generator=torch.Generator().manual_seed(0))


def test_patch_mean(patches):
    expected = patches.numpy().reshape(2, 6, 5).mean(1)
    np.testing.assert_allclose(reducers.patch_mean(patches).numpy(), expected, rtol=1e-6)
    assert reducers.patch_mean(patches.half()).dtype == torch.float32


def test_norm_comes_after_the_mean(patches):
    norm = nn.LayerNorm(5)
    mean = patches.numpy().reshape(2, 6, 5).mean(1)
    expected = (mean - mean.mean(1, keepdims=True)) / np.sqrt(mean.var(1, keepdims=True) + norm.eps)
    np.testing.assert_allclose(reducers.norm_patch_mean(patches, norm).detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("power", [1.0, 3.0, 4.0, 2.5])
def test_gem(patches, power):
    x = np.maximum(patches.numpy().astype(np.float64).reshape(2, 6, 5), 1e-6)
    expected = (x**power).mean(1) ** (1 / power)
    np.testing.assert_allclose(reducers.gem(patches, power).numpy(), expected, rtol=1e-5)


def test_gem_of_large_powers_and_negative_values(patches):
    assert torch.isfinite(reducers.gem(patches * 1000, 60.0)).all()
    low = reducers.gem(torch.full((1, 2, 2, 1), -3.0), 4.0)
    np.testing.assert_allclose(low.numpy(), [[1e-6]], rtol=1e-5)


def test_cls_attention_skips_cls_and_registers():
    attention = torch.arange(2 * 3 * 7 * 7, dtype=torch.float32).reshape(2, 3, 7, 7)
    got = reducers.cls_attention_on_patches(attention, 4)
    assert got.tolist() == [attention[b, :, 0, 3:].mean(0).tolist() for b in range(2)]


def test_topk(patches):
    weights = torch.tensor([[0.1, 0.5, 0.2, 0.9, 0.0, 0.3], [1.0, 0.0, 0.0, 0.0, 0.0, 2.0]])
    flat = patches.numpy().reshape(2, 6, 5)
    order = reducers.by_weight(weights)
    np.testing.assert_allclose(reducers.leading_mean(patches, order, 1).numpy(), flat[[0, 1], [3, 5]], rtol=1e-6)
    expected = np.stack([flat[0, [3, 1, 5]].mean(0), flat[1, [5, 0, 1]].mean(0)])
    np.testing.assert_allclose(reducers.leading_mean(patches, order, 3).numpy(), expected, rtol=1e-5)
    everything = reducers.leading_mean(patches, order, 6).numpy()
    np.testing.assert_allclose(everything, flat.mean(1), rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match=r"7 patches .* 3x2 = 6"):
        reducers.leading_mean(patches, order, 7)


def test_head_argmax():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, float("nan"), 1.0], [float("inf"), 0.0, 0.0], [-1.0, -2.0, -3.0]])
    got = reducers.head_argmax(logits)
    assert got.dtype == torch.int64
    assert got.tolist() == [1, -1, -1, 0]


HEAD = nn.Linear(WIDTH, 4)
REQUESTS = [
    FeatureRequest("train", block, norm, reducer)
    for block in (-1, 0)
    for norm in ("published", "final", "none")
    for reducer in ("cls", "patch_mean", "norm_patch_mean", "gem:3", "topk:2", "head_argmax", "patches")
]


def outputs(backbone, requests, head=HEAD, batch=range(3)):
    images = fake_images(FakeSplit(3), list(batch))
    atoms = [resolve(request, backbone, head) for request in requests]
    with torch.inference_mode():
        result = atomic_outputs(backbone.eval(), head, images, list(dict.fromkeys(atoms)))
    return [result[atom] for atom in atoms]


def test_one_pass_gives_what_single_passes_give():
    backbone = FakeBackbone()
    merged = outputs(backbone, REQUESTS)
    assert backbone.passes == 1
    for request, together in zip(REQUESTS, merged, strict=True):
        (alone,) = outputs(FakeBackbone(), [request])
        assert torch.equal(alone, together), request


def test_dtypes_and_shapes():
    got = dict(zip(REQUESTS, outputs(FakeBackbone(), REQUESTS), strict=True))
    for request, value in got.items():
        shape, dtype = {
            "head_argmax": ((3,), torch.int64),
            "patches": ((3, 2, 2, WIDTH), torch.float16),
        }.get(request.reducer, ((3, WIDTH), torch.float32))
        assert (tuple(value.shape), value.dtype) == (shape, dtype), request


def test_topk_follows_the_last_block_whatever_the_block():
    backbone = FakeBackbone().eval()
    images = fake_images(FakeSplit(3), [0, 1, 2])
    with torch.inference_mode():
        raw = backbone.outputs(images, (0,), "none", attention_block=-1)
    (got,) = outputs(backbone, [FeatureRequest("train", 0, "none", "topk:1")])
    assert raw.attention is not None
    best = raw.attention[:, :, 0, 2:].mean(1).argmax(1)
    flat = raw.blocks[0].patches.reshape(3, 4, WIDTH)
    assert torch.equal(got, torch.stack([flat[i, b] for i, b in enumerate(best)]))


def test_published_heads_are_asked_for_cls_only():
    head = SimpleNamespace(forward_cls=lambda cls: cls[:, :2])
    (got,) = outputs(FakeBackbone(), [FeatureRequest("train", reducer="head_argmax")], head)
    (cls,) = outputs(FakeBackbone(), [FeatureRequest("train")])
    assert got.tolist() == cls[:, :2].argmax(1).tolist()


def test_requests_are_resolved():
    backbone = FakeBackbone()
    assert resolve(FeatureRequest("test", -1), backbone, None) == Atom(DEPTH - 1, "published", "cls")
    one, other = (resolve(FeatureRequest("test", -1, n, "norm_patch_mean"), backbone, None) for n in ("final", "none"))
    assert one == other


@pytest.mark.parametrize(
    ("backbone", "request_", "message"),
    [
        (FakeBackbone(), FeatureRequest("train", 3), "block 3 does not exist"),
        (FakeBackbone(), FeatureRequest("train", reducer="head_argmax"), "has none"),
        (FakeBackbone(has_cls=False), FeatureRequest("train", reducer="topk:1"), "attention of \\[CLS\\]"),
        (FakeBackbone(dims=(4, 6, 6)), FeatureRequest("train", 0, reducer="norm_patch_mean"), "4 wide"),
    ],
)
def test_what_a_network_cannot_serve(backbone, request_, message):
    with pytest.raises(ConfigError, match=message):
        resolve(request_, backbone, None)


def test_a_plain_module_has_no_patches():
    backbone = ModuleBackbone(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5)), dim=5)
    assert outputs(backbone, [FeatureRequest("train")])[0].shape == (3, 5)
    with pytest.raises(ConfigError, match="no patch tokens"):
        outputs(backbone, [FeatureRequest("train", reducer="patch_mean")])


def small_vit(**settings):
    from timm.models.vision_transformer import VisionTransformer

    return ViTBackbone(VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=3, num_heads=3, **settings))


def small_swin():
    from timm.models.swin_transformer import SwinTransformer

    return SwinBackbone(
        SwinTransformer(img_size=32, patch_size=4, embed_dim=12, depths=(1, 2), num_heads=(2, 2), window_size=4)
    )


def small_resnet(channels=(4, 4, 8, 8)):
    from timm.models.resnet import BasicBlock, ResNet

    return wrap(ResNet(BasicBlock, (1, 1, 1, 1), channels=channels))


@pytest.mark.parametrize(
    "make", [small_vit, lambda: small_vit(class_token=False, global_pool="avg"), small_swin, small_resnet, FakeBackbone]
)
def test_networks_agree_with_their_published_norm(make):
    """``apply_norm`` on raw blocks must give what ``outputs`` gives, or merged passes would give other features."""
    torch.manual_seed(0)
    backbone = make().eval()
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.3)
    blocks = range(backbone.depth)
    side = 32 if backbone.patch_size not in (4,) else 8
    images = torch.randn(2, 3, side, side)
    with torch.inference_mode():
        raw = backbone.outputs(images, blocks, "none").blocks
        for norm in ("none", "published", "final"):
            fit = [b for b in blocks if norm != "final" or backbone.dims[b] == backbone.dims[-1]]
            for block, expected in zip(fit, backbone.outputs(images, fit, norm).blocks, strict=True):
                got = backbone.apply_norm(raw[block], block, norm)
                for a, b in zip(got, expected, strict=True):
                    assert torch.equal(a, b), (norm, block)


@pytest.mark.parametrize("make", [small_vit, small_swin, lambda: small_resnet((2, 4, 8, 16))])
def test_the_size_of_patches_is_foreseen(make):
    backbone, side = make().eval(), 64
    for block in range(backbone.depth):
        atom = Atom(block, "none", "patches")
        patches = atomic_outputs(backbone, None, torch.zeros(1, 3, side, side), [atom])[atom]
        assert row_bytes(atom, backbone, side) == patches[0].numel() * 2


def test_a_narrow_block_has_no_final_norm():
    backbone = FakeBackbone(dims=(4, 6, 6)).eval()
    narrow = [FeatureRequest("train", 0, "final"), FeatureRequest("train", -1, "none")]
    with pytest.raises(ConfigError, match="cannot be normalised"):
        outputs(backbone, narrow)


def test_a_bank_does_not_depend_on_what_else_is_asked_for() -> None:
    net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3).eval()
    backbone = wrap(net, family="ibot")
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    atoms = [
        Atom(2, "published", "cls"),
        Atom(2, "none", "cls"),
        Atom(2, "published", "patch_mean"),
        Atom(1, "published", "cls"),
        Atom(2, "none", "norm_patch_mean"),
        Atom(2, "published", "topk:3"),
        Atom(2, "none", "norm_topk:3"),
    ]
    with torch.no_grad():
        together = atomic_outputs(backbone, None, images, atoms)
        for atom in atoms:
            alone = atomic_outputs(backbone, None, images, [atom])[atom]
            assert torch.equal(together[atom], alone), atom
