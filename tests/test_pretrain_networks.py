"""Student and teacher: how they start, masks, frozen parts, checkpointing, precision, Swin, and tokenizers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.heads import ProjectionHead
from pretrain.config import NetworkSettings, PretrainSettings
from pretrain.ibot import IBOT, Temperatures, Views, patch_places
from pretrain.networks import Network, Student, Trunk, build, build_backbone, embed_width, freeze_unused, mask_cell
from pretrain.setup import check_cells, masking_of, online_tokenizer
from pretrain.tokenizers import FrozenTokenizer, OnlineTokenizer
from tests import fakes
from tests.pretraining import published, tiny, views
from tests.published_network import Network as PublishedNetwork

SWIN = {"arch": "swin_tiny", "width": None, "depth": None, "heads": None, "patch_size": None, "local_crops": 0}
SHARINGS = ("vanilla", "shared", "semi-shared", "semi-shared-2")


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


def test_gradients_of_a_swin_whose_windows_are_masked() -> None:
    """An embedding of zeros gives gradients up to infinity, see networks.build."""
    settings = tiny(**SWIN)
    student, ibot = _ready(settings)
    assert torch.equal(student.trunk.masked_embed, ibot.teacher.trunk.masked_embed)
    batch = _noise(settings)
    assert batch.masks is not None
    assert batch.masks.flatten(1).all(1).any(), "a whole crop is masked"
    ibot.losses(batch, Temperatures(0.04, 0.04)).loss.backward()
    assert max(p.grad.norm() for p in student.parameters() if p.grad is not None) < 1e6


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
    student, ibot = _ready(settings)
    trained = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    ibot.losses(_noise(settings, empty=empty), Temperatures(0.04, 0.05)).loss.backward()
    assert [name for name, p in trained if p.grad is None] == []
    assert all(p.grad is None for p in student.parameters() if not p.requires_grad)
    if not empty and "norm_last_layer" not in flags:
        # Nothing is frozen that would learn, and nothing trained that never could. (Lengths do not learn when all
        # outputs move alike; a key's bias never does.)
        assert [name for name, p in trained if p.grad is not None and not p.grad.any()] == []


def test_frozen_parts() -> None:
    def frozen(**flags: Any) -> set[str]:
        student, _ = _ready(tiny(norm_last_layer=False, **flags))
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
    _, ibot = _ready(settings)
    found = ibot.losses(_noise(settings, empty=empty), Temperatures(0.04, 0.04))
    assert (found.patch_loss.item() == 0) is empty
    assert torch.isfinite(found.loss)
    assert (found.loss.item() == found.cls_loss.item()) is empty


@pytest.mark.parametrize("arch", ["vit", "swin"])
def test_checkpointing_changes_no_gradient(arch: str) -> None:
    settings = tiny(drop_path=0.2)
    student, ibot = _ready(settings)
    if arch == "swin":
        settings = tiny(drop_path=0.2, **SWIN)
        student, ibot = _ready(settings)
    gradients = []
    student.train()
    for checkpointed in (False, True):
        student.backbone.checkpoint_blocks = checkpointed
        student.zero_grad()
        torch.manual_seed(0)
        ibot.losses(_noise(settings), Temperatures(0.04, 0.04)).loss.backward()
        gradients.append([p.grad for p in student.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-7)


def test_bfloat16_comes_close() -> None:
    settings = tiny(width=48)
    student, ibot = _ready(settings)
    batch, temperatures = _noise(settings), Temperatures(0.07, 0.07)
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


def test_frozen_tokenizer_asks_its_own_backbone() -> None:
    backbone, head = _tokenizer_parts()
    tokenizer = FrozenTokenizer(fakes.fake_loaded(backbone, head), torch.device("cpu"))
    assert (tokenizer.num_words, tokenizer.cell) == (20, 8)
    images = torch.randn(2, 3, 32, 32)
    _, teacher = build(tiny())
    outputs = tokenizer.patches(images, teacher.trunk(images))
    tokens = backbone.outputs(images, norm="final").blocks[-1].patches
    expected = head.forward_patches(tokens.flatten(1, 2))
    torch.testing.assert_close(outputs.mean(), expected.mean((0, 1)))
    torch.testing.assert_close(outputs.logits_at(torch.arange(32)), expected.flatten(0, 1))


def test_step_with_a_frozen_tokenizer_of_another_k() -> None:
    backbone, head = _tokenizer_parts()
    tokenizer = FrozenTokenizer(fakes.fake_loaded(backbone, head), torch.device("cpu"))
    settings = tiny()
    student, teacher = build(settings, tokenizer.num_words)
    freeze_unused(student, settings)
    assert student.head.patch_prototypes == 20
    assert teacher.head.patch_prototypes == 32
    assert check_cells(tokenizer, student) is tokenizer
    found = IBOT(student, teacher, tokenizer, settings.objective, torch.device("cpu")).losses(
        _noise(settings), Temperatures(0.04, 0.04)
    )
    assert found.patch_targets is not None
    assert found.patch_targets.probabilities.shape[1] == 20
    found.loss.backward()
    assert all(p.grad is not None for p in student.parameters() if p.requires_grad)
    assert all(p.grad is None for p in tokenizer.backbone.parameters())


def test_tokenizer_that_does_not_fit() -> None:
    with pytest.raises(CheckpointError, match="no projection head"):
        FrozenTokenizer(fakes.fake_loaded(), torch.device("cpu"))
    backbone, head = _tokenizer_parts()
    tokenizer = FrozenTokenizer(fakes.fake_loaded(backbone, head), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"cells of 8 px and the student into 4 px(.|\n)*--patch-size 8"):
        check_cells(tokenizer, build(tiny(patch_size=4))[0])


def test_online_tokenizer_only_where_patches_have_a_loss() -> None:
    _, teacher = build(tiny())
    assert online_tokenizer(tiny(patch_weight=0.0), teacher) is None
    assert isinstance(online_tokenizer(tiny(), teacher), OnlineTokenizer)


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
    student, ibot = _ready(settings)
    nn.init.normal_(student.trunk.backbone.net.pos_embed)  # type: ignore[union-attr]
    batch = _noise(settings)
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
    student, ibot = _ready(settings)
    batch = _noise(settings)
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


def _ready(settings: PretrainSettings) -> tuple[Student, IBOT]:
    student, teacher = build(settings)
    freeze_unused(student, settings)
    teacher.eval()
    tokenizer = online_tokenizer(settings, teacher)
    return student, IBOT(student, teacher, tokenizer, settings.objective, torch.device("cpu"))


def _noise(settings: PretrainSettings, *, empty: bool = False) -> Views:
    """Two images' crops as the loader would give them, some or no patches masked."""
    generator = torch.Generator().manual_seed(1)
    crops = settings.crops
    cell = (settings.network.patch_size or 16) if settings.network.arch == "vit" else 32

    def images(count: int, side: int) -> list[Tensor]:
        return [torch.randn(2, 3, side, side, generator=generator) for _ in range(count)]

    def masks(count: int, side: int) -> list[Tensor] | None:
        if masking_of(settings) is None:
            return None
        grid = side // cell
        drawn = [torch.rand(2, grid, grid, generator=generator) < 0.5 for _ in range(count)]
        for mask in drawn:
            mask[0, 0, 0] = True
        return [mask & False for mask in drawn] if empty else drawn

    batch = views(
        images(crops.global_crops, crops.global_size),
        images(crops.local_crops, crops.local_size),
        masks(crops.global_crops, crops.global_size),
    )
    if settings.masks.mask_crops == "all":
        small = views(images(crops.local_crops, crops.local_size), [], masks(crops.local_crops, crops.local_size))
        batch.locals, batch.local_masks = small.globals, small.masks
        batch.local_positions, batch.local_weights = small.positions, small.weights
    if settings.objective.patch_objective == "position":
        # Generic places, so that no two patches are equally far.
        batch.boxes = 32 * torch.rand(2 * crops.global_crops, 5, generator=generator)
        batch.boxes[:, 4] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    return batch


def _tokenizer_parts() -> tuple[Any, ProjectionHead]:
    """An 8-pixel backbone and a head with 20 words, as a checkpoint would give them."""
    torch.manual_seed(9)
    network = build(tiny(width=12, depth=1, seed=8))[1]
    assert isinstance(network, Network)
    head = ProjectionHead(12, 20, hidden=16, bottleneck=8).requires_grad_(False)
    return network.backbone.eval(), head
