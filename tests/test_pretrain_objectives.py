"""The whole loss of student and teacher: what it trains, in which precision, and its variants against plain loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pretrain.ibot import Temperatures, patch_places
from tests.pretraining import SHARINGS, SWIN, noise, published, ready, tiny


def test_gradients_of_a_swin_whose_windows_are_masked() -> None:
    """An embedding of zeros gives gradients up to infinity, see networks.build."""
    settings = tiny(**SWIN)
    student, ibot = ready(settings)
    assert torch.equal(student.trunk.masked_embed, ibot.teacher.trunk.masked_embed)
    batch = noise(settings)
    assert batch.masks is not None
    assert batch.masks.flatten(1).all(1).any(), "a whole crop is masked"
    ibot.losses(batch, Temperatures(0.04, 0.04)).loss.backward()
    assert max(p.grad.norm() for p in student.parameters() if p.grad is not None) < 1e6


COMBINATIONS = [
    {"sharing": sharing, "cls_weight": cls, "patch_weight": patch}
    for sharing, (cls, patch) in itertools.product(SHARINGS, ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)))
] + [
    {"pred_ratio": (0.0,), "pred_ratio_var": (0.0,), "patch_weight": 0.0},
    {"patch_objective": "position", "local_crops": 0},
    {"patch_objective": "feature", "sharing": "vanilla"},
    {"mask_crops": "all"},
    {"norm_last_layer": False, "sharing": "vanilla"},
    {"local_crops": 0, "global_crops": 3},
]


@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()))
@pytest.mark.parametrize("empty", [False, True], ids=["masked", "nothing masked"])
def test_every_trained_parameter_gets_a_gradient(flags: dict[str, Any], empty: bool) -> None:
    """Else a data-parallel wrapper would wait for it."""
    settings = tiny(**flags)
    student, ibot = ready(settings)
    trained = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    ibot.losses(noise(settings, empty=empty), Temperatures(0.04, 0.05)).loss.backward()
    assert [name for name, p in trained if p.grad is None] == []
    assert all(p.grad is None for p in student.parameters() if not p.requires_grad)
    if not empty and "norm_last_layer" not in flags:
        # Nothing is frozen that would learn, and nothing trained that never could. (Lengths do not learn when all
        # outputs move alike; a key's bias never does.)
        assert [name for name, p in trained if p.grad is not None and not p.grad.any()] == []


def test_frozen_parts() -> None:
    def frozen(**flags: Any) -> set[str]:
        student, _ = ready(tiny(norm_last_layer=False, **flags))
        named = published(dict(student.named_parameters()))
        return {".".join(name.split(".")[:2]) for name, tensor in named.items() if not tensor.requires_grad}

    assert frozen() == set()
    assert frozen(sharing="vanilla") == set()
    # Without a patch loss a masked patch still reaches [CLS], so its embedding is trained.
    assert frozen(patch_weight=0.0) == set()
    assert frozen(patch_weight=0.0, pred_ratio=(0.0,), pred_ratio_var=(0.0,)) == {"backbone.masked_embed"}
    assert frozen(patch_objective="position") == {"backbone.masked_embed"}
    assert frozen(sharing="semi-shared-2", patch_weight=0.0) == {"head.last_layer2"}
    assert frozen(sharing="semi-shared-2", cls_weight=0.0) == {"head.last_layer"}
    assert frozen(sharing="vanilla", patch_weight=0.0) == {"head.mlp2", "head.last_layer2"}
    assert frozen(sharing="semi-shared", cls_weight=0.0) == {"head.mlp", "head.last_layer"}


@pytest.mark.parametrize("empty", [False, True])
def test_empty_masks_give_no_patch_loss(empty: bool) -> None:
    settings = tiny()
    _, ibot = ready(settings)
    found = ibot.losses(noise(settings, empty=empty), Temperatures(0.04, 0.04))
    assert (found.patch_loss.item() == 0) is empty
    assert torch.isfinite(found.loss)
    assert (found.loss.item() == found.cls_loss.item()) is empty


@pytest.mark.parametrize("arch", ["vit", "swin"])
def test_checkpointing_changes_no_gradient(arch: str) -> None:
    settings = tiny(drop_path=0.2)
    student, ibot = ready(settings)
    if arch == "swin":
        settings = tiny(drop_path=0.2, **SWIN)
        student, ibot = ready(settings)
    gradients = []
    student.train()
    for checkpointed in (False, True):
        student.backbone.checkpoint_blocks = checkpointed
        student.zero_grad()
        torch.manual_seed(0)
        ibot.losses(noise(settings), Temperatures(0.04, 0.04)).loss.backward()
        gradients.append([p.grad for p in student.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-7)


def test_bfloat16_comes_close() -> None:
    settings = tiny(width=48)
    student, ibot = ready(settings)
    batch, temperatures = noise(settings), Temperatures(0.07, 0.07)
    exact = ibot.losses(batch, temperatures)
    exact.loss.backward()
    weight = dict(student.named_parameters())["head.mlp.0.weight"]
    gradient = weight.grad
    assert gradient is not None
    student.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = ibot.losses(batch, temperatures)
    rounded.loss.backward()
    again = weight.grad
    assert again is not None
    assert rounded.patch_mean is not None
    for tensor in (rounded.loss, rounded.student_cls, rounded.cls_mean, rounded.patch_mean):
        assert tensor.dtype == torch.float32
    assert rounded.loss.item() == pytest.approx(exact.loss.item(), rel=0.02)
    torch.testing.assert_close(rounded.patch_mean, exact.patch_mean, rtol=0, atol=0.02)
    assert torch.cosine_similarity(again.flatten(), gradient.flatten(), dim=0) > 0.95


def test_places_of_patches_in_the_image() -> None:
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0], [0.5, 0.25, 0.5, 0.5, 1.0]])
    whole, flipped = patch_places(boxes, 4)
    assert whole.tolist() == [[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]]
    # The right half, mirrored: its first patch shows the right of it.
    assert flipped.tolist() == [[0.875, 0.375], [0.625, 0.375], [0.875, 0.625], [0.625, 0.625]]


@pytest.mark.parametrize("objective", ["position", "feature"])
def test_dense_self_distillation(objective: str) -> None:
    """Every patch learns from its nearest one in the other view, by a loop."""
    settings = tiny(patch_objective=objective, local_crops=0, cls_weight=0.0)
    student, ibot = ready(settings)
    nn.init.normal_(student.trunk.backbone.net.pos_embed)  # type: ignore[union-attr]
    batch = noise(settings)
    found = ibot.losses(batch, Temperatures(0.04, 0.05))
    with torch.no_grad():
        seen, asked = student.trunk(batch.globals), ibot.teacher.trunk(batch.globals)
        logits = student.head.forward_patches(seen.patches) / 0.1
        targets = (ibot.teacher.head.forward_patches(asked.patches) / 0.05).softmax(-1)
        per_crop = []
        for crop in range(4):
            other = (crop + 2) % 4  # two images, two crops, crop-major
            terms = []
            for patch in range(16):
                if objective == "feature":
                    one, others = seen.patches[crop, patch].expand(16, -1), asked.patches[other]
                    near = int(torch.cosine_similarity(one, others, dim=1).argmax())
                else:
                    assert batch.boxes is not None
                    places = patch_places(batch.boxes, 16)
                    near = int((places[crop, patch] - places[other]).norm(dim=1).argmin())
                    x, y = places[crop, patch].tolist()
                    left, top, width, height, _ = batch.boxes[other].tolist()
                    if not (left <= x <= left + width and top <= y <= top + height):
                        continue  # the other view does not show it
                terms.append(nn.functional.cross_entropy(logits[crop, patch], targets[other, near]))
            per_crop.append(torch.stack(terms).mean() if terms else torch.tensor(0.0))
    torch.testing.assert_close(found.patch_loss, torch.stack(per_crop).mean())


def test_masked_local_crops() -> None:
    """Figure 7c: every crop counts alike, and the centre is that of all patches the teacher saw."""
    settings = tiny(mask_crops="all", local_crops=3, cls_weight=0.0)
    student, ibot = ready(settings)
    batch = noise(settings)
    found = ibot.losses(batch, Temperatures(0.04, 0.05))
    assert batch.locals is not None
    assert batch.masks is not None
    assert batch.local_masks is not None
    per_crop, every = [], []
    with torch.no_grad():
        for images, masks in ((batch.globals, batch.masks), (batch.locals, batch.local_masks)):
            asked = ibot.teacher.head.forward_patches(ibot.teacher.trunk(images).patches)
            given = student.head.forward_patches(student.trunk(images, masks).patches)
            every.append(asked.flatten(0, 1))
            for target, logits, mask in zip((asked / 0.05).softmax(-1), given / 0.1, masks.flatten(1), strict=True):
                tokens = nn.functional.cross_entropy(logits[mask], target[mask]) if mask.any() else torch.tensor(0.0)
                per_crop.append(tokens)
    assert len(per_crop) == 10
    torch.testing.assert_close(found.patch_loss, torch.stack(per_crop).mean())
    assert found.patch_mean is not None
    torch.testing.assert_close(found.patch_mean, torch.cat(every).mean(0), rtol=1e-5, atol=1e-6)
