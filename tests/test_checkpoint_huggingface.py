"""Checkpoints that transformers writes read back to networks with transformers' own outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.errors import CheckpointError
from ibot_eval.settings import CheckpointSettings
from tests import layouts


def images(height: int = 32, width: int | None = None) -> Tensor:
    return torch.randn(2, 3, height, width or height, generator=torch.Generator().manual_seed(0))


TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
    "attn_implementation": "eager",
}
WIDE = {**TINY, "intermediate_size": 96}


def hugging_face(folder: Path, model: Any, **settings: Any) -> LoadedCheckpoint:
    layouts.scrambled(model)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}')
    return load_checkpoint(CheckpointSettings(ckpt=str(folder), **settings))


@torch.no_grad()
def assert_same_as_transformers(loaded: LoadedCheckpoint, model: Any, registers: int = 0) -> None:
    answer = model(images(), output_attentions=True)
    found = loaded.backbone.outputs(images(), attention_block=-1)
    block = found.blocks[0]
    tokens = torch.cat([block.cls[:, None], block.registers, block.patches.flatten(1, 2)], dim=1)
    torch.testing.assert_close(tokens, answer.last_hidden_state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.attention, answer.attentions[-1], rtol=1e-5, atol=1e-5)
    assert loaded.report.num_registers == registers
    assert loaded.backbone.mean == (0.1, 0.2, 0.3)
    assert loaded.report.unexpected == []


def test_hugging_face_vit(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**WIDE))
    loaded = hugging_face(tmp_path, model)
    assert_same_as_transformers(loaded, model)
    assert loaded.report.family == "hf-vit"
    assert loaded.backbone.net.norm.eps == 1e-12  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("gated", [False, True])
def test_hugging_face_dinov2(tmp_path: Path, gated: bool) -> None:
    model = transformers.Dinov2Model(transformers.Dinov2Config(**TINY, use_swiglu_ffn=gated))
    loaded = hugging_face(tmp_path, model)
    assert_same_as_transformers(loaded, model)
    assert loaded.report.family == "dinov2"


def test_hugging_face_dinov2_with_registers(tmp_path: Path) -> None:
    model = transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**TINY))
    loaded = hugging_face(tmp_path, model)
    assert_same_as_transformers(loaded, model, registers=4)
    with torch.no_grad():
        other = images(48, 56)
        answer = model(other).last_hidden_state
        torch.testing.assert_close(loaded.backbone.outputs(other).blocks[0].cls, answer[:, 0], rtol=1e-5, atol=1e-5)


def test_hugging_face_mae(tmp_path: Path) -> None:
    config = transformers.ViTMAEConfig(
        **WIDE,
        mask_ratio=0.0,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    model = transformers.ViTMAEForPreTraining(config)
    loaded = hugging_face(tmp_path, model)
    noise = torch.arange(16.0).repeat(2, 1)  # MAE shuffles by noise; this order leaves the patches where they are.
    with torch.no_grad():
        answer = model.vit(images(), noise=noise).last_hidden_state
        found = loaded.backbone.outputs(images()).blocks[0]
    torch.testing.assert_close(found.cls, answer[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.patches.flatten(1, 2), answer[:, 1:], rtol=1e-5, atol=1e-5)
    assert loaded.report.family == "mae"
    assert loaded.report.unexpected == []


@pytest.mark.parametrize("shared", [False, True])
def test_hugging_face_beit(tmp_path: Path, shared: bool) -> None:
    config = transformers.BeitConfig(
        **WIDE, use_relative_position_bias=not shared, use_shared_relative_position_bias=shared
    )
    model = transformers.BeitModel(config)
    loaded = hugging_face(tmp_path, model)
    with torch.no_grad():
        answer = model(images())
        raw = loaded.backbone.outputs(images(), norm="none").blocks[0]
        torch.testing.assert_close(raw.cls, answer.last_hidden_state[:, 0], rtol=1e-5, atol=1e-5)
        pooled = loaded.backbone.final_norm(raw.patches.mean(dim=(1, 2)))
    torch.testing.assert_close(pooled, answer.pooler_output, rtol=1e-5, atol=1e-5)


def test_hugging_face_beit_of_pre_training(tmp_path: Path) -> None:
    config = transformers.BeitConfig(**WIDE, use_shared_relative_position_bias=True, vocab_size=20)
    model = transformers.BeitForMaskedImageModeling(config)
    loaded = hugging_face(tmp_path, model)
    with torch.no_grad():
        trunk = model.beit(images()).last_hidden_state
        found = loaded.backbone.outputs(images()).blocks[0]
        torch.testing.assert_close(found.cls, model.layernorm(trunk)[:, 0], rtol=1e-5, atol=1e-5)
    assert loaded.report.family == "beit"
    assert loaded.report.unexpected == []


def test_hugging_face_beit_with_absolute_positions(tmp_path: Path) -> None:
    model = transformers.BeitModel(transformers.BeitConfig(**WIDE, use_absolute_position_embeddings=True))
    loaded = hugging_face(tmp_path, model)
    with torch.no_grad():
        found = loaded.backbone.outputs(images(), norm="none").blocks[0].cls
        torch.testing.assert_close(found, model(images()).last_hidden_state[:, 0], rtol=1e-5, atol=1e-5)
    assert loaded.report.family == "beit"


def test_hugging_face_classifier(tmp_path: Path) -> None:
    model = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**TINY, num_labels=7))
    loaded = hugging_face(tmp_path, model)
    assert loaded.report.classifier == {"classes": 7, "input": "cls+patch_mean"}
    with torch.no_grad():
        block = loaded.backbone.outputs(images()).blocks[0]
        assert loaded.classifier is not None
        logits = loaded.classifier(torch.cat([block.cls, block.patches.mean(dim=(1, 2))], dim=-1))
        torch.testing.assert_close(logits, model(images()).logits, rtol=1e-5, atol=1e-5)


def test_heads_without_config(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**WIDE))
    layouts.scrambled(model)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    path = str(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="--heads"):
        load_checkpoint(CheckpointSettings(ckpt=path))
    loaded = load_checkpoint(CheckpointSettings(ckpt=path, heads=3))
    with torch.no_grad():
        found = loaded.backbone.outputs(images()).blocks[0].cls
        torch.testing.assert_close(found, model(images()).last_hidden_state[:, 0], rtol=1e-5, atol=1e-5)


def test_grid_that_is_not_square_comes_from_config(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**{**WIDE, "image_size": [32, 56]}))
    loaded = hugging_face(tmp_path, model)
    assert loaded.report.image_size == (32, 56)
    with torch.no_grad():
        found = loaded.backbone.outputs(images(32, 56)).blocks[0].cls
        wanted = model(images(32, 56)).last_hidden_state[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_other_activation_is_refused(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**WIDE, hidden_act="relu"))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="relu"):
        load_checkpoint(CheckpointSettings(ckpt=str(tmp_path)))
