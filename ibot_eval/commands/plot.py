"""Draw the figures of one or several runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ibot_eval.cli import Positional
from ibot_eval.errors import ConfigError


@dataclass(frozen=True)
class Plot:
    """Draw what the protocols of the given runs offer, or the training curves; runs of one kind share their axes."""

    runs: Positional[tuple[Path, ...]] = ()
    """Run folders, or folders that hold runs."""
    out: Path | None = None
    """Folder for the figures. Default: figures/ in the run's folder, or ./figures for several runs."""
    format: Literal["png", "pdf", "svg"] = "png"
    """File format."""
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        if not self.runs:
            raise ConfigError("no run is named", todo="ibot-eval plot runs/NAME …")
        from ibot_eval import registry
        from ibot_eval.figures import save_figure
        from ibot_eval.record import find_records, readable_records

        paths = [path for folder in self.runs for path in find_records(folder)]
        records, problems = readable_records(*self.runs)
        for problem in problems:
            print(f"left out: {problem}", file=sys.stderr)
        # What a command draws comes from the log beside the record, which a run has before it ends.
        logged = registry.entries("commands").keys() - registry.entries("protocols").keys()
        usable = [record for record in records if record.status == "success" or record.protocol in logged]
        if not usable:
            raise ConfigError(
                "no run to draw: "
                + (f"none of the {len(records)} given ended well" if records else f"none in {self.runs[0]}"),
                todo="ibot-eval report shows how they ended",
            )
        out = self.out or (paths[0].parent / "figures" if len(paths) == 1 else Path("figures"))
        drawn = 0
        for protocol in dict.fromkeys(record.protocol for record in usable):
            of_protocol = [record for record in usable if record.protocol == protocol]
            for name, figure in registry.load_drawer(protocol).figures(*of_protocol).items():
                print(save_figure(figure, out / f"{protocol}-{name}.{self.format}"))
                drawn += 1
        if not drawn:
            raise ConfigError(f"{', '.join({r.protocol for r in usable})} offers no figures")
        return 0
