"""What a check of annotations found, as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ibot_eval.errors import DataError

Severity = Literal["error", "note", "info"]
EXAMPLES = 3
"""Of each finding, in the text of a report."""
_LARGEST, _SMALLEST, _BAR = 20, 5, 30


@dataclass(frozen=True)
class Finding:
    """One kind of thing that a check found."""

    severity: Severity
    """error: training makes no sense or would break off; note: worth a warning; info: good to know."""
    what: str
    """What is wrong, without the number of cases."""
    count: int | None = None
    """How many cases; None where counting makes no sense."""
    examples: tuple[str, ...] = ()
    """The first few cases."""
    todo: str = ""
    split: str = ""
    """Where it was found."""

    def text(self) -> str:
        """One line, such as ``val: images that are not there: 3 (a.jpg, b.jpg, c.jpg)``."""
        shown = ", ".join(self.examples[:EXAMPLES])
        if self.count is None:
            cases = f": {shown}" if shown else ""
        else:
            more = ", …" if shown and self.count > EXAMPLES else ""
            cases = f": {self.count:,}" + (f" ({shown}{more})" if shown else "")
        return (f"{self.split}: " if self.split else "") + self.what + cases


def found(severity: Severity, what: str, cases: Iterable[object], todo: str = "") -> list[Finding]:
    """One finding with its cases counted, or none if there are no cases."""
    named = [str(case) for case in cases]
    return [Finding(severity, what, len(named), tuple(named[:EXAMPLES]), todo)] if named else []


@dataclass(frozen=True)
class Histogram:
    """How often each class (or size, or kind) occurs."""

    title: str
    counts: Mapping[str, int]
    """In the order of the classes."""
    sort: bool = True
    """Whether the largest come first, long lists are cut and zeros counted; otherwise all are shown in their order."""

    def text(self) -> str:
        """A line per class with a bar: all of them, or the largest and the smallest of many."""
        rows = list(self.counts.items())
        none = 0
        if self.sort:
            rows = [row for row in rows if row[1]]
            none = len(self.counts) - len(rows)
            rows.sort(key=lambda row: -row[1])  # stable: equals stay in the order of the classes
        hidden = len(rows) - _LARGEST - _SMALLEST if self.sort else 0
        if hidden > 1:
            rows = rows[:_LARGEST] + rows[-_SMALLEST:]
        total, most = sum(self.counts.values()), max(self.counts.values(), default=0)
        names = max((len(name) for name, _ in rows), default=0)
        digits = max((len(f"{count:,}") for _, count in rows), default=1)
        lines = [self.title]
        for place, (name, count) in enumerate(rows):
            if hidden > 1 and place == _LARGEST:
                lines.append(f"  … {hidden} more")
            bar = "#" * (max(1, round(_BAR * count / most)) if count else 0)
            share = 100 * count / total if total else 0.0
            lines.append(f"  {name:<{names}}  {count:>{digits},}  {share:5.1f} %  {bar}".rstrip())
        if none:
            lines.append(f"  ({none} with none)")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What a check of annotations found. Reports add up."""

    findings: Sequence[Finding] = ()
    histograms: Sequence[Histogram] = ()
    heads: Sequence[str] = ()
    """One line per split: its name and how much it holds."""

    def __add__(self, other: Report) -> Report:
        return Report(
            [*self.findings, *other.findings],
            [*self.histograms, *other.histograms],
            [*self.heads, *other.heads],
        )

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def notes(self) -> list[str]:
        """What is worth a warning, for the record."""
        return [finding.text() for finding in self.findings if finding.severity == "note"]

    def within(self, split: str) -> Report:
        """The same, found in ``split``."""
        return Report([replace(finding, split=split) for finding in self.findings], self.histograms, self.heads)

    def text(self) -> str:
        """All of it: what there is, the findings with the worst first, the histograms."""
        listed = sorted(self.findings, key=lambda finding: get_args(Severity).index(finding.severity))
        parts = ["\n".join(self.heads), _lines(listed) if listed else "nothing to complain of"]
        return "\n\n".join([part for part in parts if part] + [histogram.text() for histogram in self.histograms])

    def overview(self) -> str:
        """What there is, without the findings: shown before a run, whose warnings are the notes."""
        return "\n\n".join(["\n".join(self.heads), *(histogram.text() for histogram in self.histograms)])

    def stop_at_errors(self, where: str, whole: bool = False) -> None:
        """Raises DataError that lists every error, if there is any.

        Args:
            where: the data set.
            whole: say the notes and the histograms too.
        """
        if not self.errors:
            return
        listed = self.text() if whole else _lines(self.errors)
        raise DataError(
            f"the annotations cannot be trained on as they are:\n{listed}",
            where=where,
            todo="correct them; --check-data checks again without starting a run",
        )


def _lines(findings: Iterable[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity + ':':<6} {finding.text()}")
        if finding.todo:
            lines.append(f"       -> {finding.todo}")
    return "\n".join(lines)
