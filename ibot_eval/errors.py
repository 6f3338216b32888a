"""Errors that a user can act on: what went wrong, where, and what to do next.

The command line prints a :class:`UserError` without a traceback and exits with code 2 (``--debug`` shows the
traceback). Anything else that escapes is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what was asked for or in a file that was given.

    Args:
        what: one sentence that says what went wrong, naming the value.
        where: the file, flag or key it was found in, if that is not already in ``what``.
        todo: what the user can do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, todo: str | None = None) -> None:
        self.what, self.where, self.todo = what, where, todo
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.todo:
            lines.append(f"  to do: {self.todo}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling that data-loading workers and ranks use.
        return (_rebuild, (type(self), self.what, self.where, self.todo))


def _rebuild(kind: type[UserError], what: str, where: str | None, todo: str | None) -> UserError:
    return kind(what, where=where, todo=todo)


class CheckpointError(UserError):
    """A checkpoint that cannot be found, opened, understood or matched to a network."""


class DataError(UserError):
    """A data set that cannot be read, or that does not hold what the protocol needs."""


class BadImage(DataError):
    """One image that cannot be decoded; names the file."""


class ConfigError(UserError):
    """A setting, flag or recipe with a wrong name, type or value."""


class CacheError(UserError):
    """A feature bank that is damaged, or does not match what it is said to hold."""


class RecordError(UserError):
    """A record that cannot be read or written."""


class MissingExtra(UserError):
    """An optional package that the request needs and that is not installed."""


LISTED = 20
"""Names shown when none is near."""


def suggest(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'a' or 'b'?"`` for the closest of ``known``, else the list of all of them."""
    known = sorted(set(known))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    # timm knows over a thousand names; nobody reads those.
    shown = ", ".join(known[:LISTED]) + (f" and {len(known) - LISTED} more" if len(known) > LISTED else "")
    return "known: " + (shown or "none")
