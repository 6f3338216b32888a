"""Networks written by ``write_network`` come back from ``load_checkpoint`` bit for bit, with all that shapes them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ibot_eval.backbone import Backbone
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.errors import CheckpointError
from ibot_eval.export import described, write_network
from ibot_eval.heads import ProjectionHead
from ibot_eval.models import wrap
from ibot_eval.models.identity import identity_of
from ibot_eval.settings import CheckpointSettings
from tests import layouts

GOLDEN = Path(__file__).parent / "golden"


def vit(seed: int = 0, **changes: Any) -> Backbone:
    return wrap(layouts.vit(seed, **changes), family="ibot")


def swin(window: int, seed: int = 0, **changes: Any) -> Backbone:
    norm = partial(nn.LayerNorm, eps=1e-6)
    options: dict[str, Any] = {"norm_layer": norm, "strict_img_size": False, "drop_path_rate": 0.0}
    net = layouts.swin(seed, window_size=window, **options, **changes)
    return wrap(net, family="ibot-swin")


def head(sharing: Any = "shared", width: int = 48, **changes: Any) -> ProjectionHead:
    arguments: dict[str, Any] = {"num_prototypes": 10, "hidden": 16, "bottleneck": 6, **changes}
    return layouts.scrambled(ProjectionHead(width, sharing=sharing, **arguments), seed=5)


def load(path: Path, **settings: Any) -> LoadedCheckpoint:
    return load_checkpoint(CheckpointSettings(ckpt=str(path), **settings))


def round_trip(folder: Path, backbone: Backbone, **arguments: Any) -> LoadedCheckpoint:
    write_network(folder / "teacher.safetensors", backbone=backbone, **arguments)
    return load(folder / "teacher.safetensors")


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_same(loaded: LoadedCheckpoint, backbone: Any, *sizes: tuple[int, int]) -> None:
    assert_equal(loaded.backbone.state_dict(), backbone.state_dict())
    assert loaded.report.identity == identity_of(backbone)
    assert (loaded.backbone.mean, loaded.backbone.std) == (backbone.mean, backbone.std)
    assert loaded.report.unexpected == []
    for size in sizes:
        x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found, wanted = (b.outputs(x, blocks=(0, -1)) for b in (loaded.backbone, backbone))
        for one, two in zip(found.blocks, wanted.blocks, strict=True):
            assert torch.equal(one.cls, two.cls)
            assert torch.equal(one.patches, two.patches)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"patch_size": 4, "img_size": 24, "embed_dim": 40, "depth": 3, "num_heads": 5},
        {"img_size": (16, 48), "num_heads": 1, "mlp_ratio": 3},
        {"norm_layer": partial(nn.LayerNorm, eps=1e-5), "qkv_bias": False},
        {"embed_dim": 192, "depth": 12, "num_heads": 4, "patch_size": 16},
    ],
    ids=["small", "odd", "oblong", "eps", "other heads than ViT-Ti"],
)
def test_vits(tmp_path: Path, changes: dict[str, Any]) -> None:
    backbone = vit(**changes)
    size, patch = changes.get("img_size", 32), backbone.patch_size
    trained = size if isinstance(size, tuple) else (size, size)
    loaded = round_trip(tmp_path, backbone, head=head(width=backbone.dims[-1]))
    assert_same(loaded, backbone, trained, (3 * patch, 5 * patch))
    assert (loaded.report.family, loaded.report.image_size) == ("ibot", trained)


@pytest.mark.parametrize("window", [7, 14])
def test_swins_of_224_px(tmp_path: Path, window: int) -> None:
    backbone = swin(window)
    assert_same(round_trip(tmp_path, backbone, masked_embed=torch.full((1, 8), 0.5)), backbone, (224, 224), (96, 96))


def test_a_swin_whose_windows_do_not_tell_its_size(tmp_path: Path) -> None:
    """At 64 px the last stage is one window of 4, which is not shifted; tables of 4 everywhere would mean 224 px."""
    backbone = swin(4, img_size=64, depths=(1, 1, 2), num_heads=(1, 2, 4))
    loaded = round_trip(tmp_path, backbone)
    assert_same(loaded, backbone, (64, 64), (96, 128))
    last: Any = loaded.backbone
    assert last.net.layers[2].blocks[1].shift_size == (0, 0)
    assert loaded.report.image_size == (64, 64)
    assert loaded.report.family == "ibot-swin"


@pytest.mark.parametrize(
    ("sharing", "changes"),
    [
        ("shared", {}),
        ("last-separate", {"patch_prototypes": 12}),
        ("separate", {}),
        ("separate", {"patch_prototypes": 7, "bottleneck": 9, "hidden": 24, "layers": 2}),
        ("shared", {"batch_norm": True}),
    ],
)
def test_heads(tmp_path: Path, sharing: Any, changes: dict[str, Any]) -> None:
    wanted = head(sharing, **changes)
    loaded = round_trip(tmp_path, vit(), head=wanted, masked_embed=torch.ones(1, 48))
    assert loaded.projection_head is not None
    assert loaded.projection_head.sharing == sharing
    assert_equal(loaded.projection_head.state_dict(), wanted.state_dict())
    assert loaded.report.unexpected == []


def test_masked_embedding(tmp_path: Path) -> None:
    embedding = nn.Parameter(torch.randn(1, 48))
    loaded = round_trip(tmp_path, vit(), masked_embed=embedding)
    assert loaded.masked_embed is not None
    assert torch.equal(loaded.masked_embed, embedding)
    assert loaded.report.ignored == ["masked_embed"]
    assert round_trip(tmp_path, vit()).masked_embed is None


def test_half_precision_halves_the_file_and_rounds_once(tmp_path: Path) -> None:
    backbone, projection = vit(), head("last-separate")
    write_network(tmp_path / "full.safetensors", backbone=backbone, head=projection)
    loaded = round_trip(tmp_path, backbone, head=projection, dtype=torch.float16)
    rounded = {name: tensor.half().float() for name, tensor in backbone.state_dict().items()}
    assert_equal(loaded.backbone.state_dict(), rounded)
    assert loaded.projection_head is not None
    assert torch.equal(loaded.projection_head.mlp[0].weight, projection.mlp[0].weight.half().float())  # pyright: ignore
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("full", "teacher")]
    assert sizes[1] < 0.6 * sizes[0]
    assert next(iter(backbone.parameters())).dtype == torch.float32, "the network itself is left as it is"


def test_run_folder(tmp_path: Path) -> None:
    student, teacher = vit(1), vit(2)
    write_network(tmp_path / "student.safetensors", backbone=student, head=head("separate"))
    write_network(tmp_path / "teacher.safetensors", backbone=teacher, head=head())
    assert_same(load(tmp_path), teacher)
    loaded = load(tmp_path, key="student")
    assert_same(loaded, student)
    assert (loaded.report.key, loaded.report.available_keys) == ("student", ["teacher", "student"])
    assert loaded.projection_head is not None
    assert loaded.projection_head.sharing == "separate"


def test_normalisation_travels_along(tmp_path: Path) -> None:
    backbone = vit()
    backbone.mean, backbone.std = (0.1, 0.2, 0.3), (1.0, 0.9, 0.8)
    assert_same(round_trip(tmp_path, backbone), backbone)


def test_metadata(tmp_path: Path) -> None:
    path = tmp_path / "teacher.safetensors"
    recipe = {"epochs": 3, "head": {"prototypes": 10}, "name": "é", "grid": None}
    given = {"recipe": recipe, "step": 7, "role": "teacher", "family": "dino"}
    write_network(path, backbone=vit(), metadata=given)
    with safe_open(str(path), "pt") as file:
        about = json.loads(file.metadata()["ibot_eval"])
    assert {name: about[name] for name in given} == given
    assert about["heads"] == 3
    assert about["eps"] == 1e-6
    assert about["grid"] == [4, 4]
    assert load(path).report.family == "dino", "what is given wins over what the network tells"
    first = path.read_bytes()
    write_network(path, backbone=vit(), metadata=dict(reversed(given.items())))
    assert path.read_bytes() == first, "equal networks make equal files"


def published_names(golden: str) -> set[str]:
    names = {name.removeprefix("state/") for name in load_file(GOLDEN / golden) if name.startswith("state/")}
    return {f"backbone.{name}" for name in names if not name.endswith("relative_position_index")}


def test_names_are_the_published_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_network(path, backbone=vit(depth=4), head=head("last-separate"), masked_embed=torch.zeros(1, 48))
    heads = {f"head.{name}" for name in layouts.projection_head(shared=False)}
    assert load_file(path).keys() == published_names("vit.safetensors") | heads | {"backbone.masked_embed"}
    write_network(path, backbone=swin(4, img_size=32, depths=(2, 2), num_heads=(2, 4)))
    assert load_file(path).keys() == published_names("swin.safetensors")


@pytest.mark.parametrize("bad", ["nan", "large"])
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "teacher.safetensors"
    write_network(path, backbone=vit())
    before, broken = path.read_bytes(), vit()
    with torch.no_grad():
        dict(broken.named_parameters())["net.norm.weight"][3] = float("nan") if bad == "nan" else 1e5
    with pytest.raises(CheckpointError, match=r"norm\.weight holds") as caught:
        write_network(path, backbone=broken, dtype=torch.float16)
    assert ("float16 cannot hold" in str(caught.value)) == (bad == "large")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["teacher.safetensors"]


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (wrap(layouts.vit(reg_tokens=2)), "reg_token"),
        (wrap(layouts.vit(init_values=1e-5)), r"blocks\.0\.ls1\.gamma"),
        (wrap(layouts.vit(no_embed_class=True)), "no position embedding"),
        (wrap(layouts.vit(class_token=False, global_pool="avg", fc_norm=False)), r"\[CLS\] is missing"),
        (wrap(layouts.resnet()), "neither a plain ViT nor a Swin"),
        (wrap(nn.Conv2d(3, 4, 2)), "neither a plain ViT nor a Swin"),
    ],
)
def test_networks_that_the_published_code_does_not_have(tmp_path: Path, backbone: Backbone, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_network(tmp_path / "x.safetensors", backbone=backbone)
    assert list(tmp_path.iterdir()) == []


def test_norms_of_several_eps_cannot_be_described() -> None:
    backbone: Any = vit()
    backbone.net.norm.eps = 1e-3
    with pytest.raises(CheckpointError, match="differ in eps"):
        described(backbone)
