"""Print a table of records, with published numbers beside them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ibot_eval.cli import Positional
from ibot_eval.errors import RecordError


@dataclass(frozen=True)
class Report:
    """Print one line per run: the headline metric, its interval, and the published number where one is known."""

    runs: Positional[tuple[Path, ...]] = (Path("runs"),)
    """Run folders, or folders that hold runs."""
    format: str = "table"
    """table, md or csv."""
    all: bool = False
    """One line per metric instead of per run."""
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        from ibot_eval.errors import ConfigError
        from ibot_eval.record import EvalRecord, find_records
        from ibot_eval.reporting import records_table

        if self.format not in ("table", "md", "csv"):
            raise ConfigError(f"unknown format {self.format!r}", todo="use table, md or csv")
        records: list[EvalRecord] = []
        broken = 0
        for folder in self.runs:
            for path in find_records(folder):
                try:
                    records.append(EvalRecord.load(path))
                except RecordError as error:
                    # One damaged record must not hide the others.
                    broken += 1
                    print(f"left out: {error}", file=sys.stderr)
        if not records:
            raise RecordError(
                f"no records in {', '.join(map(str, self.runs))}"
                + (f" that can be read ({broken} cannot)" * bool(broken)),
                todo="run a protocol first: ibot-eval knn",
            )
        records.sort(key=lambda record: str(record.timing.get("started", "")))
        print(records_table(records, self.format, every_metric=self.all))
        return 0
