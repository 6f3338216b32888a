"""Student and teacher: how they start, masks, crops of other sizes, Swin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ibot_eval.errors import ConfigError
from pretrain.config import NetworkSettings
from pretrain.networks import Trunk, build, build_backbone, embed_width, mask_cell
from tests.pretraining import SHARINGS, published, tiny
from tests.published_network import Network as PublishedNetwork


@pytest.mark.parametrize("sharing", SHARINGS)
def test_teacher_starts_as_the_student(sharing: str) -> None:
    student, teacher = build(tiny(sharing=sharing, drop_path=0.1, norm_last_layer=False))
    ours, theirs = dict(student.named_parameters()), dict(teacher.named_parameters())
    assert set(theirs) <= set(ours)
    for name, tensor in theirs.items():
        # The published code loads the student's two last layers into the teacher's one; that of patches stays.
        swapped = sharing == "semi-shared-2" and "last_layer" in name
        assert torch.equal(tensor, ours[name.replace("last_layer", "last_layer2") if swapped else name]), name
    assert not any(p.requires_grad for p in teacher.parameters())
    assert all(p.requires_grad for p in student.parameters())
    pointers = [{p.untyped_storage().data_ptr() for p in net.parameters()} for net in (student, teacher)]
    assert not pointers[0] & pointers[1]


def test_what_each_sharing_means() -> None:
    parts = {}
    for sharing in SHARINGS:
        nets = build(tiny(sharing=sharing))
        parts[sharing] = [(net.head.mlp2 is not None, net.head.last_layer2 is not None) for net in nets]
    nothing, last, everything = (True, True), (False, True), (False, False)
    assert parts == {
        "vanilla": [nothing, nothing],
        "shared": [everything, everything],
        "semi-shared": [nothing, everything],
        "semi-shared-2": [last, everything],
    }


def test_prototypes_of_unit_length_stay_fixed() -> None:
    fixed, trained = build(tiny())[0], build(tiny(norm_last_layer=False))[0]
    assert not fixed.head.last_layer.weight_g.requires_grad
    assert trained.head.last_layer.weight_g.requires_grad
    assert (fixed.head.last_layer.weight_g == 1).all()


def test_seed_decides_the_weights_and_nothing_else_is_drawn() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (build(tiny(seed=seed))[0].state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.mlp.0.weight"], other["head.mlp.0.weight"])
    assert not torch.equal(
        first["trunk.backbone.net.blocks.0.attn.qkv.weight"], other["trunk.backbone.net.blocks.0.attn.qkv.weight"]
    )


def test_initial_weights() -> None:
    student, _ = build(tiny(width=192, heads=3, hidden=256))
    state = published(student.state_dict())
    assert (state["backbone.masked_embed"] == 0).all()
    assert state["backbone.masked_embed"].shape == (1, 192)
    for name in ("cls_token", "pos_embed", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc1.weight"):
        assert state[f"backbone.{name}"].std().item() == pytest.approx(0.02, rel=0.15), name
    assert state["head.mlp.0.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert (state["backbone.blocks.0.mlp.fc1.bias"] == 0).all()


def test_drop_path_is_the_students_alone() -> None:
    student, teacher = build(tiny(drop_path=0.5, depth=3))
    images = torch.randn(4, 3, 32, 32)
    student.train()
    teacher.train()
    assert torch.equal(teacher.trunk(images).cls, teacher.trunk(images).cls)
    assert not torch.equal(student.trunk(images).cls, student.trunk(images).cls)
    student.eval()
    torch.testing.assert_close(student.trunk(images).cls, teacher.trunk(images).cls)
    rates = [block.drop_path1.drop_prob for block in student.backbone.net.blocks[1:]]  # type: ignore[attr-defined]
    assert rates == pytest.approx([0.25, 0.5]), "it rises with depth, from 0"


@pytest.mark.parametrize(("patch", "size"), [(8, 32), (8, 48), (4, 16)])
def test_masks_come_before_cls_and_positions(patch: int, size: int) -> None:
    student, _ = build(tiny(patch_size=patch))
    nn.init.normal_(student.trunk.masked_embed)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 3, size, size, generator=generator)
    masks = torch.rand(3, size // patch, size // patch, generator=generator) < 0.4
    witness = PublishedNetwork.from_state(published(student.state_dict()), heads=3)
    for mask in (None, masks):
        tokens = student.trunk(images, mask)
        expected = witness.backbone(images, mask)
        torch.testing.assert_close(tokens.cls, expected[:, 0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tokens.patches, expected[:, 1:], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(student.trunk(images, masks).cls, student.trunk(images).cls, atol=1e-3)


def test_crops_of_another_size_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing positions with those of the step before would, and no step has those of the one before."""
    student, teacher = build(tiny())
    local_images = torch.randn(2, 3, 16, 16)

    def waits(*_: Tensor) -> bool:
        raise AssertionError("torch.equal")

    monkeypatch.setattr(torch, "equal", waits)
    for network in (student, teacher):
        first = network.trunk(local_images).cls
        again = network.trunk(local_images).cls
        network.trunk.backbone.net.pos_embed.data.mul_(2)  # type: ignore[union-attr]
        moved = network.trunk(local_images).cls
        torch.testing.assert_close(again, first, rtol=0, atol=0)
        assert not torch.allclose(moved, first, atol=1e-3)


def test_student_on_chosen_positions() -> None:
    student, _ = build(tiny())
    global_images, local_images = torch.randn(4, 3, 32, 32), torch.randn(6, 3, 16, 16)
    positions, local_positions = torch.tensor([3, 16, 63, 0]), torch.tensor([0, 23])
    masks = torch.zeros(4, 4, 4, dtype=torch.bool)
    masks[0, 0, 3] = True
    found = student(global_images, local_images, masks, positions, None, local_positions, keep_tokens=True)
    seen, small = student.trunk(global_images, masks), student.trunk(local_images)
    cls, patches = student.head(
        torch.cat([seen.cls, small.cls]),
        torch.cat([seen.patches.flatten(0, 1)[positions], small.patches.flatten(0, 1)[local_positions]]),
    )
    torch.testing.assert_close(found.cls, cls)
    torch.testing.assert_close(found.patches, patches)
    torch.testing.assert_close(found.tokens, seen.patches)
    # Where only these tokens are wanted, the last block computes no others.
    fewer = student(global_images, local_images, masks, positions, None, local_positions)
    torch.testing.assert_close(fewer.cls, cls)
    torch.testing.assert_close(fewer.patches, patches)
    assert fewer.tokens is None
    alone = student(global_images, None)
    assert alone.patches is None
    assert alone.tokens is None
    torch.testing.assert_close(alone.cls, student.head.forward_cls(student.trunk(global_images).cls))


@pytest.mark.parametrize("window", [7, 14])
def test_swin_cells_of_32_pixels(window: int) -> None:
    torch.manual_seed(0)
    trunk = Trunk(build_backbone(NetworkSettings(arch="swin_tiny", window=window), 64, 0.0))
    backbone = trunk.backbone
    assert backbone.architecture == f"swin-t/{window}"
    assert (mask_cell(backbone), embed_width(backbone), backbone.dims[-1]) == (32, 96, 768)
    assert trunk.masked_embed.shape == (1, 96)
    nn.init.normal_(trunk.masked_embed)
    images, masks = torch.randn(2, 3, 64, 64), torch.zeros(2, 2, 2, dtype=torch.bool)
    masks[1, 0, 1] = True
    seen: list[Tensor] = []
    encode = backbone.encode
    backbone.encode = lambda patches: seen.append(patches) or encode(patches)  # type: ignore[method-assign]
    plain, masked = trunk(images), trunk(images, masks)
    assert plain.patches.shape == (2, 4, 768)
    # The evaluation's pass, which is checked against golden numbers elsewhere.
    torch.testing.assert_close(plain.cls, backbone.outputs(images, norm="final").blocks[-1].cls)
    torch.testing.assert_close(plain.cls, plain.patches.mean(1))
    expected = torch.zeros(2, 16, 16, dtype=torch.bool)
    expected[1, :8, 8:] = True
    assert torch.equal((seen[0] != seen[1]).any(-1), expected)
    assert (seen[1][expected] == trunk.masked_embed).all()
    torch.testing.assert_close(plain.patches[0], masked.patches[0])
    assert not torch.allclose(plain.patches[1], masked.patches[1])
    # Global and local crops of a run: any multiple of the cell.
    assert trunk(torch.randn(1, 3, 96, 96)).patches.shape == (1, 9, 768)
    assert trunk(torch.randn(1, 3, 32, 32)).patches.shape == (1, 1, 768)


@pytest.mark.parametrize(
    ("arch", "size", "parameters", "name"),
    [
        ("vit_tiny", 224, 5.5e6, "vit-ti/16"),
        ("vit_small", 224, 21.7e6, "vit-s/16"),
        ("swin_tiny", 224, 27.5e6, "swin-t/7"),
    ],
)
def test_sizes_of_the_papers_networks(arch: Any, size: int, parameters: float, name: str) -> None:
    with torch.device("meta"):
        backbone = build_backbone(NetworkSettings(arch=arch), size, 0.1)
    assert sum(p.numel() for p in set(backbone.parameters())) == pytest.approx(parameters, rel=0.02)
    assert backbone.architecture == name


@pytest.mark.parametrize(
    ("arch", "size", "patch"), [("vit_tiny", 100, None), ("swin_tiny", 80, None), ("vit_tiny", 224, 9)]
)
def test_sizes_that_do_not_divide(arch: Any, size: int, patch: int | None) -> None:
    with pytest.raises(ConfigError, match=rf"{size} is not a multiple of"):
        build_backbone(NetworkSettings(arch=arch, patch_size=patch), size, 0.0)
