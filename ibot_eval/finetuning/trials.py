"""The runs that ``--sweep`` stands for: every combination of the values that it gives to settings."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ibot_eval.errors import ConfigError, suggest

HELD_OUT = 0.1
"""Share of train that runs of a sweep hold out where nothing else was asked for."""
NONE = ("none",)
"""The ``--sweep`` that asks for no sweep."""
FIXED = ("sweep", "hold_out", "labels")
"""Settings that a sweep cannot change: what it is, and which images it chooses on."""

Config = TypeVar("Config")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    """Also of its folder: ``lr-0.0008``, ``lr-0.0008_drop_path-0.2``."""
    changes: Mapping[str, Any]
    """Setting -> value."""


def parse_sweep(texts: Sequence[str], config_type: type) -> list[Trial]:
    """The runs of ``--sweep lr=8e-4,9e-4 drop-path=0.1,0.2``: four, those of the first setting's first value first.

    Args:
        texts: one for each setting, ``NAME=VALUE,VALUE,…``; None is written ``none``.
        config_type: dataclass that has the settings, which tells what their values may be.

    Raises:
        ConfigError: a setting that does not exist, cannot be swept or comes twice; a value that it cannot have; no
            value, or one that comes twice; runs that would have one name.
    """
    hints = get_type_hints(config_type)
    pairs = {name for name, hint in hints.items() if get_origin(hint) is tuple}
    known = [name for name in hints if name not in FIXED and name not in pairs]
    axes: dict[str, list[Any]] = {}
    for text in () if tuple(texts) == NONE else texts:
        given, _, values = text.partition("=")
        name = given.strip().removeprefix("--").replace("-", "_")
        if name in pairs and name not in FIXED:
            raise ConfigError(
                f"--sweep: {name} takes several values at once, so it cannot be swept",
                todo="make a run of each of them with --hold-out, and look at held_out_top1",
            )
        if name not in known:
            raise ConfigError(f"--sweep: {given!r} is not a setting that can be swept", todo=suggest(name, known))
        if name in axes:
            raise ConfigError(f"--sweep gives {name} twice", todo=f"give all its values at once: {name}=A,B,C")
        axes[name] = [_value(value.strip(), hints[name], name) for value in values.split(",")]
        if len(set(axes[name])) < len(axes[name]):
            raise ConfigError(f"--sweep gives {name} a value twice: {values}")
    # Of no setting there is one combination, which is no sweep.
    combinations = itertools.product(*axes.values()) if axes else ()
    trials = [_trial(dict(zip(axes, values, strict=True))) for values in combinations]
    names = [trial.name for trial in trials]
    # Runs of one name would share a folder, and the second would be taken for run already.
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"--sweep: several runs would be called {', '.join(twice)}", todo="sweep these values in runs of their own"
        )
    return trials


def with_held_out(config: Config, asked: frozenset[str]) -> Config:
    """``config`` with a part of train held out where there is a sweep, which chooses on it.

    ``--sweep none`` is no sweep, for recipes that have one.

    Args:
        config: has ``sweep`` and ``hold_out``.
        asked: names of the settings that the user gave by hand.

    Raises:
        ConfigError: a sweep of nothing, or one for which the user wants nothing held out.
    """
    settings: Any = config
    if settings.sweep == NONE:
        return replace(settings, sweep=())
    if not settings.sweep and "sweep" in asked:
        raise ConfigError(
            "--sweep names no setting to try values of", todo="--sweep lr=8e-4,1e-3; without a sweep, --sweep none"
        )
    if not settings.sweep or settings.hold_out > 0:
        return config
    if "hold_out" in asked:
        raise ConfigError(
            "--sweep chooses among its runs on held-out images of train, and --hold-out 0 holds none out",
            todo=f"leave --hold-out away ({HELD_OUT:g}), and run the chosen setting once more with --hold-out 0",
        )
    return replace(settings, hold_out=HELD_OUT)


def _trial(changes: dict[str, Any]) -> Trial:
    text = "_".join(f"{name}-{_text(value)}" for name, value in changes.items())
    return Trial(re.sub(r"[^\w.-]", "_", text), changes)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"  # of six digits, which may be another number's as well
    return short if float(short) == value else repr(value)


def _value(text: str, hint: Any, name: str) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if NoneType in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        try:
            return _read(text, kind)
        except ValueError:
            continue
    raise ConfigError(f"--sweep: {text!r} is no value of {name}", todo=f"see --{name.replace('_', '-')} in --help")


def _read(text: str, kind: Any) -> Any:
    """``text`` as a value of ``kind``. Raises ValueError where it is none."""
    if get_origin(kind) is Literal:
        options = {str(option): option for option in get_args(kind)}
        return options[text] if text in options else _refuse(text)
    if kind is bool:
        return text.lower() == "true" if text.lower() in ("true", "false") else _refuse(text)
    if kind is float:
        number = float(text)
        return number if math.isfinite(number) else _refuse(text)
    if kind is int:
        return int(text)
    # Pairs and lists have the comma that parts the values here.
    return text if kind is str and text else _refuse(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)
