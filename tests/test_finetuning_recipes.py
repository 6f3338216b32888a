"""Recipes of fine-tuning: what they hold, what their headers say, and that each of them trains."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ibot_eval import cli, recipes, runner
from ibot_eval.finetuning.config import effective_lr
from ibot_eval.finetuning.trials import parse_sweep
from ibot_eval.published import lookup
from ibot_eval.record import EvalRecord
from ibot_eval.settings import RunSettings
from ibot_eval.training.logs import read_log
from tests import layouts
from tests.images import picture, save

NAMES = [*recipes.names("finetune"), *recipes.names("semi-supervised")]
ARCHITECTURES = {"ViT-S/16": "vit-s/16", "ViT-B/16": "vit-b/16", "ViT-L/16": "vit-l/16"}


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load(recipes.find(name).read_text(encoding="utf-8"))


def header(name: str) -> str:
    lines = recipes.find(name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("#") for line in lines if line.startswith("#"))


def call_of(name: str) -> cli.ProtocolCall:
    return cli.parse_protocol(name.partition("/")[0], ["--recipe", name])


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_repeats_no_default(name: str) -> None:
    call = call_of(name)
    defaults = vars(call.kind.config_type()) | {k: v for g in RunSettings().groups() for k, v in vars(g).items()}
    assert [key for key, value in content(name).items() if defaults[key] == value] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_header_parse(name: str) -> None:
    """Among them one that runs this recipe."""
    lines = header(name).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("   ")]
    assert any(name in command for command in commands)
    for program, protocol, *flags in commands:
        assert program == "ibot-eval"
        # The list file is not here.
        flags = ["1%" if flag.endswith("percent.txt") else flag for flag in flags]
        call = cli.parse_protocol(protocol, flags)
        call.kind(call.config)
        assert call.settings.checkpoint.ckpt
        assert call.settings.data.data


@pytest.mark.parametrize("name", [name for name in NAMES if "Expected:" in header(name)])
def test_the_expected_number_is_the_one_that_a_run_shows(name: str, tmp_path: Path) -> None:
    """With the source that the header names."""
    text = " ".join(header(name).split())
    call = call_of(name)
    protocol = call.kind(call.config)
    protocol.image_size = call.settings.data.crop or 224
    protocol.architecture = next(arch for title, arch in ARCHITECTURES.items() if title in text)
    if name.startswith("semi-supervised/"):
        # What --labels with SimCLR's list makes of it.
        protocol.subset = replace(protocol.subset, name=f"SimCLR {name.split('_')[1].removesuffix('pct')}%")
    assert protocol.as_published()
    out = call.settings.output
    assert out.data_name is not None
    params = {"image_size": protocol.image_size}
    key = protocol.published_key(name.partition("/")[0], {"name": "top1_best_on_test", "params": params}, out.data_name)
    assert key is not None
    found = lookup(
        key.protocol,
        key.metric,
        data=key.data,
        method=out.method,
        arch=protocol.architecture,
        params=params,
        headline=True,
    )
    assert found is not None
    assert f"top1_best_on_test {found['value']:g} %" in text.replace(".0 %", " %")
    assert found["source"] in text


def test_all_that_is_published_is_there() -> None:
    imagenet = ("vits16", "vitb16", "vitl16", "vits16_classic", "vitl16_384", "vitl16_512")
    transfer = ("cifar10", "cifar100", "flowers", "cars", "inat18", "inat19", "cifar100_beit", "intermediate")
    wanted = [*(f"finetune/imagenet_{name}" for name in imagenet), *(f"finetune/{name}" for name in transfer)]
    wanted += ["finetune/imagenette128", "semi-supervised/imagenet_1pct", "semi-supervised/imagenet_10pct"]
    wanted += ["semi-supervised/imagenette128"]
    assert set(NAMES) == set(wanted)


@pytest.mark.parametrize(
    ("name", "processes", "images", "rate"),
    [
        ("finetune/imagenet_vits16", 8, 1024, 1e-3),
        ("finetune/imagenet_vitb16", 8, 1024, 1e-3),
        ("finetune/imagenet_vitl16", 8, 1024, 1e-3),
        ("finetune/imagenet_vits16_classic", 8, 1024, 5e-4 * 1024 / 512),
        ("finetune/imagenet_vitl16_384", 8, 512, 2e-5),
        ("finetune/imagenet_vitl16_512", 8, 512, 2e-5),
        ("finetune/intermediate", 8, 512, 2e-5),
        *((f"finetune/{name}", 8, 768, 7.5e-6 * 768 / 512) for name in ("cifar10", "cifar100", "flowers")),
        ("finetune/cars", 8, 768, 7.5e-5 * 768 / 512),
        ("finetune/inat18", 8, 768, 5e-5 * 768 / 512),
        ("finetune/inat19", 8, 768, 2.5e-5 * 768 / 512),
        ("semi-supervised/imagenet_1pct", 8, 1024, 5e-6 * 1024 / 512),
        ("semi-supervised/imagenet_10pct", 8, 1024, 5e-6 * 1024 / 512),
    ],
)
def test_step_and_rate_are_the_published_ones(name: str, processes: int, images: int, rate: float) -> None:
    """DeiT's code scales by batch / 512, BEiT's takes the rate as it is."""
    config = call_of(name).config
    assert processes * config.train_batch * config.accumulate == images
    assert effective_lr(config, images) == pytest.approx(rate)


def test_the_sweep_of_beit_has_the_papers_rates() -> None:
    """For 512 images a step."""
    config = call_of("finetune/cifar100_beit").config
    trials = parse_sweep(config.sweep, type(config))
    rates = [effective_lr(replace(config, **trial.changes), 8 * config.train_batch) for trial in trials]
    assert rates == pytest.approx([2e-3, 3e-3, 4e-3, 5e-3])


def plain(values: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(values))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve and four JPEGs of four classes, of many shapes; one of them is grey."""
    root, numbers = tmp_path_factory.mktemp("photos"), itertools.count()
    for split, each in (("train", 3), ("val", 1)):
        for label, place in itertools.product(range(4), range(each)):
            number = next(numbers)
            pixels = picture(40 + number, 64 - number, seed=number) // 2 + 32 * label
            save(root / split / f"class {label}" / f"{place}.jpg", pixels[..., 0] if number == 5 else pixels)
    return root


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> dict[str, list[str]]:
    """Flags for small networks: a ViT with its projection head, as iBOT saves it, a BEiT, and a fine-tuned ViT."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.save(layouts.ibot_full(layouts.vit(1), layouts.vit(2)), folder / "ibot.pth")
    beit = layouts.beit(use_rel_pos_bias=False, use_shared_rel_pos_bias=True)
    torch.save(layouts.beit_pretrained(beit), folder / "beit.pth")
    ibot = ["--ckpt", str(folder / "ibot.pth"), "--heads", "3"]
    trained = [*ibot, "--data", str(photos), "--resize", "37", "--crop", "32", "--epochs", "1", "--train-batch", "4"]
    run(folder, "finetune", trained)
    return {
        "ibot": ibot,
        "beit": ["--ckpt", str(folder / "beit.pth")],
        "finetuned": ["--ckpt", str(folder / "run" / "classifier.safetensors")],
    }


def run(folder: Path, command: str, flags: list[str]) -> EvalRecord:
    call = cli.parse_protocol(
        command, [*flags, "--output", str(folder), "--name", "run", "--device", "cpu", "--workers", "0"]
    )
    return runner.run(command, call.kind(call.config), call.settings, asked=frozenset(call.asked))


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_trains(name: str, photos: Path, checkpoints: dict[str, list[str]], tmp_path: Path) -> None:
    """An epoch of image files and a small network of its family, with all that the recipe says but for the numbers of
    epochs, images and labels; the sizes are a seventh of the recipe's, to whole patches."""
    recipe, given, command = content(name), call_of(name), name.partition("/")[0]
    sizes = {"crop": 8 * round(recipe.get("crop", 224) / 7 / 8), "resize": round(recipe.get("resize", 256) / 7)}
    sizes["resize"] = max(sizes.values())
    changed: dict[str, Any] = {"epochs": 1, "train_batch": 2, "data": str(photos), **sizes}
    if recipe.get("labels"):
        changed["labels"] = "2"
    kind = "finetuned" if recipe.get("from_finetuned") else "beit" if recipe.get("method") == "BEiT" else "ibot"
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in changed.items()]
    record = run(tmp_path, command, ["--recipe", name, *checkpoints[kind], *flags])

    assert record.status == "success"
    assert {metric["name"] for metric in record.metrics} >= {"top1", "top5", "top1_best_on_test", "per_class_top1"}
    assert [metric["n"] for metric in record.metrics if metric["name"] == "top1"] == [4]
    assert [metric["name"] for metric in record.metrics if metric["published"]] == [], "of shrunk runs nothing is"
    assert re.fullmatch(r"(sweep/[\w.-]+/)?classifier\.safetensors", record.artifacts[1]["path"])

    asked = {key: value for key, value in vars(given.config).items() if key not in changed and key != "hold_out"}
    runs = [record, *(EvalRecord.load(path.parent) for path in tmp_path.glob("run/sweep/*/record.json"))]
    assert len(runs) == 1 + len(parse_sweep(given.config.sweep, type(given.config)))
    assert plain({key: record.config[key] for key in asked}) == plain(asked)
    for one in runs[1:] or runs:
        assert one.folder is not None
        losses = [row["loss"] for row in read_log(one.folder / "log.jsonl") if "loss" in row]
        assert losses
        assert None not in losses, "a loss is not finite"
