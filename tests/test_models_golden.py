"""Outputs equal those of the published networks (../shared/golden, part of it copied to tests/golden)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ibot_eval.backbone import BlockOutput
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.settings import CheckpointSettings

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared"


@cache
def golden(name: str) -> dict[str, Tensor]:
    """The whole file where there is one, else the copy, which holds fewer sizes and variants."""
    whole = SHARED / "golden" / name
    return load_file(whole if whole.exists() else HERE / "golden" / name)


def part(name: str, prefix: str) -> dict[str, Tensor]:
    found = {key[len(prefix) :]: tensor for key, tensor in golden(name).items() if key.startswith(prefix)}
    if not found:
        pytest.skip(f"{prefix} of {name} is only in ../shared")
    return found


def load(folder: Path, state: dict[str, Tensor], **settings: object) -> LoadedCheckpoint:
    path = folder / "checkpoint.safetensors"
    save_file(state, path)
    return load_checkpoint(CheckpointSettings(ckpt=str(path), **settings))  # pyright: ignore[reportArgumentType]


def all_tokens(output: BlockOutput) -> Tensor:
    return torch.cat([output.cls[:, None], output.registers, output.patches.flatten(1, 2)], dim=1)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", ["64x64", "96x96", "32x32", "48x80"])
def test_vit(tmp_path: Path, size: str) -> None:
    data = golden("vit.safetensors")
    if f"image/{size}" not in data:
        pytest.skip("only in ../shared")
    backbone = load(tmp_path, part("vit.safetensors", "state/"), heads=3).backbone
    found = backbone.outputs(data[f"image/{size}"], (-3, -2, -1), attention_block=-1)
    assert_close(all_tokens(found.blocks[2]), data[f"tokens/{size}"])
    assert found.attention is not None
    assert_close(found.attention, data[f"last_attention/{size}"])
    for i in range(3):
        if f"intermediate3/{size}/{i}" in data:
            assert_close(all_tokens(found.blocks[i]), data[f"intermediate3/{size}/{i}"])


def test_vit_norm_after_the_mean(tmp_path: Path) -> None:
    data = golden("vit.safetensors")
    backbone = load(tmp_path, part("vit.safetensors", "state/"), heads=3).backbone
    raw = backbone.outputs(data["image/64x64"], norm="none").blocks[0]
    assert_close(backbone.final_norm(raw.patches.mean(dim=(1, 2))), data["mean_pooled/64x64"])


def test_swin(tmp_path: Path) -> None:
    data = golden("swin.safetensors")
    loaded = load(tmp_path, part("swin.safetensors", "state/"))
    found = loaded.backbone.outputs(data["image"]).blocks[0]
    assert_close(all_tokens(found), data["all_tokens"])
    assert_close(found.cls, data["pooled"])
    assert loaded.report.num_heads == 4
    assert loaded.backbone.dims == (24, 24, 48, 48)


@pytest.mark.parametrize("variant", ["relpos", "shared_relpos", "abs"])
def test_beit(tmp_path: Path, variant: str) -> None:
    data = part("beit.safetensors", f"{variant}/")
    state = {name.removeprefix("state/"): tensor for name, tensor in data.items() if name.startswith("state/")}
    loaded = load(tmp_path, state, heads=3)
    raw = loaded.backbone.outputs(data["image"], norm="none").blocks[0]
    features = loaded.backbone.final_norm(raw.patches.mean(dim=(1, 2)))
    assert_close(features, data["features"])
    assert loaded.classifier is not None
    assert_close(loaded.classifier(features), data["logits"])
    assert loaded.report.classifier == {"classes": 5, "input": "norm_patch_mean"}
    assert loaded.backbone.mean == (0.485, 0.456, 0.406), "iBOT's fine-tuning normalises with ImageNet's values"


@pytest.mark.parametrize("size", ["112x112", "140x140", "56x56", "84x126"])
@pytest.mark.parametrize("variant", ["plain", "registers"])
def test_dinov2(tmp_path: Path, variant: str, size: str) -> None:
    data = part("dinov2.safetensors", f"{variant}/")
    if f"image/{size}" not in data:
        pytest.skip("only in ../shared")
    state = {name.removeprefix("state/"): tensor for name, tensor in data.items() if name.startswith("state/")}
    loaded = load(tmp_path, state, heads=3)
    found = loaded.backbone.outputs(data[f"image/{size}"]).blocks[0]
    assert_close(found.cls, data[f"cls/{size}"])
    assert_close(found.patches.flatten(1, 2), data[f"patches/{size}"])
    assert loaded.report.family == "dinov2"
    assert loaded.report.num_registers == (4 if variant == "registers" else 0)
    if variant == "registers":
        assert_close(found.registers, data[f"registers/{size}"])


def test_shared_weights() -> None:
    path = SHARED / "weights" / "vits14_focus_fp16.safetensors"
    if not path.exists():
        pytest.skip("only in ../shared")
    loaded = load_checkpoint(CheckpointSettings(ckpt=str(path)), sha256=lambda _: "remembered")
    report = loaded.report
    assert (report.family, report.architecture, report.num_heads) == ("dinov2", "vit-s/14", 6)
    assert report.image_size == (518, 518)
    assert report.sha256 == "remembered"
    assert report.matched == 174
    assert not report.unexpected
    stored = load_file(path)
    assert report.parameters == sum(tensor.numel() for tensor in stored.values())
    for parameter in loaded.backbone.parameters():
        assert parameter.dtype == torch.float32
        assert not parameter.requires_grad
    assert not loaded.backbone.training
