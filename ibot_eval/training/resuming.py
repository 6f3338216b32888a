"""Whether a run may go on: with the settings that it is given now, and on these ranks together."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from ibot_eval import distributed
from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.training.checkpoints import TrainingCheckpoints

_ABSENT = object()


def check_same_on_ranks(identity: Mapping[str, Any]) -> None:
    """Raises ConfigError on every rank unless all are about to do the same work. A collective.

    Args:
        identity: JSON-like: what the work depends on.
    """
    views = distributed.gather_objects(dict(identity))
    for other, view in enumerate(views):
        differing = sorted(name for name in views[0].keys() | view.keys() if views[0].get(name) != view.get(name))
        if differing:
            raise ConfigError(
                f"rank {other} differs from rank 0 in {', '.join(differing)}, so they cannot train together",
                todo="give all ranks the same settings and files; where each machine has its own copy of the images, "
                "use --fingerprint content, which does not look at the files' times",
            )


def state_to_go_on_from(
    states: TrainingCheckpoints,
    written_as: int,
    identity: Mapping[str, Any],
    may_differ: Callable[[Mapping[str, Any]], Collection[str]] = lambda state: (),
) -> tuple[int, dict[str, Any]] | None:
    """(steps done, state) of the newest training state, or None where there is none. A collective.

    Args:
        states: with ``format`` and ``identity`` in each.
        written_as: the format that can be read.
        identity: JSON-like: what the run must have in common with its beginning.
        may_differ: of a state, the names of what need not be, as for :func:`compare_settings`.

    Raises:
        CheckpointError: a state of another format, or one that cannot be read.
        ConfigError: a run that was begun with another identity.
    """
    found = states.latest()
    if found is None:
        return None
    step, state = found
    if state.get("format") != written_as:
        raise CheckpointError(
            f"the training state has format {state.get('format')}, and this version of ibot-eval reads {written_as}",
            where=str(states.path(step)),
            todo="go on with the version that wrote it, or start a new run",
        )
    compare_settings(state["identity"], identity, may_differ(state))
    return found


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
        f"{name} ({_difference(name, before, after)})"
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


def _difference(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    if _is_hash(before.get(name)) and _is_hash(after.get(name)):
        # Nobody learns anything from the digits.
        return "other images, or their files were changed" if name.startswith("images.") else "another file"
    return f"was {_shown(before, name)}, now {_shown(after, name)}"


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "absent"
