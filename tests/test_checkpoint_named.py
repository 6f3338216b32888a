"""Networks by name: random, demo, timm and hf-hub; and --arch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.data.transforms import eval_transform
from ibot_eval.errors import CheckpointError
from ibot_eval.export import write_network
from ibot_eval.heads import ProjectionHead
from ibot_eval.layouts import named
from ibot_eval.models import ModuleBackbone, wrap
from ibot_eval.settings import CheckpointSettings, DataSettings
from tests import layouts


def load(ckpt: str, seed: int = 0, **settings: Any) -> LoadedCheckpoint:
    return load_checkpoint(CheckpointSettings(ckpt=ckpt, **settings), seed=seed)


@pytest.fixture
def no_demo_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As before a trained demonstration network was shipped."""
    monkeypatch.setattr(named, "DEMO_FILE", tmp_path / "none.safetensors")


@pytest.fixture
def demo_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A demonstration network in the place of the packaged one: 32 px, float16, heads that no table knows."""
    path = tmp_path / "demo.safetensors"
    backbone = wrap(layouts.vit(embed_dim=40, num_heads=5, patch_size=4), family="ibot")
    head = ProjectionHead(40, 10, hidden=16, bottleneck=6)
    embedding = torch.zeros(1, 40)
    write_network(path, backbone=backbone, head=head, masked_embed=embedding, dtype=torch.float16)
    monkeypatch.setattr(named, "DEMO_FILE", path)
    return path


@pytest.mark.usefixtures("no_demo_file")
@pytest.mark.parametrize("name", ["demo", "random:test_vit"])
def test_random_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load(name)
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is left alone"
    torch.manual_seed(2)
    second, other = load(name), load(name, seed=1)
    assert first.report.sha256 == second.report.sha256 != other.report.sha256
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(first.backbone.outputs(x).blocks[0].cls, second.backbone.outputs(x).blocks[0].cls)
    assert any("random" in note and "nothing was learnt" in note for note in first.report.notes)
    assert first.report.path is None
    json.dumps(first.report.as_dict())


def test_demo_is_small_and_frozen() -> None:
    loaded = load("demo")
    assert loaded.report.parameters < 1_000_000
    assert not any(parameter.requires_grad for parameter in loaded.backbone.parameters())
    assert not loaded.backbone.training


@pytest.mark.usefixtures("no_demo_file")
def test_demo_without_its_file_is_random_and_seen_at_64_px() -> None:
    loaded = load("demo")
    assert loaded.report.image_size == (64, 64)
    assert eval_transform(DataSettings(data="demo"), loaded.backbone).crop == 64
    assert named.RANDOM_NOTE in loaded.report.notes


def test_demo_with_its_file_is_the_network_in_it(demo_file: Path) -> None:
    loaded, file = load("demo", seed=3), load(str(demo_file))
    assert (loaded.report.reference, loaded.report.path) == ("demo", str(demo_file))
    assert (loaded.report.key, loaded.report.available_keys) == ("teacher", ["teacher"])
    assert loaded.report.sha256 == file.report.sha256
    assert loaded.report.identity == file.report.identity
    assert (loaded.report.num_heads, loaded.report.image_size, loaded.report.family) == (5, (32, 32), "ibot")
    assert loaded.projection_head is not None
    x = torch.randn(1, 3, 32, 32)
    wanted = layouts.vit(embed_dim=40, num_heads=5, patch_size=4).half().float()
    with torch.no_grad():
        found = loaded.backbone.outputs(x).blocks[0].cls
        torch.testing.assert_close(found, wanted.forward_features(x)[:, 0], rtol=1e-5, atol=1e-5)
    transform = eval_transform(DataSettings(data="demo"), loaded.backbone)
    assert (transform.resize, transform.crop) == (32, 32)
    assert loaded.report.notes[0] == named.DEMO_NOTE
    assert named.RANDOM_NOTE not in loaded.report.notes


def test_damaged_demo_file_is_an_error_and_never_random_weights(demo_file: Path) -> None:
    demo_file.write_bytes(demo_file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="truncated"):
        load("demo")


@pytest.mark.usefixtures("demo_file")
@pytest.mark.parametrize("settings", [{"key": "teacher"}, {"heads": 3}, {"arch": "test_vit"}])
def test_flags_for_files_are_refused_for_the_demo_file(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="'demo' names its network in full"):
        load("demo", **settings)


@pytest.mark.parametrize("name", ["random:vit_smal_patch16_224", "timm:vit_smal_patch16_224"])
def test_unknown_name_suggests_near_ones(name: str) -> None:
    with pytest.raises(CheckpointError, match="vit_small_patch16_224"):
        load(name)


def test_flags_for_files_are_refused() -> None:
    with pytest.raises(CheckpointError, match="--key"):
        load("demo", key="teacher")


def test_random_network_of_another_kind() -> None:
    loaded = load("random:mobilenetv3_small_050")
    assert isinstance(loaded.backbone, ModuleBackbone)
    assert loaded.backbone.outputs(torch.randn(2, 3, 64, 64)).blocks[0].cls.shape == (2, loaded.report.width)


def test_failed_download_says_what_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str, **_: Any) -> nn.Module:
        raise OSError(f"cannot reach the hub for {name}")

    monkeypatch.setattr(timm, "create_model", no_network)
    for name in ("hf-hub:somebody/vit", "timm:vit_tiny_patch16_224"):
        with pytest.raises(CheckpointError, match="could not fetch") as caught:
            load(name)
        assert "cannot reach the hub" in str(caught.value)
        assert "download the file" in str(caught.value)


def local_folder(folder: Path) -> nn.Module:
    """A folder as timm puts it on the hub."""
    net = timm.create_model("test_vit", num_classes=3)
    layouts.scrambled(net)
    config = {
        "architecture": "test_vit",
        "num_classes": 3,
        "num_features": net.num_features,
        "pretrained_cfg": {
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "num_classes": 3,
            "input_size": [3, 160, 160],
            "fixed_input_size": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(net.state_dict(), folder / "model.safetensors")
    return net.eval()


def test_timm_weights_with_their_mean_and_classifier(tmp_path: Path) -> None:
    net = local_folder(tmp_path)
    loaded = load(f"timm:local-dir:{tmp_path}")
    assert (loaded.backbone.mean, loaded.backbone.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert loaded.report.classifier == {"classes": 3, "input": "cls"}
    assert loaded.classifier is not None
    x = torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        features = loaded.backbone.outputs(x).blocks[0].cls
        torch.testing.assert_close(loaded.classifier(features), net(x), rtol=1e-5, atol=1e-5)
    assert load(f"timm:local-dir:{tmp_path}").report.sha256 == loaded.report.sha256


def test_arch_builds_the_network_that_is_named(tmp_path: Path) -> None:
    net = timm.create_model("test_vit", num_classes=0, img_size=64)
    layouts.scrambled(net)
    path = str(tmp_path / "x.pth")
    torch.save({"teacher": layouts.prefixed(net.state_dict(), "backbone.")}, path)
    with pytest.raises(CheckpointError, match="--heads"):
        load(path)
    loaded = load(path, arch="test_vit")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        found = loaded.backbone.outputs(x).blocks[0].cls
        torch.testing.assert_close(found, net.eval().forward_features(x)[:, 0], rtol=1e-5, atol=1e-5)
    assert loaded.report.overrides == {"arch": "test_vit"}
    assert loaded.report.image_size == (64, 64), "built for the stored positions, so that none are resized"
    assert loaded.report.family == "vit", "the family is that of the file's layout"


def test_arch_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "x.pth")
    torch.save(layouts.vit().state_dict(), path)
    with pytest.raises(CheckpointError, match=r"patch_embed.proj.weight has shape \(48, 3, 8, 8\)"):
        load(path, arch="test_vit")
    with pytest.raises(CheckpointError, match="timm has no network"):
        load(path, arch="vit_smal")
