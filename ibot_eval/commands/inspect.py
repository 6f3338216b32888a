"""Show what a checkpoint holds and how it is read."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from ibot_eval.errors import ConfigError
from ibot_eval.settings import CheckpointSettings


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

        loaded = load_any(self.checkpoint, BankCache(self.cache), seed=0)
        report = loaded.report.as_dict()
        backbone = loaded.backbone
        report["cls_token"] = backbone.has_cls
        report["mean"], report["std"] = list(backbone.mean), list(backbone.std)
        if self.json:
            print(jsonlib.dumps(report, indent=2))
            return 0
        del report["identity"]  # the same once more, for the keys of feature banks
        print(tabulate(_rows(report), tablefmt="plain"))
        return 0


def _rows(report: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
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
