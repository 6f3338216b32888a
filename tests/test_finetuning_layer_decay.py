"""ibot_eval.finetuning.layer_decay against the golden scales, the published rules by hand, and timm's groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim._param_groups import param_groups_weight_decay
from torch import nn

from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.layer_decay import layer_scales, optimiser_groups
from ibot_eval.finetuning.network import Classifier, build_classifier
from ibot_eval.heads import ProjectionHead
from ibot_eval.own_network import from_module
from ibot_eval.training.updates import adamw
from tests import layouts

GOLDEN = json.loads((Path(__file__).parent / "golden" / "layer_decay.json").read_text())


def classifier(net: nn.Module, size: int = 32, **settings: Any) -> Classifier:
    return build_classifier(from_module(net), 5, size, **settings)


def small_swin(depths: tuple[int, ...] = (2, 2, 6, 2)) -> nn.Module:
    return layouts.swin(depths=depths, img_size=64, window_size=2)


def named_groups(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group for group in groups for name in group["names"]}


def test_scales_are_the_published_ones():
    assert layer_scales(classifier(layouts.vit(depth=4)), 0.75) == GOLDEN["vit_depth4_0.75"]


def test_all_scales_are_1_without_decay():
    assert set(layer_scales(classifier(layouts.vit()), 1.0).values()) == {1.0}


def test_scales_of_a_swin_count_blocks_through_the_stages():
    scales = layer_scales(classifier(small_swin(), 64), 0.5)
    # iBOT's get_num_layer_for_swin: merging, which closes a stage there, has the number of that stage's last block.
    layers = {"patch_embed.proj.weight": 0, "patch_embed.norm.weight": 0}
    layers |= {f"layers.0.blocks.{b}.attn.qkv.weight": b + 1 for b in range(2)}
    layers |= {f"layers.1.blocks.{b}.norm1.bias": b + 3 for b in range(2)}
    layers |= {f"layers.2.blocks.{b}.mlp.fc1.weight": b + 5 for b in range(6)}
    layers |= {f"layers.3.blocks.{b}.attn.relative_position_bias_table": b + 11 for b in range(2)}
    layers |= {f"layers.{stage}.downsample.norm.weight": last for stage, last in ((1, 2), (2, 4), (3, 10))}
    layers |= {f"layers.{stage}.downsample.reduction.weight": last for stage, last in ((1, 2), (2, 4), (3, 10))}
    layers |= {"norm.weight": 13, "norm.bias": 13, "head.weight": 13}
    assert {name: scales[name] for name in layers} == {name: 0.5 ** (13 - layer) for name, layer in layers.items()}


def test_scales_of_relative_positions():
    shared = classifier(layouts.beit(use_rel_pos_bias=False, use_shared_rel_pos_bias=True))
    scales = layer_scales(shared, 0.5)
    assert scales["rel_pos_bias.relative_position_bias_table"] == 1.0  # the published code counts it to the head
    assert scales["blocks.1.gamma_1"] == scales["blocks.1.attn.q_bias"] == 0.5
    own = layer_scales(classifier(layouts.beit()), 0.5)
    assert own["blocks.0.attn.relative_position_bias_table"] == 0.25


def test_projection_layers_and_registers_have_places():
    loaded = from_module(layouts.vit(reg_tokens=2))
    loaded.projection_head = ProjectionHead(48, 10, hidden=16, bottleneck=6)
    scales = layer_scales(build_classifier(loaded, 5, 32, head_layers=1, pooling="mean"), 0.5)
    assert scales["reg_token"] == 0.125
    assert scales["projection.0.weight"] == scales["fc_norm.weight"] == scales["head.bias"] == 1.0


@pytest.mark.parametrize(
    ("net", "size"),
    [(layouts.vit(reg_tokens=2, init_values=0.1), 32), (layouts.beit(use_abs_pos_emb=True), 32), (small_swin(), 64)],
    ids=["vit", "beit", "swin"],
)
def test_decayed_parameters_are_those_that_timm_decays(net: Any, size: int):
    model = classifier(net, size)
    trained: Any = model.backbone.net
    kept, decayed = param_groups_weight_decay(trained, 0.05, no_weight_decay_list=net.no_weight_decay())
    expected = {id(p): True for p in decayed["params"]} | {id(p): False for p in kept["params"]}
    expected |= {id(model.head.weight): True, id(model.head.bias): False}
    groups = optimiser_groups(model, 0.75, 0.05)
    assert {id(p): group["decayed"] for group in groups for p in group["params"]} == expected
    assert all(group["weight_decay"] == (0.05 if group["decayed"] else 0.0) for group in groups)


def test_groups_hold_every_parameter_once_with_its_scale():
    model = classifier(layouts.vit(depth=4))
    groups = optimiser_groups(model, 0.75, 0.05)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    parameters = dict(model.named_parameters())
    for group in groups:
        assert [id(p) for p in group["params"]] == [id(parameters[name]) for name in group["names"]]
        for name in group["names"]:
            assert group["lr_scale"] == GOLDEN["vit_depth4_0.75"][name.removeprefix("backbone.net.")]
    # Decayed and not, for the embedding, four blocks, and the rest.
    assert len(groups) == 12


def test_without_layer_decay_there_are_two_groups():
    groups = optimiser_groups(classifier(layouts.vit()), 1.0, 0.05)
    assert [(group["decayed"], group["lr_scale"]) for group in groups] == [(False, 1.0), (True, 1.0)]


def test_weight_decay_0_with_layer_decay_trains():
    model = classifier(layouts.vit())
    optimiser = adamw(optimiser_groups(model, 0.75, 0.0))
    assert {group["weight_decay"] for group in optimiser.param_groups} == {0.0}
    for group in optimiser.param_groups:
        group["lr"] = 1e-2 * group["lr_scale"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(2, 3, 32, 32)).logsumexp(1).sum().backward()
    optimiser.step()
    moved = {n: (t - before[n]).abs().max().item() for n, t in model.state_dict().items()}
    # AdamW's first step is the learning rate, where there is a gradient that is not tiny.
    scales = layer_scales(model, 0.75)
    for name in ("head.weight", "backbone.net.blocks.1.mlp.fc2.weight", "backbone.net.patch_embed.proj.weight"):
        assert moved[name] == pytest.approx(1e-2 * scales[name.removeprefix("backbone.net.")], rel=1e-2)


def test_frozen_parameters_are_left_out():
    model = classifier(layouts.vit(depth=4), freeze_blocks=2)
    names = named_groups(optimiser_groups(model, 0.75, 0.05))
    assert {name.split(".")[3] for name in names if ".blocks." in name} == {"2", "3"}
    assert not any("embed" in name or "cls_token" in name for name in names)


@pytest.mark.parametrize("decay", [0.0, 1.5, -1.0])
def test_decay_outside_its_range_is_refused(decay: float):
    model = classifier(layouts.vit())
    with pytest.raises(ConfigError, match="layer decay"):
        layer_scales(model, decay)
    with pytest.raises(ConfigError, match="layer decay"):
        optimiser_groups(model, decay, 0.05)


def test_negative_weight_decay_is_refused():
    with pytest.raises(ConfigError, match="negative"):
        optimiser_groups(classifier(layouts.vit()), 0.75, -0.1)
