"""Compare runs image by image: is the difference real?"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ibot_eval.cli import Positional
from ibot_eval.errors import ConfigError

if TYPE_CHECKING:
    from ibot_eval.comparison import Judged
    from ibot_eval.metrics.paired import Paired
    from ibot_eval.reporting import Format

SIGNIFICANT = 0.05
"""p below which a difference is called one."""


@dataclass(frozen=True)
class Compare:
    """Compare runs image by image with the first: difference, 95 % bootstrap interval, and McNemar's p."""

    runs: Positional[tuple[Path, ...]] = ()
    """Run folders or record files, two or more; each is compared with the first."""
    column: tuple[str, ...] = ()
    """Predictions to compare, such as top1@k=10: one name for all runs or one for each. Default: the headline's."""
    classes: int = 0
    """Also list the N classes that gain most and the N that lose most; with csv, only these."""
    format: Literal["table", "md", "csv"] = "table"
    """Text, Markdown or comma-separated values."""
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        if len(self.runs) < 2:
            raise ConfigError(
                "one run cannot be compared" if self.runs else "no runs are named",
                todo="ibot-eval compare runs/A runs/B …",
            )
        if self.classes < 0:
            raise ConfigError(
                f"{self.classes} classes cannot be listed", where="--classes", todo="give a number from 1"
            )
        from ibot_eval.comparison import differing_settings, judge_all
        from ibot_eval.metrics.paired import paired_difference

        first, *others = judge_all(self.runs, self.column)
        pairs = [(other, paired_difference(first.right, other.right)) for other in others]
        notes = [run.note for run in (first, *others) if run.note]
        notes += [note for other in others for note in differing_settings(first, other)]
        if len(others) > 1:
            notes.append(f"the p-values are not corrected for {len(others)} comparisons")
        csv_form = self.format == "csv"
        parts = [] if csv_form and self.classes else [comparison_table(first, pairs, self.format)]
        if not csv_form:
            parts.append("\n".join(sentence(first, other, paired) for other, paired in pairs))
        if self.classes:
            parts.append(classes_table(first, others, self.classes, self.format))
        if notes and not csv_form:
            parts.append("\n".join(f"note: {note}" for note in notes))
        print("\n\n".join(parts))
        for note in notes if csv_form else ():
            print(f"note: {note}", file=sys.stderr)
        return 0


def comparison_table(first: Judged, pairs: Sequence[tuple[Judged, Paired]], form: Format) -> str:
    """A line per run, the first with its accuracy, the others also with how they differ from it.

    Differences are in percentage points; gained are images on which only this run is right, lost those on which only
    the first is.
    """
    columns = (
        "run",
        "protocol",
        "column",
        "n",
        "right [%]",
        "difference",
        "95 % interval",
        "McNemar p",
        "gained",
        "lost",
    )
    rows = [_start(first) + [""] * 5]
    for other, paired in pairs:
        low, high = paired.interval
        rows.append(
            [
                *_start(other),
                f"{paired.difference:+.2f}",
                f"{low:+.2f} to {high:+.2f}",
                f"{paired.mcnemar_p:.3g}" if form == "csv" else p_text(paired.mcnemar_p),
                str(paired.only_b),
                str(paired.only_a),
            ]
        )
    return _table(columns, rows, form, left=3)


def _start(run: Judged) -> list[str]:
    return [run.name, run.record.protocol, run.column, str(len(run.right)), f"{run.accuracy:.2f}"]


def sentence(first: Judged, other: Judged, paired: Paired) -> str:
    """What the numbers say, in words."""
    a, b = first.name, other.name
    if not paired.only_a and not paired.only_b:
        return f"{b} is right on the same images as {a}."
    low, high = paired.interval
    p = p_text(paired.mcnemar_p)
    numbers = (
        f"{paired.difference:+.2f} percentage points (95 % interval {low:+.2f} to {high:+.2f}; McNemar p "
        f"{p if p.startswith('<') else f'= {p}'}). Of {paired.n:,} images {b} alone is right on {paired.only_b:,}, "
        f"{a} alone on {paired.only_a:,}."
    )
    if paired.mcnemar_p >= SIGNIFICANT:
        return f"No difference between {b} and {a} can be shown: {numbers}"
    return f"{b} is {'better' if paired.difference > 0 else 'worse'} than {a}: {numbers}"


def p_text(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def classes_table(first: Judged, others: Sequence[Judged], most: int, form: Format) -> str:
    """For each of ``others`` the classes on which it gains most over the first run, and where it loses most."""
    from ibot_eval.comparison import class_changes

    rows = []
    for other in others:
        changes = class_changes(first, other)
        gains = [change for change in changes if change.difference > 0]
        losses = [change for change in changes if change.difference < 0]
        rows += [
            [other.name, c.name, str(c.n), f"{c.first:.2f}", f"{c.other:.2f}", f"{c.difference:+.2f}"]
            for c in [*gains[:most], *losses[-most:]]
        ]
    if not rows and form != "csv":
        return f"No class is more or less often right than in {first.name}."
    columns = ("run", "class", "n", f"right in {first.name} [%]", "right [%]", "difference")
    return _table(columns, rows, form, left=2)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], form: Format, left: int) -> str:
    """``left``: how many columns hold texts; the others hold numbers."""
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([columns, *rows])
        return out.getvalue().rstrip("\n")
    from tabulate import tabulate

    return tabulate(
        rows,
        headers=columns,
        tablefmt="github" if form == "md" else "simple",
        disable_numparse=True,
        colalign=["left"] * left + ["right"] * (len(columns) - left),
    )
