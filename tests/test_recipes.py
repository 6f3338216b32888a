"""Recipes: found by name or path, turned into flags, refused when wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ibot_eval import cli, recipes
from ibot_eval.errors import ConfigError


def test_values_become_flags(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("train_per_class: 5\nk: [10, 20]\ndownload: true\nleave_one_out: false\nmethod: iBOT v1\n")
    assert recipes.flags(path) == [
        *("--train-per-class", "5", "--k", "10", "20", "--download", "--no-leave-one-out"),
        *("--method", "iBOT v1"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "mapping of settings"),
        ("a: {b: 1}\n", "nested"),
        ("a: [[1]]\n", "nested"),
        ("a: [1\n", "cannot read the recipe"),
        ("recipe: other\n", "cannot hold the setting 'recipe'"),
        ("launch: local:2\n", "cannot hold the setting 'launch'"),
        ("crop:\n", "crop has no value"),
        ("k: []\n", "k has no value"),
        ("1: 2\n", "cannot hold the setting 1"),
    ],
)
def test_recipes_that_are_wrong_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        recipes.flags(path)
    assert str(path) in str(caught.value)


def test_an_empty_recipe_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("# nothing\n")
    assert recipes.flags(path) == []


def test_the_users_flags_come_after_the_recipes(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("k: [5]\n")
    assert cli.expand_recipe(["--k", "7", "--recipe", str(path)]) == ["--k", "5", "--k", "7", "--recipe", str(path)]
    assert cli.expand_recipe([f"--recipe={path}"]) == ["--k", "5", f"--recipe={path}"]
    with pytest.raises(ConfigError, match="needs a name"):
        cli.expand_recipe(["--recipe"])


def test_an_unknown_recipe_suggests_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'knn/imagenet_vits16'"):
        recipes.find("knn/imagenet_vit16")


# Those of pre-training, a command of its own, are tested in test_pretrain_recipes.py.
@pytest.mark.parametrize("name", [name for name in recipes.names() if not name.startswith("pretrain/")])
def test_recipes_that_ship_parse_and_open_with_their_command(name: str) -> None:
    path = recipes.find(name)
    assert f"--recipe {name}" in path.read_text().split("\n\n")[0], "the header must show the command"
    protocol = name.split("/")[0]
    settings, own = parse(protocol, ["--recipe", name])
    for key, value in yaml.safe_load(path.read_text()).items():
        got = settings[key] if key in settings else own[key]
        assert (list(got) if isinstance(got, tuple) else got) == value


def parse(protocol: str, argv: list[str]) -> tuple[dict, dict]:
    parsed = cli.parse_protocol(protocol, argv)
    shared = {k: v for group in parsed.settings.groups() for k, v in vars(group).items()}
    return shared, vars(parsed.config)
