"""Recipes of Table 8: they parse, and repeat no default."""

from __future__ import annotations

import pytest
import yaml

from ibot_eval import cli, recipes
from ibot_eval.settings import RunSettings

NAMES = {
    "backgrounds/imagenet9": "ImageNet-9",
    "corruptions/imagenet_c": "ImageNet-C",
    "corruptions/imagenet_on_the_fly": None,
    "natural-adversarial/imagenet_a": "ImageNet-A",
}
"""Recipe -> what publications call its data."""


def test_there_is_a_recipe_for_each_column():
    protocols = ("backgrounds", "corruptions", "natural-adversarial")
    assert {name for protocol in protocols for name in recipes.names(protocol)} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_parses_and_repeats_no_default(name):
    call = cli.parse_protocol(name.partition("/")[0], ["--recipe", name])
    call.kind(call.config)
    assert call.settings.output.data_name == NAMES[name]
    # Images of the public sets are not resized, or as usual, which no recipe may change.
    assert call.settings.data.resize is None
    defaults = vars(call.kind.config_type()) | {k: v for g in RunSettings().groups() for k, v in vars(g).items()}
    content = yaml.safe_load(recipes.find(name).read_text(encoding="utf-8"))
    assert [key for key, value in content.items() if defaults[key] == value] == []
