"""Networks that only look like a supported one, and files that say more than their tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.layers.mlp import SwiGLUPacked
from timm.models.resnet import BasicBlock
from torch import Tensor, nn

from ibot_eval.backbone import IMAGENET_MEAN
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.errors import CheckpointError
from ibot_eval.files import sha256_file
from ibot_eval.layouts import named
from ibot_eval.layouts.blueprint import Hints
from ibot_eval.layouts.matching import is_foreign
from ibot_eval.layouts.named import read_as
from ibot_eval.layouts.unwrapping import Network
from ibot_eval.own_network import from_module
from ibot_eval.settings import CheckpointSettings
from tests import layouts

HALF = (0.5, 0.5, 0.5)


def read(folder: Path, contents: Any, **settings: Any) -> LoadedCheckpoint:
    path = folder / "checkpoint.pth"
    torch.save(contents, path)
    return load_checkpoint(CheckpointSettings(ckpt=str(path), **settings))


def refused(folder: Path, contents: Any, match: str, **settings: Any) -> str:
    with pytest.raises(CheckpointError, match=match) as caught:
        read(folder, contents, **settings)
    return str(caught.value)


def state(**changes: Any) -> dict[str, Tensor]:
    return dict(layouts.vit(**changes).state_dict())


# Another network under familiar names


@pytest.mark.parametrize(
    ("name", "shape"), [("blocks.1.attn.rel_pos_h", (7, 16)), ("blocks.0.mlp.norm.weight", (192,)), ("stem.0.w", (3,))]
)
def test_unknown_tensors_of_the_backbone_are_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    error = refused(tmp_path, {**state(), name: torch.ones(shape)}, "the backbone holds 1 unknown tensor:", heads=3)
    assert name in error
    assert "--arch" in error


def test_squeeze_and_excitation_is_no_plain_resnet(tmp_path: Path) -> None:
    tensors = dict(layouts.resnet(block=BasicBlock).state_dict())
    refused(tmp_path, {**tensors, "layer1.0.se.fc.weight": torch.ones(2, 2)}, "layer1.0.se.fc.weight")


def test_swin_with_absolute_positions_is_refused(tmp_path: Path) -> None:
    tensors = layouts.swin_published(layouts.swin())
    refused(tmp_path, {**tensors, "absolute_pos_embed": torch.ones(1, 56 * 56, 8)}, "absolute_pos_embed")


@pytest.mark.parametrize("missing", [".attn.qkv.bias", ".ls1.gamma"])
def test_options_of_the_first_block_hold_for_all(tmp_path: Path, missing: str) -> None:
    tensors = state(init_values=0.1)
    del tensors[f"blocks.0{missing}"]
    with pytest.raises(CheckpointError, match=r"not all blocks are alike|tensors are in the checkpoint"):
        read(tmp_path, tensors, heads=3)


LEFT_OVERS = """
decoder_pos_embed decoder_blocks.0.norm1.weight mask_token masked_embed lm_head.weight predictor.0.weight
rel_pos_bias.relative_position_index blocks.0.attn.relative_position_index layers.0.blocks.1.attn_mask
blocks.0.attn.qkv.bias_mask rope_embed.periods layer1.0.bn1.num_batches_tracked bn1.num_batches_tracked
dino_head.mlp.0.weight ibot_head.mlp.0.weight local_cls_norm.weight fc_norm.weight cls_pt_layers.0.norm1.weight
loss.center ema_step queue
"""


@pytest.mark.parametrize("name", LEFT_OVERS.split())
def test_left_overs_of_pre_training_are_no_part_of_a_backbone(name: str) -> None:
    assert not is_foreign(name)


def test_networks_that_no_tensor_tells_apart_are_asked_for(tmp_path: Path) -> None:
    assert "vit_base_patch32_clip" in refused(tmp_path, state(pre_norm=True), "quick-GELU", heads=3)
    tensors = state(mlp_layer=SwiGLUPacked)
    for index in range(2):
        query, _, value = tensors.pop(f"blocks.{index}.attn.qkv.bias").chunk(3)
        tensors |= {f"blocks.{index}.attn.q_bias": query, f"blocks.{index}.attn.v_bias": value}
    refused(tmp_path, tensors, "EVA-02", heads=3)


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    tensors = state()
    tensors["blocks.0.attn.qkv.weight"] = tensors["blocks.0.attn.qkv.weight"].to(torch.int8)
    refused(tmp_path, tensors, "blocks.0.attn.qkv.weight is stored as int8", heads=3)


def test_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save(state(), path)

    def replacing(file: Path) -> str:
        torch.save(state(seed=1), tmp_path / "new.pth")
        os.replace(tmp_path / "new.pth", file)
        return sha256_file(file)

    with pytest.raises(CheckpointError, match="changed while it was read"):
        load_checkpoint(CheckpointSettings(ckpt=str(path), heads=3), sha256=replacing)


@pytest.mark.parametrize("teacher", [{}, {"head.weight": torch.ones(3, 48)}])
def test_a_teacher_without_network_is_spoken_of(tmp_path: Path, teacher: dict[str, Tensor]) -> None:
    report = read(tmp_path, {"student": state(), "teacher": teacher}, heads=3).report
    assert any("teacher" in note and "student was taken" in note for note in report.notes)
    asked = read(tmp_path, {"student": state(), "teacher": teacher}, heads=3, key="student").report
    assert not any("was found under teacher" in note for note in asked.notes)


# --arch keeps what the layout tells


def read_named(name: str, net: nn.Module, **hints: Any) -> Any:
    return read_as(name, Network("", "", dict(net.state_dict()), {}), Hints(**hints))


def test_arch_keeps_beits_mean_and_refuses_another_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "create", lambda name, **_: layouts.beit())  # timm's smallest has 86 M parameters.
    blueprint = read_named("beit_base_patch16_224", layouts.beit(seed=1))
    assert (blueprint.mean, blueprint.std, blueprint.family) == (HALF, HALF, "beit")
    assert any("BEiT v2" in note for note in blueprint.notes)
    with pytest.raises(CheckpointError, match=r"\(124, 3\) in the checkpoint and \(52, 3\)"):
        read_named("beit_base_patch16_224", layouts.beit(img_size=48))


def test_arch_keeps_swins_eps_and_refuses_another_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "create", lambda name, **_: layouts.swin())
    arch = "swin_tiny_patch4_window7_224"
    for changes, eps in (({}, 1e-6), ({"arch": arch}, 1e-5)):  # With the name in its configuration, timm wrote it.
        net = read_named(arch, layouts.swin(seed=1), **changes).net
        assert {module.eps for module in net.modules() if isinstance(module, nn.LayerNorm)} == {eps}
    with pytest.raises(CheckpointError, match="the window"):
        read_named(arch, layouts.swin(window_size=14))


def test_arch_takes_the_eps_of_the_hints(tmp_path: Path) -> None:
    net = timm.create_model("test_vit", num_classes=0)
    blueprint = read_named("test_vit", net, eps=1e-12)
    assert {m.eps for m in blueprint.net.modules() if isinstance(m, nn.LayerNorm)} == {1e-12}


def test_arch_with_other_heads_than_the_familys_is_refused(tmp_path: Path) -> None:
    small: Any = timm.create_model("vit_small_patch16_224", num_classes=0, img_size=32)
    net = layouts.with_sincos(small, "row")
    error = refused(tmp_path, net.state_dict(), "has 6 heads, and mocov3's", arch="vit_small_patch16_224")
    assert "--heads 12" in error
    assert read(tmp_path, net.state_dict(), arch="vit_small_patch16_224", heads=12).report.num_heads == 12


# Mean, deviation and names beside the file


def timm_folder(folder: Path, net: nn.Module, architecture: str) -> LoadedCheckpoint:
    images = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    (folder / "config.json").write_text(json.dumps({"architecture": architecture, "pretrained_cfg": images}))
    save_file(net.state_dict(), folder / "model.safetensors")
    return load_checkpoint(CheckpointSettings(ckpt=str(folder)))


def test_timms_configuration_tells_mean_and_network(tmp_path: Path) -> None:
    net = layouts.scrambled(timm.create_model("test_vit", num_classes=3))
    loaded = timm_folder(tmp_path, net, "test_vit")
    assert (loaded.backbone.mean, loaded.backbone.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert loaded.report.num_heads == net.blocks[0].attn.num_heads


def test_timms_configuration_tells_a_network_that_tensors_do_not(tmp_path: Path) -> None:
    net = layouts.scrambled(timm.create_model("resnetblur18", num_classes=0))
    loaded = timm_folder(tmp_path, net, "resnetblur18")
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded.backbone.outputs(x).blocks[0].cls, net(x), rtol=1e-5, atol=1e-5)


def test_a_guessed_mean_is_said(tmp_path: Path) -> None:
    model = transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=48,
            num_hidden_layers=1,
            num_attention_heads=3,
            intermediate_size=96,
            image_size=32,
            patch_size=8,
        )
    )
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(CheckpointSettings(ckpt=str(tmp_path)))
    assert loaded.backbone.mean == IMAGENET_MEAN
    assert any("are a guess" in note and "--mean" in note for note in loaded.report.notes)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    told = load_checkpoint(CheckpointSettings(ckpt=str(tmp_path)))
    assert told.backbone.mean == HALF
    assert not any("are a guess" in note for note in told.report.notes)


def test_beit_with_absolute_positions_has_beits_habits(tmp_path: Path) -> None:
    net = layouts.beit(use_rel_pos_bias=False, use_abs_pos_emb=True, global_pool="token")
    loaded = read(tmp_path, net.state_dict(), heads=3)
    assert (loaded.report.family, loaded.backbone.mean, loaded.backbone.std) == ("beit", HALF, HALF)
    assert loaded.report.identity["resize"] == "size"


# Classifiers


def test_linear_probe_of_mae(tmp_path: Path) -> None:
    probe = nn.Sequential(nn.BatchNorm1d(48, affine=False, eps=1e-6), nn.Linear(48, 5))
    layouts.scrambled(probe)
    loaded = read(tmp_path, {"model": {**state(), **layouts.prefixed(probe.state_dict(), "head.")}}, heads=3)
    assert loaded.report.classifier == {"classes": 5, "input": "cls"}
    assert loaded.report.ignored == []
    assert loaded.classifier is not None
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded.classifier(x), probe.eval()(x))


@pytest.mark.parametrize("name", ["linear_head", "cls_head"])
def test_classifiers_under_other_names(tmp_path: Path, name: str) -> None:
    report = read(tmp_path, layouts.with_classifier(state(), name=name), heads=3).report
    assert report.classifier == {"classes": 5, "input": "cls"}
    assert (report.unexpected, report.ignored) == ([], [])


def test_projection_of_moco_v3_is_no_classifier(tmp_path: Path) -> None:
    net = layouts.with_sincos(layouts.vit(), "row")
    assert read(tmp_path, layouts.mocov3(net, net), heads=3).report.classifier is None


# Identity


def test_identity_tells_equal_tensors_in_unlike_networks_apart(tmp_path: Path) -> None:
    three, six = (read(tmp_path, state(), heads=heads).report for heads in (3, 6))
    assert three.sha256 == six.sha256
    assert three.identity != six.identity
    resized = read(tmp_path, state(), heads=3, pos_embed_resize="size").report
    assert resized.identity["resize"] == "size" != three.identity["resize"]
    assert read(tmp_path, state(seed=1), heads=3).report.identity == three.identity, "tensors are hashed elsewhere"
    json.dumps(three.as_dict())


def test_identity_of_named_networks_and_own_modules() -> None:
    plain, blurred = (
        load_checkpoint(CheckpointSettings(ckpt=f"random:{name}")).report for name in ("resnet18", "resnetblur18")
    )
    assert plain.sha256 == blurred.sha256, "the same tensors"
    assert plain.identity != blurred.identity
    assert (plain.identity["name"], plain.identity["timm"]) == ("resnet18", timm.__version__)
    first, second = (from_module(nn.Sequential(nn.Flatten(), act), image_size=4) for act in (nn.ReLU(), nn.GELU()))
    assert first.report.sha256 == second.report.sha256
    assert first.report.identity != second.report.identity


def test_other_resizing_than_timms_is_said() -> None:
    notes = load_checkpoint(CheckpointSettings(ckpt="random:vit_small_patch14_dinov2")).report.notes
    assert any("dinov2's published code" in note and "size-antialias" in note for note in notes)
