"""ibot_eval.finetuning.saving: files that timm and ``load_checkpoint`` read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.export import own_metadata
from ibot_eval.finetuning.network import Classifier, build_classifier
from ibot_eval.finetuning.saving import classifier_of, save_classifier
from ibot_eval.heads import ProjectionHead
from ibot_eval.models import wrap
from ibot_eval.own_network import from_module
from ibot_eval.settings import CheckpointSettings
from tests import layouts

VIT = {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8}


def images(size: int) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(7))


def shared_beit() -> Any:
    return layouts.beit(use_rel_pos_bias=False, use_shared_rel_pos_bias=True)


def trained(net: nn.Module, size: int, **settings: Any) -> Classifier:
    """As after training: no parameter has its first value."""
    backbone = wrap(net)
    backbone.mean, backbone.std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    model = build_classifier(from_module(backbone), 5, size, head_scale=1.0, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval().requires_grad_(False)


def read(path: Path) -> LoadedCheckpoint:
    return load_checkpoint(CheckpointSettings(ckpt=str(path)))


CASES: dict[str, tuple[Any, int, dict[str, Any], tuple[str, dict[str, Any]] | None]] = {
    "vit": (layouts.vit(), 32, {}, ("vit_tiny_patch16_224", {**VIT, "img_size": 32})),
    "vit mean": (
        layouts.vit(),
        48,
        {"pooling": "mean", "layer_scale": 0.1},
        ("vit_tiny_patch16_224", {**VIT, "img_size": 48, "global_pool": "avg", "init_values": 0.1}),
    ),
    "vit registers": (layouts.vit(reg_tokens=2, no_embed_class=True), 48, {}, None),
    "vit relative": (
        layouts.vit(),
        32,
        {"positions": "relative"},
        (
            "beit_base_patch16_224",
            {**VIT, "img_size": 32, "global_pool": "token", "use_abs_pos_emb": True, "init_values": 0},
        ),
    ),
    "beit": (layouts.beit(), 48, {"pooling": "mean"}, ("beit_base_patch16_224", {**VIT, "img_size": 48})),
    "beit shared": (shared_beit(), 32, {"pooling": "mean"}, None),
    "beit cls": (shared_beit(), 32, {"positions": "relative"}, None),
    "swin": (
        layouts.swin(img_size=64, window_size=2),
        64,
        {},
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 64, "window_size": 2, "embed_dim": 8, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)},
        ),
    ),
    "swin at another size": (layouts.swin(img_size=64, window_size=2), 96, {}, None),
    "dinov3": (layouts.eva(), 48, {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_files_come_back(case: str, tmp_path: Path):
    net, size, settings, _ = CASES[case]
    model, path = trained(net, size, **settings), tmp_path / "classifier.safetensors"
    save_classifier(path, model, {"class_names": list("abcde"), "image_size": size})
    loaded = read(path)
    again = classifier_of(loaded)
    expected, found = model.state_dict(), again.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(again(images(size)), model(images(size)))
    assert not loaded.report.unexpected
    assert not loaded.report.missing
    kind = "norm_patch_mean" if settings.get("pooling") == "mean" else "cls"
    assert loaded.report.classifier == {"classes": 5, "input": kind}
    assert loaded.backbone.mean == (0.4, 0.5, 0.6)
    assert loaded.backbone.std == (0.2, 0.3, 0.4)
    about = own_metadata(path)
    assert about["class_names"] == list("abcde")
    assert about["image_size"] == size
    assert about["classes"] == 5
    # The core's readers put the classifier on the output that the report names.
    with torch.no_grad():
        block = loaded.backbone.outputs(images(size), norm="none" if kind != "cls" else "final").blocks[0]
        pooled = block.cls if kind == "cls" else loaded.backbone.final_norm(block.patches.mean(dim=(1, 2)))
        assert loaded.classifier is not None
        torch.testing.assert_close(loaded.classifier(pooled), model(images(size)))


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case[3] is not None])
def test_timm_takes_the_file(case: str, tmp_path: Path):
    net, size, settings, reference = CASES[case]
    assert reference is not None
    model, path = trained(net, size, **settings), tmp_path / "classifier.safetensors"
    save_classifier(path, model)
    name, arguments = reference
    network = timm.create_model(name, num_classes=5, **arguments)
    network.load_state_dict(load_file(path))
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(images(size)), model(images(size)))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_projection_layers_come_back(batch_norm: bool, tmp_path: Path):
    loaded = from_module(layouts.vit())
    loaded.projection_head = ProjectionHead(48, 10, hidden=16, bottleneck=6, layers=4, batch_norm=batch_norm)
    model = build_classifier(loaded, 5, 32, head_scale=1.0, head_layers=2).eval()
    path = tmp_path / "classifier.safetensors"
    save_classifier(path, model)
    again = classifier_of(read(path))
    assert again.projection is not None
    assert repr(again.projection) == repr(model.projection)
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    with torch.no_grad():
        assert torch.equal(again(images(32)), model(images(32)))


def test_equal_networks_give_equal_bytes(tmp_path: Path):
    for name in ("a", "b"):
        save_classifier(tmp_path / f"{name}.safetensors", trained(layouts.vit(), 32), {"b": 1, "a": 2})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_other_tensors_can_be_written(tmp_path: Path):
    model, path = trained(layouts.vit(), 32), tmp_path / "average.safetensors"
    average = {name: 0.5 * tensor for name, tensor in model.state_dict().items()}
    save_classifier(path, model, state=average)
    found = classifier_of(read(path)).state_dict()
    assert all(torch.equal(found[name], average[name]) for name in average)


def test_a_diverged_network_is_not_written(tmp_path: Path):
    model, path = trained(layouts.vit(), 32), tmp_path / "classifier.safetensors"
    save_classifier(path, model)
    before = path.read_bytes()
    model.head.weight[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        save_classifier(path, model)
    assert path.read_bytes() == before


def test_a_saved_network_is_known_as_finetuned(tmp_path: Path):
    path = tmp_path / "classifier.safetensors"
    save_classifier(path, trained(layouts.vit(), 32))
    loaded = read(path)
    with pytest.raises(ConfigError, match="--from-finetuned"):
        build_classifier(loaded, 5, 48)
    further = build_classifier(loaded, 5, 48, allow_finetuned=True, keep_head=True)
    assert further(images(48)).shape == (3, 5)


def test_classifiers_of_other_programs_are_taken(tmp_path: Path):
    path = tmp_path / "deit.safetensors"
    net = layouts.vit(num_classes=5)
    save_file(net.state_dict(), path)
    loaded = load_checkpoint(CheckpointSettings(ckpt=str(path), heads=3))
    with torch.no_grad():
        torch.testing.assert_close(classifier_of(loaded)(images(32)), net(images(32)))


def test_files_without_a_fitting_classifier_are_refused():
    loaded = from_module(layouts.vit())
    with pytest.raises(CheckpointError, match="no linear classifier"):
        classifier_of(loaded)
    loaded.classifier = nn.Linear(96, 5)
    with pytest.raises(CheckpointError, match="takes 96 features and the network gives 48"):
        classifier_of(loaded)
