"""Every published layout, made from a small network, reads back to a network with the same outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm.layers.mlp import SwiGLUPacked
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from ibot_eval.backbone import IMAGENET_MEAN
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.layouts.blueprint import Hints
from ibot_eval.layouts.cnn import read_resnet
from ibot_eval.layouts.unwrapping import Network
from ibot_eval.models import wrap
from ibot_eval.settings import CheckpointSettings
from tests import layouts


def read(folder: Path, contents: Any, **settings: Any) -> LoadedCheckpoint:
    path = folder / "checkpoint.pth"
    torch.save(contents, path)
    return load_checkpoint(CheckpointSettings(ckpt=str(path), **settings))


def images(height: int = 32, width: int | None = None, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, height, width or height, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def assert_same(loaded: LoadedCheckpoint, net: Any, x: Tensor | None = None) -> None:
    """[CLS], registers and patches equal ``net.forward_features``."""
    x = images() if x is None else x
    found = loaded.backbone.outputs(x).blocks[0]
    wanted = net.forward_features(x)
    tokens = torch.cat([found.cls[:, None], found.registers, found.patches.flatten(1, 2)], dim=1)
    torch.testing.assert_close(tokens, wanted, rtol=1e-5, atol=1e-5)


def test_ibot_full_takes_the_teacher(tmp_path: Path) -> None:
    student, teacher = layouts.vit(1), layouts.vit(2)
    loaded = read(tmp_path, layouts.ibot_full(student, teacher), heads=3)
    assert_same(loaded, teacher)
    assert (loaded.report.family, loaded.report.key) == ("ibot", "teacher")
    assert loaded.report.available_keys == ["student", "teacher"]
    assert any("student" in note for note in loaded.report.notes)
    assert loaded.report.projection_head == {"K": 10, "hidden": 16, "bottleneck": 6, "shared": True}
    assert loaded.projection_head is not None
    torch.testing.assert_close(
        loaded.projection_head.mlp.state_dict()["2.weight"], layouts.projection_head(seed=2)["mlp.2.weight"]
    )
    assert loaded.report.unexpected == []
    json.dumps(loaded.report.as_dict())


def test_ibot_full_with_key_student(tmp_path: Path) -> None:
    student, teacher = layouts.vit(1), layouts.vit(2)
    loaded = read(tmp_path, layouts.ibot_full(student, teacher), heads=3, key="student")
    assert_same(loaded, student)
    assert loaded.report.key == "student"
    assert "masked_embed" in loaded.report.ignored


PREFIXES = "module. backbone. module.backbone. teacher. teacher.backbone. encoder. model. student. _orig_mod."
PREFIXES += " module._orig_mod.backbone."


@pytest.mark.parametrize(
    ("prefix", "container"),
    [
        *((prefix, None) for prefix in ("", *PREFIXES.split())),
        *((prefix, name) for prefix in ("", "module.") for name in ("state_dict", "model", "teacher", "model_ema")),
    ],
)
def test_prefixes_and_containers(tmp_path: Path, prefix: str, container: str | None) -> None:
    net = layouts.vit()
    state: Any = layouts.prefixed(net.state_dict(), prefix)
    loaded = read(tmp_path, state if container is None else {container: state, "epoch": 1}, heads=3)
    assert_same(loaded, net)
    assert (loaded.report.matched, loaded.report.missing) == (len(net.state_dict()), [])


def test_prefix_beside_other_networks_and_heads(tmp_path: Path) -> None:
    student, teacher = layouts.vit(1), layouts.vit(2)
    flat = {
        **layouts.prefixed(student.state_dict(), "student.backbone."),
        **layouts.prefixed(layouts.projection_head(seed=1), "student.head."),
        **layouts.prefixed(teacher.state_dict(), "teacher.backbone."),
        **layouts.prefixed(layouts.projection_head(seed=2), "teacher.head."),
        "ema_step": torch.tensor(3),
    }
    loaded = read(tmp_path, flat, heads=3)
    assert_same(loaded, teacher)
    assert loaded.projection_head is not None
    assert_same(read(tmp_path, flat, heads=3, key="student"), student)


def test_dino(tmp_path: Path) -> None:
    net = layouts.vit()
    loaded = read(tmp_path, layouts.dino_full(net), heads=3)
    assert_same(loaded, net)
    assert loaded.report.family == "dino"
    assert loaded.projection_head is not None


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_dinov2(tmp_path: Path, registers: int, gated: bool) -> None:
    changes: dict[str, Any] = {"init_values": 1e-5, "reg_tokens": registers, "no_embed_class": bool(registers)}
    if gated:
        changes |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 2.66667 * 2}
    net = layouts.vit(**changes)
    loaded = read(tmp_path, layouts.dinov2(net), heads=3)
    assert_same(loaded, net)
    assert (loaded.report.family, loaded.report.num_registers) == ("dinov2", registers)
    assert loaded.report.ignored == ["mask_token"]


def test_dinov2s_own_files_and_timms_resize_positions_differently(tmp_path: Path) -> None:
    net = layouts.vit(patch_size=14, img_size=56, init_values=1e-5, dynamic_img_size=True)
    state = layouts.dinov2(net)
    assert read(tmp_path, state, heads=3).backbone.resize == "scale"  # pyright: ignore[reportAttributeAccessIssue]
    del state["mask_token"]
    loaded = read(tmp_path, state, heads=3)
    assert any("--pos-embed-resize scale" in note for note in loaded.report.notes)
    assert_same(loaded, net, images(28, 84))
    asked = read(tmp_path, state, heads=3, pos_embed_resize="scale")
    assert asked.backbone.resize == "scale"  # pyright: ignore[reportAttributeAccessIssue]


def test_dinov2_block_chunks(tmp_path: Path) -> None:
    net = layouts.vit(depth=4, init_values=1e-5)
    state = layouts.chunked(layouts.dinov2(net), per_chunk=2)
    assert "blocks.1.3.norm1.weight" in state
    assert_same(read(tmp_path, state, heads=3), net)


def test_dinov2_training_file_with_two_heads(tmp_path: Path) -> None:
    net = layouts.vit(init_values=1e-5)
    one, two = layouts.projection_head(seed=1), layouts.projection_head(seed=2)
    teacher = {
        **layouts.prefixed(layouts.dinov2(net), "backbone."),
        **{f"dino_head.{name}": tensor for name, tensor in one.items() if "last_layer2" not in name},
        **{f"ibot_head.{name}": tensor for name, tensor in two.items() if "last_layer2" not in name},
    }
    loaded = read(tmp_path, {"teacher": teacher}, heads=3)
    assert loaded.projection_head is not None
    assert loaded.projection_head.sharing == "separate"
    assert loaded.projection_head.mlp2 is not None
    torch.testing.assert_close(loaded.projection_head.mlp2.state_dict()["0.weight"], two["mlp.0.weight"])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_dinov3(tmp_path: Path, bias: bool, gated: bool) -> None:
    net = layouts.eva(qkv_bias=bias, swiglu_mlp=gated, swiglu_align_to=8)
    loaded = read(tmp_path, layouts.dinov3(net), heads=3)
    assert_same(loaded, net)
    assert (loaded.report.family, loaded.report.num_registers) == ("dinov3", 4)
    wide = images(48, 24)
    assert_same(loaded, net, wide)


def test_dinov3_in_timm_names(tmp_path: Path) -> None:
    net = layouts.eva()
    assert_same(read(tmp_path, net.state_dict(), heads=3), net)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_beit(tmp_path: Path, shared: bool, pooled: bool) -> None:
    net = layouts.beit(
        use_rel_pos_bias=not shared, use_shared_rel_pos_bias=shared, global_pool="avg" if pooled else "token"
    )
    loaded = read(tmp_path, layouts.beit_pretrained(net))
    wanted = net if not pooled else None
    if wanted is not None:
        assert_same(loaded, wanted)
    x = images()
    with torch.no_grad():
        raw = loaded.backbone.outputs(x, norm="none").blocks[0]
        pooled_feature = loaded.backbone.final_norm(raw.patches.mean(dim=(1, 2)) if pooled else raw.cls)
        torch.testing.assert_close(pooled_feature, net(x), rtol=1e-5, atol=1e-5)
    assert (loaded.report.family, loaded.report.num_heads) == ("beit", 3), "heads come from the bias table"
    assert loaded.backbone.mean == (0.5, 0.5, 0.5)
    assert sorted(loaded.report.ignored) == ["lm_head.bias", "lm_head.weight", "mask_token"]


def test_beit_with_absolute_positions_and_index_buffers(tmp_path: Path) -> None:
    net = layouts.beit(use_abs_pos_emb=True, global_pool="token")
    loaded = read(tmp_path, {"module": layouts.beit_indices(net.state_dict())})
    assert_same(loaded, net)
    assert loaded.report.unexpected == []


def test_beit_with_one_bias_for_query_key_and_value(tmp_path: Path) -> None:
    net = layouts.beit(global_pool="token")
    state = net.state_dict()
    for i in range(2):
        query, value = state.pop(f"blocks.{i}.attn.q_bias"), state.pop(f"blocks.{i}.attn.v_bias")
        state[f"blocks.{i}.attn.qkv.bias"] = torch.cat([query, torch.randn(48), value])
    loaded = read(tmp_path, state)
    assert_same(loaded, net)
    assert loaded.backbone.mean == IMAGENET_MEAN, "this is iBOT's fine-tuning code, not BEiT's own"


def test_separate_biases_without_relative_positions(tmp_path: Path) -> None:
    net = layouts.beit(use_rel_pos_bias=False, use_abs_pos_emb=True, global_pool="token")
    loaded = read(tmp_path, net.state_dict(), heads=3)
    assert_same(loaded, net)


def test_mae_pretrained(tmp_path: Path) -> None:
    net = layouts.with_sincos(layouts.vit(), "column")
    loaded = read(tmp_path, layouts.mae_pretrained(net), heads=3)
    assert_same(loaded, net)
    assert loaded.report.family == "mae"
    assert "decoder_blocks.0.norm1.weight" in loaded.report.ignored
    assert loaded.report.unexpected == []


def test_mae_fine_tuned_on_the_mean(tmp_path: Path) -> None:
    net = layouts.with_sincos(layouts.vit(global_pool="avg", num_classes=5), "column")
    loaded = read(tmp_path, {"model": net.state_dict()}, heads=3)
    x = images()
    with torch.no_grad():
        raw = loaded.backbone.outputs(x, norm="none").blocks[0]
        assert loaded.classifier is not None
        logits = loaded.classifier(loaded.backbone.final_norm(raw.patches.mean(dim=(1, 2))))
        torch.testing.assert_close(logits, net(x), rtol=1e-5, atol=1e-5)
    assert loaded.report.family == "mae", "its fixed positions are recognised without a decoder"
    assert loaded.report.classifier == {"classes": 5, "input": "norm_patch_mean"}


def test_mocov3_takes_the_base_encoder(tmp_path: Path) -> None:
    base, momentum = (layouts.with_sincos(layouts.vit(seed), "row") for seed in (1, 2))
    file = layouts.mocov3(base, momentum)
    loaded = read(tmp_path, file, heads=3)
    assert_same(loaded, base)
    assert (loaded.report.family, loaded.report.key) == ("mocov3", "base_encoder")
    assert loaded.report.available_keys == ["base_encoder", "momentum_encoder"]
    assert_same(read(tmp_path, file, heads=3, key="momentum_encoder"), momentum)
    assert_same(read(tmp_path, file, heads=3, key="state_dict"), base)


def test_mocov3_without_prefix_is_recognised_by_its_positions(tmp_path: Path) -> None:
    net = layouts.with_sincos(layouts.vit(img_size=(32, 48)), "row")
    loaded = read(tmp_path, net.state_dict(), heads=3)
    assert loaded.report.family == "mocov3"
    assert loaded.report.image_size == (32, 48), "fixed positions also tell a grid that is not square"
    assert_same(loaded, net, images(32, 48))


def test_mocov3_resnet(tmp_path: Path) -> None:
    base, momentum = (layouts.resnet(seed, block=BasicBlock, layers=(1, 2, 1, 1)) for seed in (1, 2))
    loaded = read(tmp_path, layouts.mocov3(base, momentum))
    x = images(64)
    with torch.no_grad():
        found = loaded.backbone.outputs(x).blocks[0]
        torch.testing.assert_close(found.cls, base(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.patches.permute(0, 3, 1, 2), base.forward_features(x), rtol=1e-5, atol=1e-5)


def test_fixed_positions_that_are_not_in_the_file(tmp_path: Path) -> None:
    net = layouts.with_sincos(layouts.vit(img_size=224, patch_size=32), "column")
    file = layouts.mae_pretrained(net)
    del file["model"]["pos_embed"]
    loaded = read(tmp_path, file, heads=3)
    assert_same(loaded, net, images(224))
    assert any("sine-cosine" in note for note in loaded.report.notes)


def test_deit_with_classifier(tmp_path: Path) -> None:
    net = layouts.vit(num_classes=5)
    loaded = read(tmp_path, {"model": net.state_dict()}, heads=3)
    assert_same(loaded, net)
    assert loaded.report.classifier == {"classes": 5, "input": "cls"}
    assert any("classifier of 5 classes" in note for note in loaded.report.notes)
    assert isinstance(loaded.classifier, nn.Linear)
    with torch.no_grad():
        found = loaded.classifier(loaded.backbone.outputs(images()).blocks[0].cls)
        torch.testing.assert_close(found, net(images()), rtol=1e-5, atol=1e-5)


def test_distilled_deit(tmp_path: Path) -> None:
    from timm.models.deit import VisionTransformerDistilled

    net = layouts.scrambled(
        VisionTransformerDistilled(
            img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5, weight_init="skip"
        )
    )
    loaded = read(tmp_path, net.state_dict(), heads=3)
    assert_same(loaded, net)
    assert (loaded.report.family, loaded.report.num_registers) == ("deit", 1)
    assert any("distillation" in note for note in loaded.report.notes)


def test_timm_names_with_registers_and_no_cls(tmp_path: Path) -> None:
    net = layouts.vit(class_token=False, reg_tokens=2, no_embed_class=True, global_pool="avg", fc_norm=False)
    loaded = read(tmp_path, net.state_dict(), heads=3)
    found = loaded.backbone.outputs(images()).blocks[0]
    wanted = net.forward_features(images())
    torch.testing.assert_close(found.registers, wanted[:, :2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.patches.flatten(1, 2), wanted[:, 2:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.cls, wanted[:, 2:].mean(dim=1), rtol=1e-5, atol=1e-5)
    assert not loaded.backbone.has_cls


def test_options_of_the_blocks_are_inferred(tmp_path: Path) -> None:
    net = layouts.vit(qkv_bias=False, qk_norm=True, mlp_ratio=3)
    assert_same(read(tmp_path, net.state_dict(), heads=3), net)


@pytest.mark.parametrize("window", [7, 14])
def test_swin(tmp_path: Path, window: int) -> None:
    norm: Any = lambda width, **rest: nn.LayerNorm(width, eps=1e-6, **rest)  # noqa: E731
    net = layouts.swin(window_size=window, norm_layer=norm, strict_img_size=False)
    state = layouts.swin_published(net)
    last = state["layers.3.blocks.0.attn.relative_position_bias_table"]
    assert len(last) == 13 * 13, "the last stage sees 7x7 tokens, whatever the window"
    loaded = read(tmp_path, {"teacher": layouts.prefixed(state, "backbone.")})
    x = images(224)[:1]
    with torch.no_grad():
        found = loaded.backbone.outputs(x).blocks[0]
        torch.testing.assert_close(found.patches, net.forward_features(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.cls, net(x), rtol=1e-5, atol=1e-5)
    assert loaded.report.architecture == f"swin-8x2-2-2-2/{window}"
    assert (loaded.report.num_heads, loaded.report.image_size) == (8, (224, 224))
    assert loaded.report.unexpected == []


def test_supervised_swin_in_timm_names(tmp_path: Path) -> None:
    net = layouts.swin(num_classes=3)
    loaded = read(tmp_path, net.state_dict())
    x = images(224)[:1]
    with torch.no_grad():
        assert loaded.classifier is not None
        found = loaded.classifier(loaded.backbone.outputs(x).blocks[0].cls)
        torch.testing.assert_close(found, net(x), rtol=1e-5, atol=1e-5)


def test_resnet_with_classifier(tmp_path: Path) -> None:
    net = layouts.resnet(num_classes=4)
    loaded = read(tmp_path, {"state_dict": layouts.prefixed(net.state_dict(), "module.")})
    x = images(64)
    with torch.no_grad():
        assert loaded.classifier is not None
        torch.testing.assert_close(loaded.classifier(loaded.backbone.outputs(x).blocks[0].cls), net(x))


def test_resnet50_is_named() -> None:
    state = ResNet(block=Bottleneck, layers=(3, 4, 6, 3), device="meta").state_dict()
    backbone = wrap(read_resnet(Network("", "", dict(state), {}), Hints()).net)
    assert (backbone.architecture, backbone.depth, backbone.dims[-1]) == ("resnet50", 16, 2048)


def test_run_folder_of_pre_training(tmp_path: Path) -> None:
    student, teacher = layouts.vit(1), layouts.vit(2)
    for name, net in (("student", student), ("teacher", teacher)):
        state = {**layouts.prefixed(net.state_dict(), "backbone."), **layouts.prefixed(
            {n: t for n, t in layouts.projection_head().items() if "last_layer2" not in n}, "head.")}  # fmt: skip
        save_file(state, tmp_path / f"{name}.safetensors", {"ibot_eval": json.dumps({"heads": 3, "family": "ibot"})})
    loaded = load_checkpoint(CheckpointSettings(ckpt=str(tmp_path)))
    assert_same(loaded, teacher)
    assert (loaded.report.key, loaded.report.family, loaded.report.num_heads) == ("teacher", "ibot", 3)
    assert loaded.report.available_keys == ["teacher", "student"]
    assert loaded.projection_head is not None
    assert_same(load_checkpoint(CheckpointSettings(ckpt=str(tmp_path), key="student")), student)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    net = layouts.vit().to(dtype)
    loaded = read(tmp_path, net.state_dict(), heads=3)
    assert {parameter.dtype for parameter in loaded.backbone.parameters()} == {torch.float32}
    assert_same(loaded, net.float())
