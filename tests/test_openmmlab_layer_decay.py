"""protocols.openmmlab.layer_decay: optimisers that mmengine builds, against golden scales and the core's rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.beit import Beit
from torch import nn

from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.layer_decay import layer_scales as core_scales
from ibot_eval.finetuning.network import build_classifier
from ibot_eval.own_network import from_module
from ibot_eval.settings import CheckpointSettings
from tests import layouts

pytest.importorskip("mmengine")

from mmengine.optim import build_optim_wrapper

from protocols.openmmlab.backbone import CheckpointBackbone, hand_over
from protocols.openmmlab.layer_decay import layer_scales

GOLDEN = json.loads((Path(__file__).parent / "golden" / "layer_decay.json").read_text())
BODY = "backbone.body.net."


class Model(nn.Module):
    """As much of a detector as an optimiser sees."""

    def __init__(self, net: nn.Module, **arguments: Any) -> None:
        super().__init__()
        hand_over(CheckpointSettings(ckpt="given"), from_module(net))
        self.backbone = CheckpointBackbone({"ckpt": "given"}, **arguments)
        self.neck = nn.Conv2d(4, 4, 1)


def optimiser(model: nn.Module, decay: float = 0.75, weight_decay: float = 0.05) -> Any:
    adamw = {"type": "AdamW", "lr": 1e-4, "weight_decay": weight_decay}
    wrapper: Any = {"optimizer": adamw, "constructor": "LayerDecayConstructor", "paramwise_cfg": {"layer_decay": decay}}
    return build_optim_wrapper(model, wrapper).optimizer


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group for group in groups for name in group["param_names"]}


def test_scales_are_the_published_ones():
    groups = by_name(optimiser(Model(layouts.vit(depth=4), norm=True)).param_groups)
    scales = {name: group["lr_scale"] for name, group in groups.items()}
    expected = {BODY + name: scale for name, scale in GOLDEN["vit_depth4_0.75"].items() if "head" not in name}
    assert {name: scales[name] for name in expected} == pytest.approx(expected)
    rest = set(scales) - set(expected)
    assert {name.split(".")[0] for name in rest} == {"backbone", "neck"}
    assert any("pyramid" in name for name in rest)
    assert {scales[name] for name in rest} == {1.0}
    for group in groups.values():
        assert group["lr"] == pytest.approx(1e-4 * group["lr_scale"])


@pytest.mark.parametrize(
    "net",
    [
        layouts.vit(depth=4, reg_tokens=2, init_values=0.1),
        layouts.beit(use_abs_pos_emb=True),
        layouts.beit(use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
        layouts.swin(depths=(2, 2, 6, 2), img_size=64, window_size=2),
    ],
    ids=["vit", "beit", "shared", "swin"],
)
def test_scales_are_those_of_fine_tuning(net: nn.Module):
    scales = layer_scales(Model(net), 0.5)
    pooling = "mean" if isinstance(net, Beit) else "cls"
    expected = core_scales(build_classifier(from_module(net), 5, 64, pooling=pooling), 0.5)
    found = {name.removeprefix(BODY): scale for name, scale in scales.items() if name.startswith(BODY)}
    assert found == {name: scale for name, scale in expected.items() if not name.startswith("head.")}


def test_scales_of_a_resnet_count_residual_blocks():
    scales = layer_scales(Model(layouts.resnet(layers=(1, 2, 1, 1))), 0.5)
    layers = {"conv1.weight": 0, "layer1.0.conv1.weight": 1, "layer2.1.bn2.weight": 3, "layer4.0.conv3.weight": 5}
    assert {name: scales[BODY + name] for name in layers} == {n: 0.5 ** (6 - layer) for n, layer in layers.items()}


def test_biases_vectors_tokens_and_positions_are_not_decayed():
    groups = by_name(optimiser(Model(layouts.beit(use_abs_pos_emb=True))).param_groups)
    kept = {name for name, group in groups.items() if group["weight_decay"] == 0}
    expected = {
        name
        for name, parameter in Model(layouts.beit(use_abs_pos_emb=True)).named_parameters()
        if parameter.ndim < 2 or name.split(".")[-1] in ("cls_token", "pos_embed", "relative_position_bias_table")
    }
    assert kept == expected & set(groups)
    assert len(kept) > 10
    assert {groups[name]["weight_decay"] for name in set(groups) - kept} == {0.05}
    assert f"{BODY}cls_token" in kept
    assert f"{BODY}blocks.0.attn.relative_position_bias_table" in kept


def test_every_trained_parameter_is_in_one_group():
    model = Model(layouts.vit(depth=4), frozen=2)
    groups = optimiser(model).param_groups
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert not any(".blocks.1." in name or "embed" in name for name in by_name(groups))


def test_one_rate_without_decay():
    groups = optimiser(Model(layouts.vit(depth=4)), decay=1.0).param_groups
    assert sorted((group["lr"], group["weight_decay"]) for group in groups) == [(1e-4, 0.0), (1e-4, 0.05)]


def test_first_step_of_adamw_is_the_rate_of_the_layer():
    model = Model(layouts.vit(depth=4, img_size=64, patch_size=16), pyramid_norm="BN")
    optimizer = optimiser(model, weight_decay=0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    images = torch.randn(2, 3, 64, 64)
    sum(level.square().sum() for level in model.backbone(images)).backward()
    optimizer.step()
    moved = {name: (p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters()}
    for name, layer in (("patch_embed.proj.weight", 0), ("blocks.0.mlp.fc1.weight", 1), ("blocks.3.mlp.fc2.weight", 4)):
        assert moved[BODY + name] == pytest.approx(1e-4 * 0.75 ** (5 - layer), rel=1e-2)
    assert moved["backbone.pyramid.steps.1.0.weight"] == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("decay", [0.0, 1.5, -1.0])
def test_decay_outside_its_range_is_refused(decay: float):
    with pytest.raises(ConfigError, match="layer decay"):
        optimiser(Model(layouts.vit()), decay=decay)


def test_nothing_to_train_is_refused():
    model = Model(layouts.vit()).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        optimiser(model)
