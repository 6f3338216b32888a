"""Recipes of detection: what they hold and what their headers say."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from ibot_eval import cli, recipes
from ibot_eval.published import lookup
from ibot_eval.settings import RunSettings
from protocols import detect

NAMES = recipes.names("detect")
ARCHITECTURES = {"ViT-S/16": "vit-s/16", "ViT-B/16": "vit-b/16", "Swin-T": "swin-t/7"}


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load(recipes.find(name).read_text(encoding="utf-8"))


def header(name: str) -> str:
    lines = recipes.find(name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("#") for line in lines if line.startswith("#"))


def protocol_of(name: str, monkeypatch: pytest.MonkeyPatch, processes: int = 8) -> tuple[detect.Detect, Any]:
    """As a run of ``processes`` on the whole of COCO would have it."""
    call = cli.parse_protocol("detect", ["--recipe", name])
    protocol = detect.Detect(call.config)
    protocol.architecture = next((arch for title, arch in ARCHITECTURES.items() if title in header(name)), None)
    protocol.classes = 80
    monkeypatch.setattr(detect.distributed, "world_size", lambda: processes)
    return protocol, call.settings.output


def test_all_that_is_published_is_there() -> None:
    wanted = ("coco_vits16", "coco_vits16_3x", "coco_vitb16", "coco_vitb16_3x", "coco_swint", "tiny")
    assert set(NAMES) == {f"detect/{name}" for name in wanted}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_repeats_no_default(name: str) -> None:
    defaults = vars(detect.DetectConfig()) | {k: v for g in RunSettings().groups() for k, v in vars(g).items()}
    same = [key for key, value in content(name).items() if defaults[key] == value]
    assert same == []


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_header_parses(name: str) -> None:
    commands = [shlex.split(line) for line in header(name).replace("\\\n", " ").splitlines() if line.startswith("   ")]
    assert any(name in command for command in commands)
    for program, protocol, *flags in commands:
        assert (program, protocol) == ("ibot-eval", "detect")
        call = cli.parse_protocol(protocol, flags)
        call.kind(call.config)
        assert call.settings.checkpoint.ckpt
        assert call.settings.data.data


def test_the_expected_numbers_are_those_that_a_run_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On as many processes as the header says, and on no other number."""
    protocol, out = protocol_of("detect/coco_vitb16", monkeypatch)
    text = header("detect/coco_vitb16")
    for metric in ("box_ap", "mask_ap"):
        key = protocol.published_key("detect", {"name": metric, "params": {}}, out.data_name)
        assert key is not None
        found = lookup(
            key.protocol, key.metric, data=key.data, method=out.method, arch="vit-b/16", params={}, headline=True
        )
        assert found is not None
        assert f"{metric} {found['value']} %" in text
        assert found["source"] in text
    small = {"name": "box_ap", "params": {"size": "small"}}
    assert protocol.published_key("detect", small, "COCO") is None
    for name, processes in (("coco_vitb16", 1), ("coco_vitb16_3x", 8), ("coco_swint", 8)):
        changed, _ = protocol_of(f"detect/{name}", monkeypatch, processes)
        assert changed.published_key("detect", {"name": "box_ap", "params": {}}, "COCO") is None


def test_other_classes_have_no_published_number(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, _ = protocol_of("detect/coco_vitb16", monkeypatch)
    protocol.classes = 3
    assert protocol.published_key("detect", {"name": "box_ap", "params": {}}, "COCO") is None


@pytest.mark.parametrize(
    ("name", "images", "decay", "steps", "epochs"),
    [
        ("coco_vits16", 32, 0.8, (8, 11), 12),
        ("coco_vitb16", 16, 0.75, (8, 11), 12),
        ("coco_vits16_3x", 32, 0.75, (27, 33), 36),
        ("coco_vitb16_3x", 16, 0.65, (27, 33), 36),
        ("coco_swint", 16, 1.0, (8, 11), 12),
    ],
)
def test_the_published_settings(name: str, images: int, decay: float, steps: tuple[int, ...], epochs: int) -> None:
    config = cli.parse_protocol("detect", ["--recipe", f"detect/{name}"]).config
    assert (8 * config.train_batch, config.layer_decay, config.steps, config.epochs) == (images, decay, steps, epochs)
    assert (config.lr, config.weight_decay, config.long_side) == (1e-4, 0.05, 1333)
    assert config.short_sides == tuple(range(480, 801, 32))
