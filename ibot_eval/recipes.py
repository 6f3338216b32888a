"""Recipes: YAML files that hold only what differs from the defaults, turned into flags.

The flags are placed before the user's own, so that later flags win and a wrong key or type in a recipe fails in the
same way as on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from ibot_eval.errors import ConfigError, suggest


def folder() -> Path:
    """Where recipes lie: inside the installed package, or configs/ of the checkout."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "configs"


def names(protocol: str | None = None) -> list[str]:
    """``protocol/name`` of every recipe that ships with ibot-eval."""
    root = folder()
    found = sorted(p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.yaml"))
    return [n for n in found if protocol is None or n.startswith(protocol + "/")]


def find(recipe: str) -> Path:
    """The file of a recipe given by name or path; raises ConfigError with the nearest names."""
    for candidate in (Path(recipe), folder() / f"{recipe}.yaml"):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"no recipe {recipe!r}", todo=f"give a path to a YAML file; {suggest(recipe, names())}")


def flags(path: Path) -> list[str]:
    """The recipe's settings as flags. Raises ConfigError for anything but a flat mapping of plain values."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the recipe: {error}", where=str(path)) from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError("a recipe is a mapping of settings to values", where=str(path))
    return [flag for key, value in content.items() for flag in _flag(key, value, path)]


def _flag(key: object, value: object, path: Path) -> Iterator[str]:
    name = str(key).replace("_", "-")
    if key in ("recipe", "launch") or not isinstance(key, str):
        raise ConfigError(f"a recipe cannot hold the setting {key!r}", where=str(path))
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
        return
    if value is None or value == []:
        raise ConfigError(f"{key} has no value", where=str(path), todo="leave the line out to keep the default")
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, (dict, list)):
            raise ConfigError(f"{key}: nested values are not settings", where=str(path))
    yield f"--{name}"
    yield from (str(item) for item in values)
