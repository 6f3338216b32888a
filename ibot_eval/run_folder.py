"""The folder of a run: its name, and that nothing is overwritten."""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path

from ibot_eval.errors import ConfigError
from ibot_eval.settings import RunSettings


def new_run_folder(protocol: str, settings: RunSettings) -> Path:
    """Makes the folder that ``--output`` and ``--name`` ask for.

    Raises:
        ConfigError: a name that is taken or cannot be one, or a place that cannot be written.
    """
    if settings.output.name is not None:
        if not re.fullmatch(r"[\w.-]+", settings.output.name) or settings.output.name.startswith("."):
            raise ConfigError(
                f"{settings.output.name!r} cannot name a run", todo="use letters, digits, '-', '_' and '.'"
            )
        folder = settings.output.output / settings.output.name
        if folder.exists():
            raise ConfigError(
                f"the run {folder} exists already", todo="choose another --name; nothing is ever overwritten"
            )
    else:
        parts = (protocol, _stem(settings.checkpoint.ckpt or "model"), _stem(settings.data.data or "data"))
        stamp = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        folder = settings.output.output / "-".join([*parts, stamp])
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the run folder {folder}: {error.strerror}", todo="choose another --output"
        ) from None
    return folder


def _stem(reference: str) -> str:
    name = re.split(r"[/\\:]", reference.rstrip("/\\"))[-1]
    return re.sub(r"[^\w]+", "_", re.sub(r"\.(pth|pt|bin|safetensors)$", "", name)).strip("_")[:40] or "x"
