"""Look at, check and clear the cache of feature banks."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ibot_eval.cli import Positional
from ibot_eval.errors import CacheError, ConfigError


@dataclass(frozen=True)
class Cache:
    """ls shows the banks, verify checks their checksums, rm removes them (KEYs may be shortened; --all for all)."""

    action: Positional[Literal["ls", "rm", "verify"]] = "ls"
    """ls, rm or verify."""
    keys: Positional[tuple[str, ...]] = ()
    """Banks, by key or the first letters of one."""
    all: bool = False
    """With rm: every bank."""
    cache: Path | None = None
    """Folder of the cache. Default: $IBOT_EVAL_CACHE, else ~/.cache/ibot-eval."""
    json: bool = False
    """With ls: print JSON."""
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        from dataclasses import asdict

        from tabulate import tabulate

        from ibot_eval.cache import BankCache

        if self.cache is not None and not self.cache.is_dir():
            raise ConfigError(f"there is no folder {self.cache}", where="--cache")
        cache = BankCache(self.cache)
        banks = cache.ls()
        chosen = banks if not self.keys else [b for b in banks if any(b.key.startswith(k) for k in self.keys)]
        unknown = [k for k in self.keys if not any(b.key.startswith(k) for b in banks)]
        if unknown:
            raise ConfigError(f"no bank's key starts with {unknown[0]!r}", todo="ibot-eval cache ls shows the keys")
        if self.action == "ls":
            if self.json:
                print(jsonlib.dumps([asdict(b) for b in chosen], indent=2, default=str))
                return 0
            rows = [
                (
                    b.key[:12],
                    "whole" if b.complete else "unfinished",
                    f"{b.n:,}",
                    f"{b.bytes / 1e6:,.1f} MB",
                    f"{b.split} block {b.block} {b.norm} {b.reducer}",
                    b.checkpoint,
                    b.data,
                    f"{b.created:%Y-%m-%d %H:%M}",
                )
                for b in chosen
            ]
            print(f"{cache.root}: {len(chosen)} banks, {sum(b.bytes for b in chosen) / 1e6:,.1f} MB")
            if rows:
                headers = ["key", "state", "images", "size", "atomic output", "checkpoint", "data", "created"]
                print(tabulate(rows, headers=headers, disable_numparse=True))
            return 0
        if self.action == "rm":
            if not self.keys and not self.all:
                raise ConfigError("rm needs the keys of banks, or --all", todo="ibot-eval cache ls shows the keys")
            cache.rm([b.key for b in chosen])
            print(f"removed {len(chosen)} banks, {sum(b.bytes for b in chosen) / 1e6:,.1f} MB")
            return 0
        whole = [b.key for b in chosen if b.complete]
        damaged = cache.verify(whole)
        for text in damaged:
            print(text)
        if damaged:
            raise CacheError(
                f"{len(damaged)} of {len(whole)} banks are damaged",
                todo=f"remove them: {cache.removal(*sorted({d.key for d in damaged}))}",
            )
        print(f"{len(whole)} banks verified, none damaged")
        return 0
