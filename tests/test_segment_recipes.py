"""Recipes of segmentation: what they hold and what their headers say."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from ibot_eval import cli, recipes
from ibot_eval.backbone import IMAGENET_MEAN, IMAGENET_STD
from ibot_eval.published import lookup
from ibot_eval.settings import RunSettings
from protocols import segment

NAMES = recipes.names("segment")
ARCHITECTURES = {"ViT-S/16": "vit-s/16", "ViT-B/16": "vit-b/16", "ViT-L/16": "vit-l/16"}
PUBLISHED = {
    "segment/ade20k_vitb16_upernet": 50.0,
    "segment/ade20k_vitb16_linear": 38.3,
    "segment/ade20k_vitb16_setr_pup": 45.6,
}
UNPUBLISHED = tuple(f"segment/ade20k_{name}" for name in ("vits16_upernet", "vitl16_upernet", "vits16_linear"))


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load(recipes.find(name).read_text(encoding="utf-8"))


def header(name: str) -> str:
    lines = recipes.find(name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("#") for line in lines if line.startswith("#"))


class Network:
    """As much of a backbone as the settings ask for."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture


class Transform:
    """ImageNet's, as of iBOT's checkpoints."""

    mean, std = IMAGENET_MEAN, IMAGENET_STD


def protocol_of(name: str, monkeypatch: pytest.MonkeyPatch, processes: int = 8) -> tuple[segment.Segment, Any]:
    """As a run of ``processes`` would have it."""
    call = cli.parse_protocol("segment", ["--recipe", name])
    architecture = next(arch for title, arch in ARCHITECTURES.items() if title in header(name).splitlines()[0])
    monkeypatch.setattr(segment.distributed, "world_size", lambda: processes)
    network: Any = Network(architecture)
    transform: Any = Transform()
    protocol = segment.Segment(call.config).for_network(network, transform, frozenset(call.asked))
    protocol.labels = (150, True, 255)
    return protocol, call.settings.output


def test_all_that_is_published_is_there() -> None:
    assert set(NAMES) == {*PUBLISHED, *UNPUBLISHED, "segment/tiny", "segment/tiny_linear"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_repeats_no_default(name: str) -> None:
    defaults = vars(segment.SegmentConfig()) | {k: v for g in RunSettings().groups() for k, v in vars(g).items()}
    assert [key for key, value in content(name).items() if defaults[key] == value] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_header_parses(name: str) -> None:
    commands = [shlex.split(line) for line in header(name).replace("\\\n", " ").splitlines() if line.startswith("   ")]
    assert any(name in command for command in commands)
    for program, protocol, *flags in commands:
        assert (program, protocol) == ("ibot-eval", "segment")
        call = cli.parse_protocol(protocol, flags)
        call.kind(call.config)
        assert call.settings.checkpoint.ckpt
        assert call.settings.data.data


def found(protocol: segment.Segment, out: Any) -> float | None:
    """The published number beside a run's headline."""
    metric = {"name": "miou", "params": {"head": protocol.config.head}}
    key = protocol.published_key("segment", metric, out.data_name)
    if key is None:
        return None
    number = lookup(
        key.protocol,
        key.metric,
        data=key.data,
        method=out.method,
        arch=protocol.architecture,
        params=metric["params"],
        headline=True,
    )
    return number["value"] if number else None


@pytest.mark.parametrize("name", [*PUBLISHED, *UNPUBLISHED])
def test_the_expected_number_is_the_one_that_a_run_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On as many processes as the header says, and on no other number."""
    protocol, out = protocol_of(name, monkeypatch)
    assert found(protocol, out) == PUBLISHED.get(name)
    assert protocol._as_on_ade20k()
    if name in PUBLISHED:
        assert f"miou {PUBLISHED[name]} %" in header(name)
    else:
        assert "no number of this network" in header(name)
    protocol, out = protocol_of(name, monkeypatch, 4)
    assert found(protocol, out) is None


@pytest.mark.parametrize(
    ("name", "rate", "decay"),
    [
        ("vits16_upernet", 3e-5, 0.9),
        ("vitb16_upernet", 8e-5, 0.65),
        ("vitl16_upernet", 2e-5, 0.95),
        ("vits16_linear", 3e-5, 1.0),
        ("vitb16_linear", 8e-4, 1.0),
        ("vitb16_setr_pup", 1e-3, 0.65),
    ],
)
def test_rates_are_the_released_ones(name: str, rate: float, decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the recipe names them or the network does."""
    own = protocol_of(f"segment/ade20k_{name}", monkeypatch)[0].config
    assert (own.lr, own.layer_decay) == (rate, decay)
    assert (own.iterations, own.warmup, own.crop_size, own.short_side, own.stride) == (160_000, 1500, 512, 512, 341)
    network: Any = Network(ARCHITECTURES["ViT-" + name[3].upper() + "/16"])
    transform: Any = Transform()
    bare = segment.SegmentConfig(head=own.head)
    resolved = segment.Segment(bare).for_network(network, transform, frozenset()).config
    assert (resolved.lr, resolved.layer_decay) == (rate, decay)


@pytest.mark.parametrize(
    ("name", "dropout", "drop_path"),
    [
        ("vits16_upernet", 0.1, 0.1),
        ("vitb16_upernet", 0.1, 0.1),
        ("vitl16_upernet", 0.1, 0.2),
        ("vits16_linear", 0.0, 0.1),
        ("vitb16_linear", 0.0, 0.1),
        ("vitb16_setr_pup", 0.0, 0.1),
    ],
)
def test_what_is_dropped_is_as_released(
    name: str, dropout: float, drop_path: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linear configurations and mmsegmentation's of SETR-PUP drop nothing; iBOT's of ViT-L drops more blocks."""
    own = protocol_of(f"segment/ade20k_{name}", monkeypatch)[0].config
    assert (own.dropout, own.drop_path) == (dropout, drop_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1e-4},
        {"layer_decay": 0.75},
        {"scales": (0.5, 1.0)},
        {"test_flip": True},
        {"iterations": 80_000},
        {"set": ("model.decode_head.channels=8",)},
        {"freeze_blocks": 2},
        {"inference": "whole"},
        {"dropout": 0.0},
        {"drop_path": 0.2},
    ],
)
def test_other_settings_show_no_published_number(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, out = protocol_of("segment/ade20k_vitb16_upernet", monkeypatch)
    changed = segment.Segment(segment.SegmentConfig(**{**vars(protocol.config), **changes}))
    changed.architecture, changed.inputs, changed.labels = protocol.architecture, protocol.inputs, protocol.labels
    assert found(protocol, out) == 50.0
    assert found(changed, out) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": (151, False, 255)},
        {"labels": (150, True, 0)},
        {"inputs": {"mean": (0.5,) * 3, "std": (0.5,) * 3}},
    ],
)
def test_other_data_and_inputs_show_no_published_number(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol, out = protocol_of("segment/ade20k_vitb16_upernet", monkeypatch)
    for name, value in changes.items():
        setattr(protocol, name, value)
    assert found(protocol, out) is None


def test_a_class_of_its_own_has_no_published_number(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, _ = protocol_of("segment/ade20k_vitb16_upernet", monkeypatch)
    metric = {"name": "miou", "params": {"head": "upernet", "class": "wall"}}
    assert protocol.published_key("segment", metric, "ADE20K") is None
    assert protocol.published_key("segment", {"name": "miou", "params": {}}, "Cityscapes") is None
