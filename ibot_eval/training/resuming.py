"""Whether a run may go on with the settings that it is given now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from ibot_eval.errors import ConfigError

_ABSENT = object()


def compare_settings(saved: Mapping[str, Any], now: Mapping[str, Any], may_differ: Collection[str] = ()) -> None:
    """Compares the settings in a training state with those of the run that resumes it.

    Args:
        saved, now: JSON-like values; inner mappings are compared key by key, under names such as ``model.width``.
            Tuples equal lists, and paths their text, since files turn one into the other.
        may_differ: names, of values or of whole inner mappings, that may have changed.

    Raises:
        ConfigError: names every other value that differs, with both.
    """
    before, after = dict(_flat(saved)), dict(_flat(now))
    differing = [
        f"{name} (was {_shown(before, name)}, now {_shown(after, name)})"
        for name in dict.fromkeys([*before, *after])
        if before.get(name, _ABSENT) != after.get(name, _ABSENT) and not _allowed(name, may_differ)
    ]
    if differing:
        raise ConfigError(
            "the run to resume was started with other settings: " + ", ".join(differing),
            todo="give the settings it was started with, or start a new run",
        )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _allowed(name: str, may_differ: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:n]) in may_differ for n in range(1, len(parts) + 1))


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "absent"
