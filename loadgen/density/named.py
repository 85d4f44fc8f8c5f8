"""Targets of one or of several reports, each with a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.density.report import DensityReport, TargetReport
from loadgen.records import Run


@dataclass(frozen=True, slots=True)
class Named:
    """A target, and what it is called in tables and figures."""

    name: str
    report: TargetReport

    @property
    def shown_run(self) -> Run | None:
        """The run whose course over time is drawn: the first."""
        return self.report.runs[0] if self.report.runs else None


def of_report(report: DensityReport) -> tuple[Named, ...]:
    """The targets of one report, by their own names, which differ."""
    return tuple(Named(target.server.name, target) for target in report.targets)


def of_reports(reports: Sequence[DensityReport]) -> tuple[Named, ...]:
    """The targets of several; a name that more than one has is followed by the report's number, from 1."""
    every = [(number, target) for number, report in enumerate(reports, 1) for target in report.targets]
    seen = Counter(target.server.name for _, target in every)
    return tuple(
        Named(name if seen[name := target.server.name] == 1 else f"{name} ({number})", target)
        for number, target in every
    )


def names(targets: Sequence[Named]) -> tuple[str, ...]:
    """What they are called."""
    return tuple(target.name for target in targets)
