"""protocols.openmmlab.backbone: maps against the core's own outputs, sizes, gradients, freezing, loading."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.own_network import from_module
from ibot_eval.settings import CheckpointSettings
from tests import layouts

pytest.importorskip("mmengine")

from mmengine.registry import MODELS

from protocols.openmmlab import backbone as module
from protocols.openmmlab.backbone import CheckpointBackbone, hand_over, level_widths
from protocols.openmmlab.levels import pad_to

NETS: dict[str, Any] = {
    "vit": lambda depth=4: layouts.vit(depth=depth, patch_size=16, img_size=64),
    "mae": lambda depth=4: layouts.vit(depth=depth, patch_size=16, img_size=64, global_pool="avg"),
    "patch 8": lambda depth=4: layouts.vit(depth=depth),
    "dinov2": lambda depth=4: layouts.vit(depth=depth, patch_size=14, img_size=28, reg_tokens=2, init_values=0.1),
    "dinov3": lambda depth=4: layouts.eva(depth=depth),
    "beit": lambda depth=4: layouts.beit(depth=depth),
    "shared": lambda depth=4: layouts.beit(depth=depth, use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    "swin": lambda: layouts.swin(img_size=64, window_size=2),
    "resnet": layouts.resnet,
}


def build(net: nn.Module, **arguments: Any) -> CheckpointBackbone:
    hand_over(CheckpointSettings(ckpt="given"), from_module(net))
    config = {"type": "CheckpointBackbone", "checkpoint": {"ckpt": "given"}, "pyramid_norm": "BN", **arguments}
    return MODELS.build(config)


def images(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))


def core_maps(net: nn.Module, x: Tensor, blocks: tuple[int, ...], norm: Any) -> list[Tensor]:
    backbone = from_module(net).backbone
    padded = pad_to(x, backbone.patch_size)
    with torch.no_grad():
        return [output.patches.permute(0, 3, 1, 2) for output in backbone.outputs(padded, blocks, norm).blocks]


@pytest.mark.parametrize("name", [name for name in NETS if name not in ("swin", "resnet")])
@pytest.mark.parametrize("norm", [False, True])
def test_maps_are_the_outputs_of_the_blocks(name: str, norm: bool):
    net = NETS[name]()
    model = build(net, norm=norm, level_maps=False).eval()
    side = 84 if name == "dinov2" else 80
    x = images(side, side + model.body.patch_size)
    for result, expected in zip(model(x), core_maps(net, x, (0, 1, 2, 3), "final" if norm else "none"), strict=True):
        torch.testing.assert_close(result, expected, atol=5e-5, rtol=5e-5)
    assert model.strides == (model.body.patch_size,) * 4


def test_levels_are_the_steps_over_these_maps():
    net = NETS["vit"]()
    model = build(net).eval()
    x = images(64, 96)
    maps = core_maps(net, x, (0, 1, 2, 3), "none")
    with torch.no_grad():
        levels = model(x)
        up, norm, act, again = model.pyramid.steps[0]
        torch.testing.assert_close(levels[0], again(act(norm(up(maps[0])))))
        torch.testing.assert_close(levels[2], maps[2])
        torch.testing.assert_close(levels[3], nn.functional.max_pool2d(maps[3], 2))
    assert model.strides == (4, 8, 16, 32)
    assert model.out_channels == (48,) * 4


def test_blocks_are_counted_from_1():
    net = layouts.vit(depth=6, patch_size=16, img_size=64)
    model = build(net, blocks=[1, 3, 4, 5], level_maps=False).eval()
    maps = core_maps(net, images(64, 64), (0, 2, 3, 4), "none")
    for result, expected in zip(model(images(64, 64)), maps, strict=True):
        torch.testing.assert_close(result, expected)
    # The last block serves no level: with a gradient it would be waited for.
    assert not any(p.requires_grad for p in model.body.net.blocks[5].parameters())


@pytest.mark.parametrize("name", ["swin", "resnet"])
def test_stages_are_levels(name: str):
    net = NETS[name]()
    model = build(net).eval()
    x, blocks = images(64, 96), (1, 3, 5, 7) if name == "swin" else (0, 1, 2, 3)
    expected = core_maps(net, x, blocks, "none")
    for level, raw, width in zip(model(x), expected, model.out_channels, strict=True):
        wanted = raw
        if name == "swin":
            wanted = nn.functional.layer_norm(raw.permute(0, 2, 3, 1), (width,)).permute(0, 3, 1, 2)
        torch.testing.assert_close(level, wanted, atol=1e-4, rtol=1e-4)
    assert model.strides == (4, 8, 16, 32)
    assert model.out_channels == tuple(map_.shape[1] for map_ in expected)


@pytest.mark.parametrize("name", NETS)
def test_any_size_gives_levels_and_every_trained_parameter_a_gradient(name: str):
    model = build(NETS[name](), norm=name == "mae")
    levels = model(images(72, 100))
    assert [tuple(level.shape[-2:]) for level in levels] == [(18, 25), (9, 13), (5, 7), (3, 4)]
    assert tuple(level.shape[1] for level in levels) == model.out_channels == level_widths(model.body)
    torch.stack([(level * images(*level.shape[1:])[:, 0]).sum() for level in levels]).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name
        assert parameter.grad is None or parameter.grad.abs().max() > 0, parameter_name
    assert any(parameter.requires_grad for parameter in model.body.parameters())


@pytest.mark.parametrize(
    ("name", "window"),
    [*((name, window) for name in ("vit", "dinov2", "dinov3", "beit", "shared") for window in (0, 2)), ("swin", 0)],
)
def test_recomputed_blocks_give_the_same_gradients(name: str, window: int):
    # Of five blocks the first gives no level, so that it has windows.
    net, x = NETS[name](*([5] if window else [])), images(72, 100)
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = build(net, checkpoint_blocks=recomputed, window=window, drop_path=0.3)
        torch.manual_seed(1)
        torch.stack([level.square().mean() for level in model(x)]).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for parameter_name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter_name], gradient, msg=lambda m, n=parameter_name: f"{n}: {m}")


def test_recomputing_blocks_keeps_fewer_activations():
    def kept(recomputed: bool) -> int:
        model, sizes = build(NETS["vit"](), checkpoint_blocks=recomputed), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(images(64, 64))
        return sum(sizes)

    assert kept(True) < 0.7 * kept(False)


def test_windows_leave_the_blocks_of_levels_global():
    net = layouts.vit(depth=8, patch_size=16, img_size=64)
    whole, large, small = (build(net, level_maps=False, window=window).eval() for window in (0, 6, 2))
    x = images(64, 96)
    with torch.no_grad():
        expected, same, other = whole(x), large(x), small(x)
    for level, wanted in zip(same, expected, strict=True):
        torch.testing.assert_close(level, wanted)
    assert not torch.allclose(other[3], expected[3], atol=1e-3)
    # Blocks 2, 4, 6 and 8 are those of the levels, so with four blocks none is left to be confined.
    shallow = [build(NETS["vit"](), level_maps=False, window=window).eval()(x) for window in (0, 2)]
    for level, wanted in zip(*shallow, strict=True):
        torch.testing.assert_close(level, wanted)


def test_drop_path_grows_to_its_rate_and_is_off_in_evaluation():
    model = build(NETS["vit"](), drop_path=0.3)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.body.net.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    x = images(64, 64)
    model.eval()
    torch.testing.assert_close(model(x)[3], model(x)[3])
    model.train()
    assert any(not torch.equal(model(x)[3], model(x)[3]) for _ in range(5))


def test_first_blocks_are_frozen():
    model = build(NETS["vit"](), frozen=2, drop_path=0.3)
    net = model.body.net
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[1] for name in trained} == {"2", "3"}
    assert [block.training for block in net.blocks] == [False, False, True, True]
    model(images(64, 64))[3].sum().backward()
    assert net.blocks[1].mlp.fc1.weight.grad is None
    assert net.blocks[2].mlp.fc1.weight.grad is not None


def test_only_the_embedding_is_frozen_with_0():
    model = build(NETS["vit"](), frozen=0)
    frozen = {name for name, parameter in model.body.net.named_parameters() if not parameter.requires_grad}
    embedding = {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert frozen == embedding | {"norm.weight", "norm.bias"}


@pytest.mark.parametrize("name", ["vit", "beit", "shared", "swin", "resnet"])
def test_a_frozen_network_has_no_gradient(name: str):
    probe = build(NETS[name]())
    model = build(NETS[name](), frozen=probe.body.depth, norm=True, level_maps=False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.body.training
    assert not any(level.requires_grad for level in model(images(64, 64)))


def test_deconvolutions_over_a_frozen_network_are_trained():
    model = build(NETS["vit"](), frozen=4)
    trained = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"pyramid"}
    assert model(images(64, 64))[0].requires_grad


def test_batch_norms_of_a_resnet_keep_their_statistics():
    model = build(NETS["resnet"]())
    before = copy.deepcopy(model.state_dict())
    model(images(64, 64))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_network_handed_over_is_copied():
    loaded = from_module(NETS["vit"]())
    hand_over(CheckpointSettings(ckpt="given"), loaded)
    model = CheckpointBackbone({"ckpt": "given"})
    model.init_weights()
    with torch.no_grad():
        model.body.net.cls_token.add_(1)
    assert torch.equal(model.body.net.pos_embed, loaded.backbone.net.pos_embed)
    assert not torch.equal(model.body.net.cls_token, loaded.backbone.net.cls_token)
    assert loaded.backbone.keep_positions
    assert not model.body.keep_positions


def test_files_are_read_by_the_core(tmp_path: Path):
    student, teacher = layouts.vit(seed=1, depth=4), layouts.vit(seed=2, depth=4)
    path = tmp_path / "checkpoint.pth"
    torch.save(layouts.ibot_full(student, teacher), path)
    for key, net in (("teacher", teacher), ("student", student)):
        model = MODELS.build({"type": "CheckpointBackbone", "checkpoint": {"ckpt": str(path), "key": key, "heads": 3}})
        assert torch.equal(model.body.net.blocks[3].mlp.fc1.weight, net.blocks[3].mlp.fc1.weight)
    with pytest.raises(CheckpointError, match=r"nothing\.pth"):
        CheckpointBackbone({"ckpt": str(tmp_path / "nothing.pth")})


def test_only_equal_settings_get_what_was_handed_over(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(module, "load_checkpoint", lambda s: asked.append(s) or from_module(NETS["vit"]()))
    hand_over(CheckpointSettings(ckpt="given", grid=(4, 4)), from_module(NETS["vit"]()))
    CheckpointBackbone({"ckpt": "given", "grid": [4, 4]})
    assert not asked
    CheckpointBackbone({"ckpt": "given", "key": "student"})
    assert asked == [CheckpointSettings(ckpt="given", key="student")]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit", {"frozen": 5}, "cannot be frozen"),
        ("vit", {"frozen": -2}, "cannot be frozen"),
        ("vit", {"blocks": [1, 2, 3, 5]}, "no block 5"),
        ("vit", {"drop_path": 1.0}, "stochastic depth"),
        ("vit", {"window": -1}, "windows of -1"),
        ("vit", {"checkpoint": {"ckpt": "given", "keys": "teacher"}}, "no setting 'keys'"),
        ("swin", {"window": 7}, "cannot be given windows"),
        ("swin", {"blocks": [1, 2, 3, 4]}, "are its stages"),
        ("resnet", {"drop_path": 0.1}, "drop path"),
        ("resnet", {"checkpoint_blocks": True}, "recomputed"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build(NETS[name](), **arguments)


def test_a_network_without_maps_is_refused():
    with pytest.raises(ConfigError, match="no maps at four depths"):
        build(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    with pytest.raises(ConfigError, match="3 stages"):
        build(layouts.swin(depths=(2, 2, 2), num_heads=(1, 2, 4), img_size=64, window_size=2))


def test_a_copy_gives_the_same_and_shares_nothing():
    model = build(NETS["beit"](5), window=2).eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(images(72, 100))[0], model(images(72, 100))[0])
        twin.body.net.blocks[0].attn.relative_position_bias_table.zero_()
        assert not torch.allclose(twin(images(72, 100))[0], model(images(72, 100))[0])
