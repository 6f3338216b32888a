"""Pre-training recipes: every one parses, holds only what differs from the defaults, and opens with its command."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ibot_eval import cli, recipes, registry
from pretrain import setup
from pretrain.command import Pretrain
from pretrain.config import PretrainSettings
from pretrain.consistency import check
from tests.conftest import REPOSITORY

NAMES = recipes.names("pretrain")
DEFAULTS = PretrainSettings().flat()

ARCHITECTURES = {
    "vit_small": "vit-s/16",
    "vit_base": "vit-b/16",
    "vit_large": "vit-l/16",
    "swin_tiny": "swin-t/{window}",
}
"""As published.json calls them."""

ABLATIONS = (
    *("ibot300", "mim_only", "dino_tokenizer", "dino300", "hardmax_centring", "hardmax_no_centring"),
    *("head_vanilla", "head_semi_shared", "head_semi_shared_2", "patch_position", "patch_feature"),
)


def parse(argv: list[str]) -> PretrainSettings:
    return cli.parse(Pretrain, cli.expand_recipe(argv), "pretrain")


@cache
def settings_of(name: str) -> PretrainSettings:
    return parse(["--recipe", f"pretrain/{name}"])


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load(recipes.find(name).read_text(encoding="utf-8"))


def header(name: str) -> str:
    """The comment that a recipe opens with, as text."""
    lines = recipes.find(name).read_text(encoding="utf-8").splitlines()
    comment = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return "\n".join(line.removeprefix("#") for line in comment)


def commands(name: str) -> list[list[str]]:
    """The indented commands of a header, without what comes before ``pretrain`` or another command's name."""
    joined = header(name).replace("\\\n", " ")
    words = [shlex.split(line) for line in joined.splitlines() if line.startswith("   ")]
    return [tokens[tokens.index("ibot_eval" if "ibot_eval" in tokens else "ibot-eval") + 1 :] for tokens in words]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_parses_to_settings_that_do_not_contradict_each_other(name: str) -> None:
    settings = settings_of(name.removeprefix("pretrain/"))
    check(settings)
    setup.masking_of(settings)
    setup.augmentation_of(settings)
    flat = settings.flat()
    assert {key: flat[key] for key in content(name)} == content(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_repeats_no_default(name: str) -> None:
    assert [key for key, value in content(name).items() if DEFAULTS[key] == value] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_a_command_that_runs_it(name: str) -> None:
    (command, *flags), *others = commands(name)
    assert command == "pretrain"
    assert flags[flags.index("--recipe") + 1] == name
    settings = parse(flags)
    check(settings)
    assert settings.data.data is not None
    for other, *rest in others:
        if other in registry.entries("commands"):
            cli.parse(registry.load("commands", other), rest, other)
        else:
            cli.parse_protocol(other, rest)


@pytest.mark.parametrize("name", [name for name in NAMES if "--data IMAGENET" in header(name)])
def test_numbers_that_a_header_expects_are_published(name: str) -> None:
    """With the source that the header names, for the recipe's architecture. Small data sets have numbers of our own."""
    text = " ".join(header(name).split())
    network = settings_of(name.removeprefix("pretrain/")).network
    arch = ARCHITECTURES.get(network.arch, network.arch).format(window=network.window)
    claimed = {float(number) for number in re.findall(r"([\d.]+) (?:%|h on|GB each)", text)}
    rows = json.loads((REPOSITORY / "ibot_eval" / "published.json").read_text(encoding="utf-8"))
    known = {row["value"] for row in rows if row["arch"] == arch and row["source"].split(",")[0] in text}
    assert claimed <= known
    assert bool(claimed) == ("(published.json)" in text)


def test_the_paper_is_covered() -> None:
    sizes = ("vits16", "vitb16", "vitl16", "swint7", "swint14", "k1000", "dino")
    pipelines = tuple(f"pipeline_{letter}" for letter in "abcde")
    cpu = ("imagenette_cpu", "dino_imagenette_cpu")
    assert {f"pretrain/{name}" for name in (*sizes, *ABLATIONS, *pipelines, *cpu)} <= set(NAMES)


def test_the_released_command_is_what_settings_and_defaults_make() -> None:
    flat = settings_of("vits16").flat()
    released = {
        "arch": "vit_small",
        "epochs": 800,
        "batch_size": 64,
        "teacher_temp_start": 0.04,
        "teacher_temp": 0.07,
        "teacher_temp_warmup": 30,
        "patch_teacher_temp": None,
        "norm_last_layer": False,
        "sharing": "shared",
        "prototypes": 8192,
        "local_crops": 10,
        "global_scale": [0.25, 1.0],
        "local_scale": [0.05, 0.25],
        "pred_ratio": [0.0, 0.3],
        "pred_ratio_var": [0.0, 0.2],
    }
    assert {key: flat[key] for key in released} == released
    swin = settings_of("swint14")
    assert (swin.network.window, swin.masks.mask_start_epoch, swin.optimiser.batch_size) == (14, 50, 26)


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_have_the_papers_setting(name: str) -> None:
    """iBOT, appendix E: ViT-S/16, 300 epochs, no local crops, a ratio of 0.3 where anything is masked."""
    mine, base = settings_of(name), settings_of("ibot300")
    assert (mine.network, mine.crops, mine.optimiser) == (base.network, base.crops, base.optimiser)
    assert (mine.optimiser.epochs, mine.crops.local_crops) == (300, 0)
    masking = setup.masking_of(mine)
    assert masking is None or (masking.ratios, masking.variances) == ((0.3,), (0.0,))


@pytest.mark.parametrize("name", ["dino", "dino300", "dino_imagenette_cpu", "patch_position", "patch_feature"])
def test_no_masks_where_the_method_has_none(name: str) -> None:
    assert setup.masking_of(settings_of(name)) is None


def test_the_twins_differ_in_masks_alone() -> None:
    masks = {"patch_weight", "pred_ratio", "pred_ratio_var"}
    ibot, dino = (settings_of(name).flat() for name in ("imagenette_cpu", "dino_imagenette_cpu"))
    assert {key for key in ibot if ibot[key] != dino[key]} == masks


def test_an_unknown_key_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("epochs: 3\nprototype: 64\n")
    with pytest.raises(SystemExit) as stopped:
        parse(["--recipe", str(path)])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert "--prototype" in printed.out + printed.err
