"""The numbers of a training run, as a file of JSON lines and for TensorBoard."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any, BinaryIO

from ibot_eval import distributed
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.files import atomic_write_bytes
from ibot_eval.training.checkpoints import GO_ON

Value = float | int | str | None


class TrainingLog:
    """``log.jsonl`` in the run's folder, one line per call of :meth:`write`, and ``tensorboard/`` beside it if asked.

    Lines of an earlier process stay; a last line that was torn by a kill is removed. Ranks other than 0 do nothing.

    Args:
        folder: of the run; made if absent.
        tensorboard: write for TensorBoard too. Without that package a notice says so, and training goes on.
    """

    def __init__(self, folder: Path, tensorboard: bool = False) -> None:
        self.path = folder / "log.jsonl"
        self._tensorboard: Any = None
        self._file: BinaryIO | None = None
        self._purge: int | None = None
        self._wanted = tensorboard and distributed.is_main()

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends ``{"step": step, **values}``. NaN and infinities become null, which TensorBoard is not shown.

        Raises:
            ConfigError: the file cannot be written.
        """
        if not distributed.is_main():
            return
        row = {"step": step, **{key: _json_ready(value) for key, value in values.items()}}
        try:
            if self._file is None:
                _end_with_a_whole_line(self.path)
                self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()
            self._file.write((json.dumps(row, allow_nan=False) + "\n").encode())
            # A killed process loses no line.
            self._file.flush()
        except OSError as error:
            # The rest of the line must not come out at some later time.
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
                self._file = None
            raise _cannot_write(self.path, error) from error
        self._show(step, row)

    def truncate(self, step: int) -> None:
        """Drops the lines of steps after ``step``, which a resumed run will write again. Raises as :meth:`write`."""
        if not distributed.is_main():
            return
        self.close()
        if self.path.exists():
            rows = [row for row in read_log(self.path) if row["step"] <= step]
            try:
                atomic_write_bytes(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
            except OSError as error:
                raise _cannot_write(self.path, error) from error
        self._purge = step + 1

    def close(self) -> None:
        """Closes the files; a later :meth:`write` opens them again."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._file = self._tensorboard = None

    def _show(self, step: int, row: Mapping[str, Value]) -> None:
        if not self._wanted:
            return
        if self._tensorboard is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._wanted = False
                print(
                    "notice: TensorBoard is not installed (pip install 'ibot-eval[tensorboard]'); "
                    f"{self.path} holds the same numbers",
                    file=sys.stderr,
                )
                return
            self._tensorboard = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=self._purge)
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)):
                self._tensorboard.add_scalar(key, value, step)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``log.jsonl``. A last line that is not whole, as a killed process leaves it, is passed over.

    Raises:
        DataError: the file cannot be read, or another line is not a JSON object with a step.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read the training log: {error.strerror}", where=str(path)) from error
    rows = []
    # What follows the last line end is empty, or torn.
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(
                f"line {number} of the training log is not a JSON object with a step",
                where=str(path),
                todo="remove the line, or restore the file",
            )
        rows.append(row)
    return rows


def _json_ready(value: Any) -> Value:
    if value is None or isinstance(value, (str, bool)):
        return value
    # NumPy's integers are Integral, but not int.
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _end_with_a_whole_line(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    with open(path, "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the training log cannot be written: {error.strerror}",
        where=str(path),
        todo=f"make room or repair the disk, then {GO_ON}",
    )
