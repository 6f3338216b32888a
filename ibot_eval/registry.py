"""Protocols, commands and backbones, found through entry points and imported only when used.

Groups: ``ibot_eval.protocols`` (EvalProtocol classes), ``ibot_eval.commands`` (command classes),
``ibot_eval.backbones`` (functions that build a Backbone for ``--ckpt NAME:REST``).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from importlib import metadata
from typing import Any, Literal

from ibot_eval.errors import ConfigError, MissingExtra, suggest

Group = Literal["protocols", "commands", "backbones"]


@functools.cache
def entries(group: Group) -> dict[str, metadata.EntryPoint]:
    """Name -> entry point, sorted by name. Two packages that claim one name are an error, never a silent choice."""
    found: dict[str, metadata.EntryPoint] = {}
    for point in sorted(metadata.entry_points(group=f"ibot_eval.{group}"), key=lambda p: p.name):
        other = found.get(point.name)
        if other is not None and other.value != point.value:
            owners = sorted(f"{_package(p)} ({p.value})" for p in (other, point))
            raise ConfigError(
                f"{group[:-1]} {point.name!r} is registered twice: by {' and by '.join(owners)}",
                todo="uninstall one of the two packages, or ask its author for another name",
            )
        found[point.name] = point
    return found


def load(group: Group, name: str) -> Any:
    """The object registered as ``name``; raises ConfigError with the nearest names when there is none."""
    points = entries(group)
    if name not in points:
        raise ConfigError(f"no {group[:-1]} is called {name!r}", todo=suggest(name, points))
    try:
        return points[name].load()
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{name!r} needs the package {error.name!r}, which is not installed",
            where=points[name].value,
            todo="run `ibot-eval doctor` to see what is missing for what",
        ) from error


def load_protocol(name: str) -> Any:
    """The EvalProtocol class registered as ``name``."""
    from ibot_eval.protocol import EvalProtocol

    kind = load("protocols", name)
    if not (isinstance(kind, type) and issubclass(kind, EvalProtocol)):
        raise ConfigError(
            f"{name!r} is not a protocol: {entries('protocols')[name].value} does not derive from EvalProtocol",
            todo="see ibot_eval.protocol and ibot_eval.testing.check_protocol",
        )
    return kind


def load_drawer(name: str) -> Any:
    """The class whose ``figures(*records)`` draws the runs that ``name`` made: a protocol, or a command that has it."""
    if name not in entries("protocols") and name in entries("commands"):
        kind = load("commands", name)
        if hasattr(kind, "figures"):
            return kind
    return load_protocol(name)


def summary(point: metadata.EntryPoint) -> str:
    """First line of the module's docstring, read from its source so that nothing heavy is imported."""
    try:
        spec = importlib.util.find_spec(point.module)
        if spec is None or not spec.origin:
            return ""
        with open(spec.origin, encoding="utf-8") as source:
            docstring = ast.get_docstring(ast.parse(source.read()))
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError):
        return ""
    return docstring.splitlines()[0].rstrip(".") if docstring else ""


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else "unknown package"
