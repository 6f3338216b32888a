"""Print a table of records, with published numbers beside them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ibot_eval.cli import Positional
from ibot_eval.errors import RecordError


@dataclass(frozen=True)
class Report:
    """Print one line per run: the headline metric, its interval, and the published number where one is known."""

    runs: Positional[tuple[Path, ...]] = (Path("runs"),)
    """Run folders, or folders that hold runs."""
    format: Literal["table", "md", "csv"] = "table"
    """Text, Markdown or comma-separated values."""
    all: bool = False
    """One line per metric instead of per run."""
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        from ibot_eval.record import readable_records
        from ibot_eval.reporting import records_table

        records, problems = readable_records(*self.runs)
        for problem in problems:
            print(f"left out: {problem}", file=sys.stderr)
        if not records:
            raise RecordError(
                f"no record that can be read in {', '.join(map(str, self.runs))}",
                todo="run a protocol first: ibot-eval knn",
            )
        print(records_table(records, self.format, every_metric=self.all))
        return 0
