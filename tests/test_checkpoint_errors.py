"""Files that must not be read, or not silently: each fails with what is wrong, where, and what to do."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.models.resnet import BasicBlock
from torch import Tensor

from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.errors import CheckpointError
from ibot_eval.files import sha256_file
from ibot_eval.layouts.families import number_of_heads, recognise_sincos, sincos_positions
from ibot_eval.layouts.unwrapping import choose, find_networks
from ibot_eval.settings import CheckpointSettings
from tests import layouts


def write(folder: Path, contents: Any, name: str = "checkpoint.pth") -> str:
    torch.save(contents, folder / name)
    return str(folder / name)


def load(ckpt: object, **settings: Any) -> LoadedCheckpoint:
    return load_checkpoint(CheckpointSettings(ckpt=str(ckpt), **settings))


def refused(ckpt: object, match: str, **settings: Any) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as caught:
        load(ckpt, **settings)
    return caught.value


def state(**changes: Any) -> dict[str, Tensor]:
    return dict(layouts.vit(**changes).state_dict())


# Files


def test_path_that_does_not_exist_names_near_ones(tmp_path: Path) -> None:
    write(tmp_path, state(), "ibot_vits16.pth")
    error = refused(tmp_path / "ibot_vits61.pth", "no checkpoint at")
    assert "ibot_vits16.pth" in str(error)
    assert "does not exist either" in str(refused(tmp_path / "nowhere" / "x.pth", "no checkpoint at"))


def test_forgotten_prefix_of_a_timm_name() -> None:
    assert "random:vit_tiny_patch16_224" in str(refused("vit_tiny_patch16_224", "no checkpoint at"))


def test_no_checkpoint_at_all() -> None:
    with pytest.raises(CheckpointError, match="no checkpoint was given"):
        load_checkpoint(CheckpointSettings())


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".bin"])
def test_empty_truncated_and_foreign_files(tmp_path: Path, suffix: str) -> None:
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"part{suffix}"
    save_file(state(), whole) if suffix == ".safetensors" else torch.save(state(), whole)
    path.write_bytes(b"")
    refused(path, "empty")
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    refused(path, "truncated")
    path.write_bytes(b"<html>404 Not Found</html>" * 50)
    assert str(path) in str(refused(path, "not a checkpoint"))


def test_truncated_file_of_old_torch(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.pth", tmp_path / "part.pth"
    torch.save(state(), whole, _use_new_zipfile_serialization=False)
    assert load(whole, heads=3).report.matched == len(state())
    path.write_bytes(whole.read_bytes()[:-1000])
    refused(path, "truncated")


def test_folder_without_checkpoint_lists_its_files(tmp_path: Path) -> None:
    write(tmp_path, state(), "epoch_12.pth")
    assert "epoch_12.pth" in str(refused(tmp_path, "holds no checkpoint"))


def test_run_folder_without_the_network_asked_for(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "teacher.safetensors")
    assert "--key teacher" in str(refused(tmp_path, "no network 'student'", key="student"))


def test_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    ckpt = write(tmp_path, state())
    assert load(ckpt, heads=3).report.sha256 == sha256_file(Path(ckpt))


# Pickles


def numpy_1(path: Path) -> None:
    """Puts numpy 1's module paths into a file's pickle, same length not being needed inside an uncompressed zip."""
    import zipfile

    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


@pytest.mark.parametrize("convert", [lambda _: None, numpy_1], ids=["numpy 2", "numpy 1"])
def test_arguments_and_numpy_values_are_allowed(tmp_path: Path, convert: Callable[[Path], None]) -> None:
    extras = {
        "args": argparse.Namespace(lr=np.float32(0.1), arch="vit_small", nested=argparse.Namespace(a=1)),
        "best": np.float64(75.2),
        "epoch": np.int64(3),
        "flag": np.bool_(True),
        "curve": np.linspace(0, 1, 5),
        "dtype": np.dtype("float16"),
    }
    ckpt = write(tmp_path, {"model": state(), **extras})
    convert(Path(ckpt))
    assert load(ckpt, heads=3).report.matched == len(state())


def test_other_objects_are_refused_by_name_and_can_be_trusted(tmp_path: Path) -> None:
    ckpt = write(tmp_path, {"model": state(), "ratio": Fraction(1, 3)})
    error = refused(ckpt, "fractions.Fraction", heads=3)
    assert "--trust-pickle" in str(error)
    assert load(ckpt, heads=3, trust_pickle=True).report.matched == len(state())


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("new", [True, False])
def test_code_in_a_file_does_not_run(tmp_path: Path, new: bool) -> None:
    ckpt = tmp_path / "attack.pth"
    torch.save({"model": state(), "x": Attack(tmp_path / "made")}, ckpt, _use_new_zipfile_serialization=new)
    refused(ckpt, "mkdir")
    assert not (tmp_path / "made").exists()


def test_bare_pickle(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(pickle.dumps({"a": 1}))
    refused(path, "truncated, or not a checkpoint|no tensors")


# Finding the network


def test_key_that_is_not_there_lists_what_is(tmp_path: Path) -> None:
    ckpt = write(tmp_path, layouts.ibot_full(layouts.vit(1), layouts.vit(2)))
    assert "student, teacher" in str(refused(ckpt, "'target'", key="target", heads=3))
    single = write(tmp_path, state(), "single.pth")
    assert "leave --key out" in str(refused(single, "'teacher'", key="teacher", heads=3))


def test_several_networks_of_equal_rank_need_a_key(tmp_path: Path) -> None:
    file = {"first": state(), "second": state(seed=1)}
    assert "--key" in str(refused(write(tmp_path, file), "first, second", heads=3))
    assert load(write(tmp_path, file), key="second", heads=3).report.key == "second"


def test_no_tensors_and_unknown_tensors(tmp_path: Path) -> None:
    refused(write(tmp_path, {"epoch": 3}), "no tensors")
    error = refused(write(tmp_path, {"features.0.weight": torch.ones(3)}), "no known network layout")
    assert "features.0.weight" in str(error)


@pytest.mark.parametrize("prefix", ["", "module.linear.", "linear."])
def test_linear_classifier_alone(tmp_path: Path, prefix: str) -> None:
    name = prefix or "fc."
    head = {f"{name}weight": torch.ones(10, 48), f"{name}bias": torch.ones(10)}
    refused(write(tmp_path, {"state_dict": head, "optimizer": {"state": {0: {"m": torch.ones(2)}}}}), "only a linear")


def test_xcit_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {**state(), "blocks.0.attn.temperature": torch.ones(3, 1, 1)}
    refused(write(tmp_path, tensors), "XCiT", heads=3)


def test_roles_of_flat_and_nested_files_are_the_same() -> None:
    nested = {"teacher": {"backbone": state(), "head": layouts.projection_head()}, "student": {"backbone": state()}}
    flat = layouts.prefixed(state(), "teacher.backbone.") | layouts.prefixed(state(), "student.backbone.")
    for contents in (nested, flat):
        networks = find_networks(contents)
        assert sorted(network.role for network in networks) == ["student", "teacher"]
        assert choose(networks, None).role == "teacher"
        assert len(choose(networks, "student").trunk) == len(state())


# Coverage


def test_missing_tensors_are_counted_and_named(tmp_path: Path) -> None:
    tensors = state()
    for name in ("blocks.1.attn.proj.bias", "norm.weight"):
        del tensors[name]
    error = refused(write(tmp_path, tensors), f"only {len(state()) - 2} of the backbone's {len(state())}", heads=3)
    assert "blocks.1.attn.proj.bias, norm.weight" in str(error)


def test_missing_block(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in state(depth=3).items() if not name.startswith("blocks.1.")}
    refused(write(tmp_path, tensors), "block 1 of 3 is missing", heads=3)


def test_running_statistics_are_needed(tmp_path: Path) -> None:
    tensors = dict(layouts.resnet(block=BasicBlock).state_dict())
    del tensors["layer1.0.bn1.running_mean"]
    assert "layer1.0.bn1.running_mean" in str(refused(write(tmp_path, tensors), "only 59 of the backbone's 60"))


def test_wrong_shape_names_tensor_and_both_shapes(tmp_path: Path) -> None:
    tensors = {**state(), "blocks.1.mlp.fc1.weight": torch.ones(100, 48)}
    refused(write(tmp_path, tensors), r"blocks.1.mlp.fc1.weight has shape \(100, 48\).*\(192, 48\)", heads=3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    tensors = state()
    tensors["blocks.1.norm2.weight"] = tensors["blocks.1.norm2.weight"].clone()
    tensors["blocks.1.norm2.weight"][3] = value
    refused(write(tmp_path, tensors), "blocks.1.norm2.weight holds 1 values", heads=3)


def test_head_that_is_not_finite(tmp_path: Path) -> None:
    head = layouts.projection_head()
    head["mlp.2.bias"][0] = float("nan")
    tensors = layouts.prefixed(state(), "backbone.") | layouts.prefixed(head, "head.")
    refused(write(tmp_path, tensors), "head.mlp.2.bias", heads=3)


def test_unknown_tensors_are_reported(tmp_path: Path) -> None:
    tensors = {**state(), "loss.center": torch.ones(3), "masked_embed": torch.ones(1, 48)}
    report = load(write(tmp_path, tensors), heads=3).report
    assert report.unexpected == ["loss.center"]
    assert report.ignored == ["masked_embed"]
    assert any("loss.center" in note for note in report.notes)


def test_unused_fc_norm_is_on_the_allow_list(tmp_path: Path) -> None:
    tensors = {**state(), "fc_norm.weight": torch.ones(48), "fc_norm.bias": torch.zeros(48)}
    report = load(write(tmp_path, tensors), heads=3).report
    assert report.ignored == ["fc_norm.weight", "fc_norm.bias"]
    assert report.unexpected == []


def test_other_networks_and_optimisers_are_not_left_over(tmp_path: Path) -> None:
    report = load(write(tmp_path, layouts.ibot_full(layouts.vit(1), layouts.vit(2))), heads=3).report
    assert (report.unexpected, report.ignored) == ([], [])


# Heads, patches and grids


@pytest.mark.parametrize(
    ("family", "width", "depth", "heads"),
    [
        ("mocov3", 384, 12, 12),
        ("mocov3", 768, 12, 12),
        ("ibot", 192, 12, 3),
        ("ibot", 384, 12, 6),
        ("dino", 768, 12, 12),
        ("vit", 1024, 24, 16),
        ("mae", 1280, 32, 16),
        ("dinov2", 1536, 40, 24),
        ("dinov3", 1280, 32, 20),
        ("dinov3", 4096, 40, 32),
    ],
)
def test_heads_by_family(family: str, width: int, depth: int, heads: int) -> None:
    assert number_of_heads(family, width, depth, None) == heads


def test_heads_of_a_whole_moco_v3_file(tmp_path: Path) -> None:
    net = layouts.with_sincos(layouts.vit(embed_dim=384, depth=12, num_heads=12, mlp_ratio=0.1, patch_size=16), "row")
    for contents in (layouts.mocov3(net, net), dict(net.state_dict())):
        loaded = load(write(tmp_path, contents))
        assert (loaded.report.num_heads, loaded.report.architecture) == (12, "vit-s/16")
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        found = loaded.backbone.outputs(x).blocks[0].cls
        torch.testing.assert_close(found, net.forward_features(x)[:, 0], rtol=1e-5, atol=1e-5)


def test_unknown_heads_ask_for_them_with_the_divisors(tmp_path: Path) -> None:
    ckpt = write(tmp_path, state())
    assert "1, 2, 3, 4, 6" in str(refused(ckpt, "--heads"))
    assert "--heads" in str(refused(ckpt, "5 heads do not divide", heads=5))
    assert load(ckpt, heads=6).report.overrides == {"heads": 6}


def test_heads_that_contradict_the_bias_table(tmp_path: Path) -> None:
    refused(write(tmp_path, layouts.beit().state_dict()), "3 heads, not 6", heads=6)


def test_patch_size_that_contradicts_the_tensors(tmp_path: Path) -> None:
    ckpt = write(tmp_path, state())
    refused(ckpt, "patch size is 8, not 16", heads=3, patch_size=16)
    assert load(ckpt, heads=3, patch_size=8).report.patch_size == 8


def test_grid_that_is_not_square(tmp_path: Path) -> None:
    net = layouts.vit(img_size=(32, 56))
    ckpt = write(tmp_path, net.state_dict())
    error = refused(ckpt, "no square grid", heads=3)
    assert "4 7" in str(error)
    assert "7 4" in str(error)
    loaded = load(ckpt, heads=3, grid=(4, 7))
    x = torch.randn(1, 3, 32, 56)
    with torch.no_grad():
        found = loaded.backbone.outputs(x).blocks[0]
        torch.testing.assert_close(found.patches.flatten(1, 2), net.forward_features(x)[:, 1:], rtol=1e-5, atol=1e-5)
    assert loaded.report.overrides == {"heads": 3, "grid": (4, 7)}
    refused(ckpt, "grid of 5x5", heads=3, grid=(5, 5))


def test_no_position_embeddings(tmp_path: Path) -> None:
    tensors = state()
    del tensors["pos_embed"]
    refused(write(tmp_path, tensors), "no position embeddings", heads=3)


@pytest.mark.parametrize(("order", "first"), [("mae", "column"), ("mocov3", "row")])
def test_fixed_positions(order: Any, first: str) -> None:
    table = layouts.sincos(3, 5, 24, first)
    torch.testing.assert_close(sincos_positions((3, 5), 24, order), table, rtol=1e-6, atol=1e-6)
    assert recognise_sincos(table.half()) == (order, (3, 5))
    assert recognise_sincos(table + 0.05) is None
