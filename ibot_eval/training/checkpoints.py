"""Training states on the disk: each whole or absent, the last few kept, the newest readable one found again.

A file is written beside its place and renamed (``ibot_eval.files``), so neither a kill nor a full disk touches the
states that are there. Damage that comes later is noticed by the checksums of the file, which ``torch.load`` ignores.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ibot_eval import distributed
from ibot_eval.errors import CheckpointError, ConfigError
from ibot_eval.files import TEMPORARY_SUFFIX, atomic_open

GO_ON = "give the same command again (pretrain goes on with --resume auto)"
"""What to do about a run that broke off, whichever command it was of."""

_NAME = re.compile(r"step_(\d+)\.pt")


class TrainingCheckpoints:
    """The states of one run, ``step_00001234.pt`` in ``folder``. Every method is for all ranks; rank 0 does the work.

    Args:
        folder: made when the first state is saved.
        keep: how many states stay; older ones are deleted once a new one is safely there.

    Raises:
        ConfigError: ``keep`` below 1.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"--keep {keep} would keep no checkpoint", todo="use 1 or more")
        self.folder, self.keep = folder, keep
        self._damaged: set[int] = set()

    def path(self, step: int) -> Path:
        """Where the state after ``step`` steps lies, or would lie."""
        return self.folder / f"step_{step:08d}.pt"

    def steps(self) -> list[int]:
        """Steps that have a file, in ascending order."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir()) if self.folder.is_dir() else ()
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Writes the state after ``step`` steps, then deletes what is older than the ``keep`` newest.

        Args:
            state: tensors, numbers, text, and dicts, lists and tuples of them; what a rank has for itself is gathered
                beforehand. Rank 0's is written.

        Raises:
            CheckpointError: on every rank, when the file cannot be written; all earlier states are then still there.
        """
        distributed.from_main(lambda: self._write(step, state))
        return self.path(step)

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """(steps done, state on the CPU) of the newest state that can be read, or None where there is none at all.

        Newer ones that are damaged are passed over with a warning on stderr, and deleted after the next save.

        Raises:
            CheckpointError: there are states, but not one of them can be read; or this rank does not see rank 0's file.
        """
        # Rank 0 looks for the newest sound file, since ranks that chose for themselves might choose differently.
        step = distributed.from_main(self._newest_step)
        return None if step is None else (step, distributed.everywhere(lambda: self._load(step)))

    def _load(self, step: int) -> dict[str, Any]:
        try:
            return _read(self.path(step), verify=False)
        except Exception as error:
            raise CheckpointError(
                f"rank {distributed.rank()} cannot read the training state: {error}",
                where=str(self.path(step)),
                todo="put the run's folder where all machines see it",
            ) from error

    def _write(self, step: int, state: dict[str, Any]) -> None:
        try:
            # What a killed process was writing; nobody else writes here.
            for left in self.folder.glob(f".step_*{TEMPORARY_SUFFIX}"):
                left.unlink()
            # States beyond --keep, of a run gone on with after the disk was full with a smaller one, make room now.
            self._delete(self._sound(but=step)[: -self.keep])
            with atomic_open(self.path(step)) as file:
                torch.save(state, file)
        except Exception as error:
            # torch.save goes on to complain about the size of what could not be written.
            reason = next((e for e in _chain(error) if isinstance(e, OSError)), None)
            if reason is None:
                raise
            there = (
                f"the states after steps {self.steps()} are still there" if self.steps() else "none was saved before"
            )
            # Who keeps one state only may have no such flag.
            fewer = ", perhaps with --keep 1, which needs the least" if self.keep > 1 else ""
            raise CheckpointError(
                f"the state after step {step} cannot be written: {reason.strerror or reason}; {there}",
                where=str(self.folder),
                todo=f"make room or repair the disk, then {GO_ON}{fewer}",
            ) from reason
        self._damaged.discard(step)
        others = self._sound(but=step)
        self._delete({*others[: max(0, len(others) - self.keep + 1)], *self._damaged})
        self._damaged.clear()

    def _sound(self, but: int) -> list[int]:
        return [step for step in self.steps() if step != but and step not in self._damaged]

    def _delete(self, steps: Iterable[int]) -> None:
        for step in steps:
            # A file that cannot be deleted costs room, not the run.
            with suppress(OSError):
                self.path(step).unlink()

    def _newest_step(self) -> int | None:
        steps = self.steps()
        for step in reversed(steps):
            try:
                _read(self.path(step), verify=True)
            except Exception as error:  # noqa: BLE001 - damage shows in any way
                self._damaged.add(step)
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                print(f"warning: {self.path(step)} is damaged and passed over: {reason}", file=sys.stderr)
            else:
                return step
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} training states can be read",
                where=str(self.folder),
                todo="start a new run in another folder, or put back a copy of one of these files",
            )
        return None


def _read(path: Path, *, verify: bool) -> dict[str, Any]:
    if verify:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            raise ValueError(f"the checksum of {bad} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
