"""``ibot-eval convert``: the published layout is checked as the published code reads it, timm's as timm does."""

from __future__ import annotations

import contextlib
import errno
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from ibot_eval import cli, export
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.export import write_network
from ibot_eval.models import wrap
from ibot_eval.settings import CheckpointSettings
from tests import layouts
from tests.test_export import assert_equal, head, published_names

MASK = torch.full((1, 48), 0.25)


def convert(*arguments: object) -> int:
    return cli.main(["convert", *map(str, arguments)])


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """As pre-training leaves it: student with an own last layer for patches, teacher with a shared head."""
    folder = tmp_path / "run"
    for name, seed, sharing in (("student", 1, "last-separate"), ("teacher", 2, "shared")):
        backbone = wrap(layouts.vit(seed, depth=4), family="ibot")
        mask = MASK if name == "student" else None
        write_network(folder / f"{name}.safetensors", backbone=backbone, head=head(sharing), masked_embed=mask)
    return folder


def read(path: Path, **settings: Any) -> LoadedCheckpoint:
    return load_checkpoint(CheckpointSettings(ckpt=str(path), **settings))


def bare(loaded: LoadedCheckpoint) -> dict[str, Tensor]:
    net: Any = loaded.backbone
    return net.net.state_dict()


def as_published(contents: dict[str, dict[str, Tensor]], key: str) -> dict[str, Tensor]:
    """What the published evaluations do to names before ``load_state_dict``."""
    return {name.replace("module.", "").replace("backbone.", ""): tensor for name, tensor in contents[key].items()}


def test_published_layout_of_a_run_folder(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ibot.pth"
    assert convert("--ckpt", run_folder, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "student and teacher" in printed
    assert "left out: nothing" in printed
    assert "3 heads" in printed
    contents = torch.load(out, weights_only=True)
    heads = {f"head.{name}" for name in layouts.projection_head()}
    names = published_names("vit.safetensors") | heads
    assert contents.keys() == {"student", "teacher"}
    assert contents["teacher"].keys() == names
    assert contents["student"].keys() == {f"module.{name}" for name in names | {"backbone.masked_embed"}}
    for role, seed in (("student", 1), ("teacher", 2)):
        net = layouts.vit(0, depth=4)
        missing, unexpected = net.load_state_dict(as_published(contents, role), strict=False)
        assert missing == []
        assert {name.split(".")[0] for name in unexpected} <= {"head", "masked_embed"}
        assert_equal(net.state_dict(), layouts.vit(seed, depth=4).state_dict())
    teacher = contents["teacher"]
    for part in ("weight_g", "weight_v"):
        assert torch.equal(teacher[f"head.last_layer2.{part}"], teacher[f"head.last_layer.{part}"])
    assert torch.equal(contents["student"]["module.backbone.masked_embed"], MASK)


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_published_layout_reads_back_here(run_folder: Path, tmp_path: Path, role: str) -> None:
    assert convert("--ckpt", run_folder, "--out", tmp_path / "ibot.pth") == 0
    again, before = read(tmp_path / "ibot.pth", heads=3, key=role), read(run_folder, key=role)
    assert_equal(again.backbone.state_dict(), before.backbone.state_dict())
    assert again.projection_head is not None
    assert before.projection_head is not None
    assert again.projection_head.sharing == before.projection_head.sharing
    assert_equal(again.projection_head.state_dict(), before.projection_head.state_dict())
    assert again.report.unexpected == []
    assert again.report.family == "ibot"


@pytest.mark.parametrize(("key", "wanted"), [("student", "student"), ("teacher", "teacher")])
def test_one_network_by_its_key(
    run_folder: Path, tmp_path: Path, key: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one.pth"
    assert convert("--ckpt", run_folder, "--key", key, "--out", out) == 0
    assert list(torch.load(out, weights_only=True)) == [wanted]
    assert "left out: the other networks of the checkpoint" in capsys.readouterr().out


def test_a_file_of_the_published_code_comes_out_as_it_was(tmp_path: Path) -> None:
    source, out = tmp_path / "full.pth", tmp_path / "again.pth"
    before = layouts.ibot_full(layouts.vit(1), layouts.vit(2))
    torch.save(before, source)
    assert convert("--ckpt", source, "--heads", 3, "--out", out) == 0
    after = torch.load(out, weights_only=True)
    for role in ("student", "teacher"):
        assert_equal(after[role], before[role])


def test_a_network_of_no_role_is_a_teacher(tmp_path: Path) -> None:
    torch.save(layouts.with_classifier(layouts.vit().state_dict()), tmp_path / "x.pth")
    assert convert("--ckpt", tmp_path / "x.pth", "--heads", 3, "--out", tmp_path / "y.pth") == 0
    contents = torch.load(tmp_path / "y.pth", weights_only=True)
    assert_equal(as_published(contents, "teacher"), layouts.vit().state_dict())


def test_half(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "half.pth"
    assert convert("--ckpt", run_folder, "--out", out, "--half") == 0
    teacher = torch.load(out, weights_only=True)["teacher"]
    assert {tensor.dtype for tensor in teacher.values()} == {torch.float16}
    net: Any = layouts.vit(2, depth=4)
    assert torch.equal(teacher["backbone.norm.weight"], net.norm.weight.half())


def small_swin(img_size: int = 56, **changes: Any) -> SwinTransformer:
    norm = partial(nn.LayerNorm, eps=1e-6)
    arguments: dict[str, Any] = {"depths": (2, 2, 1), "num_heads": (1, 2, 4), "window_size": 7, "norm_layer": norm}
    return layouts.swin(3, img_size=img_size, **{**arguments, **changes})


def test_published_swin_merges_at_the_end_of_a_stage(tmp_path: Path) -> None:
    net, out = small_swin(), tmp_path / "swin.pth"
    write_network(tmp_path / "teacher.safetensors", backbone=wrap(net), masked_embed=torch.ones(1, 8))
    assert convert("--ckpt", tmp_path / "teacher.safetensors", "--out", out) == 0
    teacher = torch.load(out, weights_only=True)["teacher"]
    wanted = layouts.swin_published(net)
    wanted = {name: tensor for name, tensor in wanted.items() if not name.endswith(("_index", "attn_mask"))}
    assert_equal(teacher, layouts.prefixed({**wanted, "masked_embed": torch.ones(1, 8)}, "backbone."))
    assert_equal(bare(read(out)), net.state_dict())


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_timm_layout(tmp_path: Path, ending: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    net: Any = layouts.vit(4) if kind == "vit" else small_swin()
    source, out = tmp_path / "student.safetensors", tmp_path / f"timm{ending}"
    projection, mask = head(width=net.num_features), torch.ones(1, net.patch_embed.proj.out_channels)
    write_network(source, backbone=wrap(net, family="ibot"), head=projection, masked_embed=mask)
    assert convert("--ckpt", source, "--layout", "timm", "--out", out) == 0
    assert "left out: the projection head, the masked embedding\n" in capsys.readouterr().out
    state = load_file(out) if ending == ".safetensors" else torch.load(out, weights_only=True)
    fresh: Any = layouts.vit(9) if kind == "vit" else small_swin(drop_path_rate=0.1)
    fresh.load_state_dict(state, strict=True)
    assert_equal(fresh.state_dict(), net.state_dict())
    again = read(out, heads=3 if (kind, ending) == ("vit", ".pth") else None)
    assert_equal(bare(again), net.state_dict())


def test_timm_layout_fits_timms_networks(tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    for name in ("test_vit", "test_resnet"):
        assert convert("--ckpt", f"random:{name}", "--layout", "timm", "--out", out, "--overwrite", "--half") == 0
        timm.create_model(name, num_classes=0).load_state_dict(load_file(out), strict=True)


def test_timm_layout_takes_one_network(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.pth"
    assert convert("--ckpt", run_folder, "--layout", "timm", "--out", out) == 0
    assert_equal(torch.load(out, weights_only=True), layouts.vit(2, depth=4).state_dict())
    assert "the other networks of the checkpoint" in capsys.readouterr().out


def test_a_head_that_the_published_code_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "teacher.safetensors", tmp_path / "x.pth"
    write_network(source, backbone=wrap(layouts.vit(), family="ibot"), head=head("separate"))
    assert convert("--ckpt", source, "--out", out) == 0
    assert "head.mlp2" in capsys.readouterr().out
    again = read(out, heads=3).projection_head
    assert again is not None
    assert_equal(again.state_dict(), head("separate").state_dict())


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--ckpt", "x.pth"], ["--out is missing", ".pth or .pt"]),
        (["--ckpt", "x.pth", "--out", "y.safetensors"], ["wrong ending for --layout ibot"]),
        (["--ckpt", "x.pth", "--out", "y.bin", "--layout", "timm"], ["wrong ending for --layout timm", ".safetensors"]),
        (["--out", "y.pth"], ["--ckpt is missing"]),
        (["--ckpt", "x.pth", "--heads", "3", "--out", "x.pth"], ["x.pth exists already", "--overwrite"]),
        (["--ckpt", "x.pth", "--heads", "3", "--out", "folder.pth"], ["folder.pth is a folder"]),
        (["--ckpt", "nowhere.pth", "--out", "y.pth"], ["no checkpoint at 'nowhere.pth'"]),
        (["--ckpt", "x.pth", "--out", "y.pth"], ["--heads"]),
        (["--ckpt", "x.pth", "--heads", "3", "--out", "/dev/null/y.pth"], ["cannot write /dev/null/y.pth"]),
        (["--ckpt", "large.pth", "--heads", "3", "--out", "y.pth", "--half"], ["float16 cannot hold", "--half"]),
        (["--ckpt", "registers.pth", "--heads", "3", "--out", "y.pth"], ["has no place", "--layout timm"]),
    ],
)
def test_mistakes_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    messages: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.pth").mkdir()
    torch.save(layouts.vit().state_dict(), "x.pth")
    torch.save({name: 1e6 * tensor for name, tensor in layouts.vit().state_dict().items()}, "large.pth")
    torch.save(layouts.vit(reg_tokens=2).state_dict(), "registers.pth")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert convert(*arguments) == 2
    printed = capsys.readouterr().err
    for message in messages:
        assert message in printed
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("layout", ["ibot", "timm"])
def test_a_full_disk_is_named_as_such(
    run_folder: Path,
    tmp_path: Path,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(export, "atomic_open", lambda path: contextlib.nullcontext(FullDisk()))
    assert convert("--ckpt", run_folder, "--layout", layout, "--out", tmp_path / "x.pth") == 2
    assert "x.pth: No space left on device" in capsys.readouterr().err


def test_overwrite_replaces(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save(layouts.vit().state_dict(), path)
    assert convert("--ckpt", path, "--heads", 3, "--out", path, "--overwrite") == 0
    assert list(torch.load(path, weights_only=True)) == ["teacher"]


def test_our_own_layout_keeps_what_the_file_says_about_itself(run_folder: Path, tmp_path: Path) -> None:
    about = {"recipe": {"seed": 7}, "step": 3, "role": "teacher", "mean": [0.3, 0.3, 0.3], "std": [0.4, 0.4, 0.4]}
    backbone = wrap(layouts.vit(2, depth=4), family="ibot")
    write_network(run_folder / "teacher.safetensors", backbone=backbone, head=head("shared"), metadata=about)
    out = tmp_path / "small.safetensors"
    assert convert("--ckpt", run_folder, "--layout", "ibot-eval", "--half", "--out", out) == 0
    assert about.items() <= export.own_metadata(out).items()
    assert out.stat().st_size < 0.6 * (run_folder / "teacher.safetensors").stat().st_size
    small, large = read(out), read(run_folder)
    assert (small.backbone.mean, small.backbone.std) == ((0.3,) * 3, (0.4,) * 3)
    assert_equal(bare(small), {name: tensor.half().float() for name, tensor in bare(large).items()})
    assert small.projection_head is not None
    assert small.report.identity == large.report.identity
