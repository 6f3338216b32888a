"""Show what a checkpoint holds and how it is read."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from ibot_eval.errors import ConfigError
from ibot_eval.settings import CheckpointSettings

if TYPE_CHECKING:
    from ibot_eval.checkpoint import LoadedCheckpoint


@dataclass(frozen=True)
class Inspect:
    """Read a checkpoint as the protocols do and show what was found, matched, missing and left over."""

    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    cache: Path | None = None
    """Folder where the hashes of checkpoints are remembered. Default: $IBOT_EVAL_CACHE, else ~/.cache/ibot-eval."""
    json: bool = False
    """Print JSON."""
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        if self.checkpoint.ckpt is None:
            raise ConfigError("--ckpt is missing", todo="name a checkpoint: ibot-eval inspect --ckpt FILE")
        from ibot_eval.cache import BankCache
        from ibot_eval.runner import load_any

        report = described(load_any(self.checkpoint, BankCache(self.cache), seed=0))
        print(jsonlib.dumps(report, indent=2) if self.json else tabulate(rows(report), tablefmt="plain"))
        return 0


def described(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """All that is known of a checkpoint, JSON-ready."""
    backbone = loaded.backbone
    return {
        **loaded.report.as_dict(),
        "cls_token": backbone.has_cls,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
    }


def rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What :func:`described` gave as lines of a table: what, and its value."""
    # `identity` is the same once more, for the keys of feature banks.
    return _rows({name: value for name, value in report.items() if name != "identity"})


def _rows(report: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in report.items():
        title = prefix + name.replace("_", " ")
        if isinstance(value, dict):
            rows += _rows(value, prefix=f"{title}: ")
        elif isinstance(value, (list, tuple)):
            shown = [str(v) for v in value]
            if name == "notes":
                rows += [("note", text) for text in shown]
            elif len(shown) > 8:
                rows.append((title, f"{len(shown)}: {', '.join(shown[:8])}, …"))
            else:
                rows.append((title, ", ".join(shown) or "none"))
        else:
            rows.append((title, "-" if value is None else str(value)))
    return rows
