"""Recipes of occlusion and shuffle: they parse, and repeat no default."""

from __future__ import annotations

import pytest
import yaml

from ibot_eval import cli, recipes
from ibot_eval.settings import RunSettings

NAMES = [name for protocol in ("occlusion", "shuffle") for name in recipes.names(protocol)]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_parses_and_repeats_no_default(name):
    protocol = name.partition("/")[0]
    call = cli.parse_protocol(protocol, ["--recipe", name])
    call.kind(call.config)
    assert call.settings.data.interpolation == "bilinear"
    defaults = vars(call.kind.config_type()) | {k: v for g in RunSettings().groups() for k, v in vars(g).items()}
    content = yaml.safe_load(recipes.find(name).read_text(encoding="utf-8"))
    assert [key for key, value in content.items() if defaults[key] == value] == []


def test_there_are_recipes_for_both_figures():
    assert {"occlusion/imagenet_vits16", "shuffle/imagenet_vits16"} <= set(NAMES)
