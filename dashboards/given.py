"""What the command line gave the app: the only checkpoints, folders and files that its pages may read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ibot_eval.errors import CheckpointError, ConfigError, DataError, RecordError

VARIABLE = "IBOT_EVAL_APP"
"""Environment variable that hands the settings from the command to the pages."""


@dataclass(frozen=True)
class Given:
    """Settings of the app, JSON-ready. Paths are as the user typed them, so that commands can show them again."""

    ckpt: tuple[str, ...] = ("demo",)
    key: str | None = None
    arch: str | None = None
    patch_size: int | None = None
    heads: int | None = None
    trust_pickle: bool = False
    data: str | None = None
    """Folder of images; None: the pictures that come with scikit-learn."""
    runs: str | None = None
    patterns: str | None = None
    device: str = "auto"
    cache: str | None = None
    parent: int | None = None
    """Number of the process that started the app and without which it ends."""

    @property
    def folder(self) -> str | None:
        """``data`` as --data takes it: ``demo`` there would be the digits, and ``hfds/x`` no folder."""
        return self.data if self.data is None or os.path.isabs(self.data) else os.path.join(".", self.data)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Given:
        values = json.loads(text)
        return cls(**{**values, "ckpt": tuple(values["ckpt"])})

    @classmethod
    def from_environment(cls) -> Given:
        """What the command handed over; the demonstration where there is none (``streamlit run dashboards/app.py``)."""
        text = os.environ.get(VARIABLE)
        return cls.from_json(text) if text else cls()

    def check(self) -> None:
        """Refuses what is not there before a browser opens.

        Raises:
            CheckpointError, DataError, RecordError: a path that does not exist, or is not of the kind that is needed.
            ConfigError: a checkpoint that is named twice.
        """
        if twice := {name for name in self.ckpt if self.ckpt.count(name) > 1}:
            raise ConfigError(f"--ckpt names {', '.join(sorted(twice))} twice", todo="name each checkpoint once")
        for reference in self.ckpt:
            if reference != "demo" and ":" not in reference and not Path(reference).exists():
                raise CheckpointError(f"there is no checkpoint {reference!r}", where="--ckpt", todo="check the path")
        if self.data is not None and not Path(self.data).is_dir():
            raise DataError(
                f"there is no folder {self.data!r}",
                where="--data",
                todo="give a folder of images (sub-folders count), or leave it out for scikit-learn's sample pictures",
            )
        if self.runs is not None and not Path(self.runs).exists():
            raise RecordError(f"there is no folder {self.runs!r}", where="--runs", todo="give the folder of your runs")
        if self.patterns is not None and not Path(self.patterns).exists():
            raise DataError(
                f"there is no pattern bank {self.patterns!r}",
                where="--patterns",
                todo="make one: ibot-eval patterns --ckpt FILE --data FOLDER",
            )
