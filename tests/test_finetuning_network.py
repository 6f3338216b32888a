"""ibot_eval.finetuning.network and .adaptation, against timm's own networks with the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.beit import Beit
from torch import Tensor, nn
from torch.nn import functional as F

from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.adaptation import blocks_of
from ibot_eval.finetuning.network import Classifier, build_classifier
from ibot_eval.heads import ProjectionHead
from ibot_eval.models import wrap
from ibot_eval.models.relative_bias import resize_bias_table
from ibot_eval.own_network import from_module
from ibot_eval.settings import CheckpointSettings
from tests import layouts


def load(net: nn.Module, family: str = "ibot") -> LoadedCheckpoint:
    return from_module(wrap(net, family=family))


def images(size: int = 32, count: int = 3) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


def small_swin(**changes: Any) -> Any:
    return layouts.swin(img_size=64, window_size=2, **changes)


def shared_beit(**changes: Any) -> Any:
    return layouts.beit(use_rel_pos_bias=False, use_shared_rel_pos_bias=True, **changes)


def like_timm(model: Classifier, reference: Any) -> Any:
    """timm's own network, with the tensors of the classifier."""
    head = "head.fc" if hasattr(reference.head, "fc") else "head"
    tensors = {**model.backbone.net.state_dict(), **{f"{head}.{n}": t for n, t in model.head.state_dict().items()}}  # pyright: ignore
    reference.load_state_dict(tensors)
    return reference


CASES: dict[str, tuple[Any, Any, int, Any]] = {
    "vit cls": (layouts.vit(), layouts.vit(num_classes=5), 32, "cls"),
    "vit mean": (layouts.vit(), layouts.vit(num_classes=5, global_pool="avg"), 32, "mean"),
    "vit registers mean": (
        layouts.vit(reg_tokens=2, init_values=0.1),
        layouts.vit(reg_tokens=2, init_values=0.1, num_classes=5, global_pool="avg"),
        32,
        "mean",
    ),
    "beit cls": (layouts.beit(global_pool="token"), layouts.beit(num_classes=5, global_pool="token"), 32, "cls"),
    "beit mean": (layouts.beit(global_pool="token"), layouts.beit(num_classes=5, global_pool="avg"), 32, "mean"),
    "beit from mean to cls": (layouts.beit(), layouts.beit(num_classes=5, global_pool="token"), 32, "cls"),
    "shared beit": (shared_beit(), shared_beit(num_classes=5), 32, "mean"),
    "swin": (small_swin(), small_swin(num_classes=5, drop_path_rate=0.0), 64, "cls"),
    "dinov3": (layouts.eva(), layouts.eva(num_classes=5), 32, "cls"),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_timms(case: str):
    net, reference, size, pooling = CASES[case]
    model = build_classifier(from_module(net), 5, size, pooling=pooling, head_scale=1.0)
    like_timm(model, reference).train()
    x, labels = images(size), torch.tensor([0, 3, 4])
    logits, expected = model(x), reference(x)
    torch.testing.assert_close(logits, expected)
    F.cross_entropy(logits, labels).backward()
    F.cross_entropy(expected, labels).backward()
    gradients = {name: p.grad for name, p in model.backbone.net.named_parameters()}  # pyright: ignore
    for name, parameter in reference.named_parameters():
        if not name.startswith("head"):
            assert gradients[name] is not None, name
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_checkpoint_is_left_as_it_is():
    loaded = load(layouts.vit())
    before = {name: tensor.clone() for name, tensor in loaded.backbone.state_dict().items()}
    model = build_classifier(loaded, 5, 48, pooling="mean", layer_scale=0.1, positions="relative", drop_path=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    after = loaded.backbone.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(hasattr(block.drop_path1, "drop_prob") for block in blocks_of(loaded.backbone))


@pytest.mark.parametrize("family", ["ibot", "mae", "timm"])
def test_positions_are_resized_once_by_the_familys_rule(family: str):
    loaded = load(layouts.vit(), family)
    model = build_classifier(loaded, 5, 48)
    backbone: Any = model.backbone
    assert backbone.trained_grid == (6, 6)
    assert backbone.net.pos_embed.shape == (1, 37, 48)
    assert backbone.net.pos_embed.requires_grad
    assert not backbone.keep_positions
    with torch.no_grad():
        expected = loaded.backbone.outputs(images(48), norm="final").blocks[0].cls
        torch.testing.assert_close(model.features(images(48)), expected)
    model(images(48)).logsumexp(1).sum().backward()
    assert backbone.net.pos_embed.grad.abs().min() > 0


@pytest.mark.parametrize("net", [layouts.beit(use_abs_pos_emb=True), shared_beit()], ids=["own", "shared"])
def test_relative_tables_are_resized_once(net: Any):
    loaded = from_module(net)
    model = build_classifier(loaded, 5, 48, pooling="mean")
    holder = net.rel_pos_bias or net.blocks[0].attn
    expected = resize_bias_table(holder.relative_position_bias_table, (4, 4), (6, 6))
    own: Any = model.backbone.net
    resized = own.rel_pos_bias or own.blocks[0].attn
    torch.testing.assert_close(resized.relative_position_bias_table.data, expected)
    with torch.no_grad():
        patches = loaded.backbone.outputs(images(48), norm="none").blocks[0].patches
        torch.testing.assert_close(model.features(images(48)), loaded.backbone.final_norm(patches.mean(dim=(1, 2))))
    model(images(48)).logsumexp(1).sum().backward()
    assert resized.relative_position_bias_table.grad.abs().sum() > 0


def test_a_swin_keeps_its_windows_at_another_size():
    loaded = from_module(small_swin())
    model = build_classifier(loaded, 5, 96)
    with torch.no_grad():
        expected = loaded.backbone.outputs(images(96), norm="final").blocks[0].cls
        torch.testing.assert_close(model.features(images(96)), expected)


@pytest.mark.parametrize(("net", "size"), [(layouts.vit(depth=4), 32), (small_swin(), 64), (layouts.eva(), 32)])
def test_stochastic_depth_grows_linearly(net: Any, size: int):
    model = build_classifier(from_module(net), 5, size, drop_path=0.3)
    blocks = blocks_of(model.backbone)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    assert rates == pytest.approx([0.3 * index / (len(blocks) - 1) for index in range(len(blocks))])
    assert rates == [getattr(block.drop_path2, "drop_prob", 0.0) for block in blocks]


def test_stochastic_depth_of_an_earlier_training_is_replaced():
    model = build_classifier(from_module(layouts.vit(drop_path_rate=0.5)), 5, 32)
    torch.testing.assert_close(model(images()), model(images()))


def test_plain_vit_given_relative_positions_computes_the_same():
    loaded = load(layouts.vit(init_values=0.1))
    plain = build_classifier(loaded, 5, 32, head_scale=1.0)
    model = build_classifier(loaded, 5, 32, head_scale=1.0, positions="relative")
    net: Any = model.backbone.net
    assert type(net) is Beit
    assert blocks_of(model.backbone)[1].attn.relative_position_bias_table.shape == (7 * 7 + 3, 3)
    torch.testing.assert_close(model(images()), plain(images()))
    torch.testing.assert_close(model.backbone.mean, loaded.backbone.mean)
    model(images()).logsumexp(1).sum().backward()
    tables = [block.attn.relative_position_bias_table for block in blocks_of(model.backbone)]
    assert all(table.grad.abs().sum() > 0 for table in tables)


def test_relative_positions_at_another_size():
    loaded = load(layouts.vit())
    plain = build_classifier(loaded, 5, 48, head_scale=1.0, pooling="mean")
    model = build_classifier(loaded, 5, 48, head_scale=1.0, pooling="mean", positions="relative")
    torch.testing.assert_close(model(images(48)), plain(images(48)))


def test_a_table_that_blocks_share_becomes_one_for_each():
    loaded = from_module(shared_beit())
    model = build_classifier(loaded, 5, 32, positions="relative", pooling="mean", head_scale=1.0)
    torch.testing.assert_close(
        model(images()), build_classifier(loaded, 5, 32, pooling="mean", head_scale=1.0)(images())
    )
    net: Any = model.backbone.net
    tables = [block.attn.relative_position_bias_table for block in net.blocks]
    assert net.rel_pos_bias is None
    assert torch.equal(tables[0], tables[1])
    assert tables[0].data_ptr() != tables[1].data_ptr()


@pytest.mark.parametrize("net", [layouts.beit(), small_swin()], ids=["beit", "swin"])
def test_relative_positions_that_are_there_are_kept(net: Any):
    size = 64 if hasattr(net, "layers") else 32
    model = build_classifier(from_module(net), 5, size, positions="relative", pooling="mean")
    tables = {name: t for name, t in net.state_dict().items() if name.endswith("bias_table")}
    own = model.backbone.net.state_dict()  # pyright: ignore
    assert tables
    assert all(torch.equal(table, own[name]) for name, table in tables.items())


@pytest.mark.parametrize("net", [layouts.vit(), layouts.beit(init_values=None)], ids=["vit", "beit"])
def test_layer_scale_is_added(net: Any):
    loaded = from_module(net)
    model = build_classifier(loaded, 5, 32, layer_scale=0.1, pooling="mean")
    added = {n: p for n, p in model.named_parameters() if "gamma" in n}
    assert len(added) == 4
    assert all(torch.equal(p, torch.full((48,), 0.1)) and p.requires_grad for p in added.values())
    unscaled = build_classifier(loaded, 5, 32, pooling="mean")
    with torch.no_grad():
        difference = (model.features(images()) - unscaled.features(images())).abs().max()
        for gamma in added.values():
            gamma.fill_(1.0)
        torch.testing.assert_close(model.features(images()), unscaled.features(images()))
    assert difference > 0.1


def test_layer_scale_that_is_there_is_kept():
    net = layouts.vit(init_values=0.1)
    model = build_classifier(from_module(net), 5, 32, layer_scale=0.3)
    assert torch.equal(model.backbone.net.blocks[0].ls1.gamma, net.blocks[0].ls1.gamma)  # pyright: ignore


def test_new_head():
    loaded = load(layouts.vit())
    state = torch.get_rng_state()
    model = build_classifier(loaded, 1000, 32, seed=1, layer_scale=0.1, positions="relative", drop_path=0.1)
    assert torch.equal(torch.get_rng_state(), state)  # nobody's generator was used
    weight = model.head.weight / 0.001
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert weight.abs().max() < 0.12
    assert not model.head.bias.any()
    assert torch.equal(build_classifier(loaded, 1000, 32, seed=1).head.weight, model.head.weight)
    assert not torch.equal(build_classifier(loaded, 1000, 32, seed=2).head.weight, model.head.weight)


def test_classifier_is_ready_to_train():
    model = build_classifier(load(layouts.vit()), 5, 32)
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())


def test_first_layers_of_the_projection_head():
    loaded = load(layouts.vit())
    loaded.projection_head = ProjectionHead(48, 10, hidden=16, bottleneck=6, batch_norm=True)
    one = build_classifier(loaded, 5, 32, head_layers=1)
    two = build_classifier(loaded, 5, 32, head_layers=2)
    features = one.features(images())
    assert one.projection is not None
    assert two.projection is not None
    assert one.head.in_features == 16
    published = copy.deepcopy(loaded.projection_head.mlp)[:3]
    torch.testing.assert_close(one.projection(features), published(features))
    assert [type(layer) for layer in two.projection] == [nn.Linear, nn.BatchNorm1d, nn.GELU] * 2
    torch.testing.assert_close(one(images()), one.head(one.projection(features)))
    next(one.projection.parameters()).data.zero_()
    assert next(loaded.projection_head.mlp.parameters()).any()


@pytest.mark.parametrize("layers", [-1, 3])
def test_layers_that_the_projection_head_has_not_are_refused(layers: int):
    loaded = load(layouts.vit())
    loaded.projection_head = ProjectionHead(48, 10, hidden=16, bottleneck=6)
    with pytest.raises(ConfigError, match="2 hidden"):
        build_classifier(loaded, 5, 32, head_layers=layers)


def test_projection_layers_of_a_file_without_a_head_are_refused():
    with pytest.raises(ConfigError, match="no projection head"):
        build_classifier(load(layouts.vit()), 5, 32, head_layers=1)


def test_first_layer_of_a_published_head(tmp_path: Path):
    torch.save(layouts.ibot_full(layouts.vit(1), layouts.vit(2)), tmp_path / "checkpoint.pth")
    loaded = load_checkpoint(CheckpointSettings(ckpt=str(tmp_path / "checkpoint.pth"), heads=3))
    model = build_classifier(loaded, 5, 48, head_layers=1)
    state = layouts.projection_head(seed=2)
    expected = F.gelu(F.linear(model.features(images(48)), state["mlp.0.weight"], state["mlp.0.bias"]))
    assert model.projection is not None
    torch.testing.assert_close(model.projection(model.features(images(48))), expected)


def step(model: Classifier, size: int = 32) -> dict[str, Tensor]:
    """What moved in one step, by how much relative to its scale."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    F.cross_entropy(model(images(size)), torch.tensor([0, 3, 4])).backward()
    torch.optim.AdamW(trained, lr=1e-2).step()
    return {name: (p.detach() - before[name]).norm() / before[name].norm() for name, p in model.named_parameters()}


def test_frozen_blocks_do_not_move_and_all_others_do():
    model = build_classifier(load(layouts.vit(depth=4)), 5, 32, freeze_blocks=2, head_scale=1.0)
    moved = step(model)
    frozen = {name for name, much in moved.items() if much == 0}
    still = ("cls_token", "pos_embed", "patch_embed", "blocks.0.", "blocks.1.")
    assert frozen == {name for name in moved if name.removeprefix("backbone.net.").startswith(still)}


def test_frozen_stages_of_a_swin():
    model = build_classifier(from_module(small_swin()), 5, 64, freeze_blocks=2, head_scale=1.0)
    frozen = {name.removeprefix("backbone.net.") for name, much in step(model, 64).items() if much == 0}
    assert {".".join(name.split(".")[:2]) for name in frozen} == {
        *("patch_embed.proj", "patch_embed.norm", "layers.0", "layers.1")
    }
    assert all("downsample" in name for name in frozen if name.startswith("layers.1"))


@pytest.mark.parametrize(
    ("net", "size"),
    [
        (layouts.vit(reg_tokens=2), 32),
        (layouts.beit(use_abs_pos_emb=True), 32),
        (shared_beit(), 32),
        (layouts.eva(), 32),
        (small_swin(), 64),
    ],
    ids=["vit", "beit", "shared beit", "dinov3", "swin"],
)
def test_frozen_blocks_compute_what_they_did(net: Any, size: int):
    """Whatever is trained: their own weights, what comes before them and what they share with later ones."""
    model = build_classifier(from_module(net), 5, size, freeze_blocks=1, pooling="cls")
    before = model.backbone.outputs(images(size), blocks=(0,), norm="none").blocks[0].patches
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    after = model.backbone.outputs(images(size), blocks=(0,), norm="none").blocks[0].patches
    assert torch.equal(before, after)
    assert any(p.requires_grad for name, p in model.named_parameters() if "head" not in name)


def test_every_parameter_of_every_layer_moves():
    moved = step(build_classifier(load(layouts.vit(depth=4)), 5, 32, head_scale=1.0))
    assert min(moved[name] for name in moved if name != "head.bias") > 1e-3


def test_blocks_recomputed_in_the_backward_pass_give_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = build_classifier(load(layouts.vit()), 5, 32, drop_path=0.5, head_scale=1.0, pooling="mean")
        model.backbone.checkpoint_blocks = recompute
        F.cross_entropy(model(images()), torch.tensor([0, 3, 4])).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def finetuned(classes: int = 5) -> LoadedCheckpoint:
    loaded = load(layouts.vit())
    loaded.classifier = nn.Linear(48, classes)
    loaded.report.classifier = {"classes": classes, "input": "cls"}
    return loaded


def test_finetuned_checkpoints_are_refused_unless_asked_for():
    with pytest.raises(ConfigError, match=r"(?s)has a classifier.*--from-finetuned"):
        build_classifier(finetuned(), 5, 32)
    model = build_classifier(finetuned(), 3, 32, allow_finetuned=True)
    assert model.classes == 3
    assert not model.head.bias.any()


def test_head_of_a_finetuned_checkpoint_is_kept_when_asked_for():
    loaded = finetuned()
    assert isinstance(loaded.classifier, nn.Linear)
    model = build_classifier(loaded, 5, 32, allow_finetuned=True, keep_head=True)
    assert torch.equal(model.head.weight, loaded.classifier.weight)
    assert model.head.weight.data_ptr() != loaded.classifier.weight.data_ptr()
    with pytest.raises(ConfigError, match=r"5 classes.*3 classes"):
        build_classifier(loaded, 3, 32, allow_finetuned=True, keep_head=True)
    with pytest.raises(ConfigError, match="none"):
        build_classifier(load(layouts.vit()), 5, 32, keep_head=True)


@pytest.mark.parametrize(
    ("net", "settings", "words"),
    [
        (layouts.resnet(), {}, "cannot be fine-tuned"),
        (layouts.vit(class_token=False, global_pool="avg"), {"pooling": "cls"}, "no \\[CLS\\]"),
        (layouts.vit(reg_tokens=2), {"positions": "relative"}, "no plain ViT"),
        (layouts.vit(qk_norm=True), {"positions": "relative"}, "no plain ViT"),
        (layouts.eva(), {"positions": "relative"}, "no plain ViT"),
        (layouts.eva(), {"pooling": "mean"}, "not supported"),
        (small_swin(), {"layer_scale": 0.1, "image_size": 64}, "no place for LayerScale"),
        (layouts.vit(), {"layer_scale": -0.1}, "not above 0"),
        (layouts.vit(), {"image_size": 36}, "cannot be cut"),
        (layouts.vit(), {"drop_path": 1.0}, "stochastic depth"),
        (layouts.vit(), {"freeze_blocks": 3}, "has 2"),
    ],
)
def test_what_cannot_be_is_refused(net: nn.Module, settings: dict[str, Any], words: str):
    settings = {"image_size": 32, **settings}
    with pytest.raises(ConfigError, match=words):
        build_classifier(from_module(net), 5, **settings)
