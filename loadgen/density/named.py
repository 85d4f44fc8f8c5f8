"""Targets of one or of several reports, each with a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadgen.density.report import DensityReport, TargetReport
from loadgen.records import Run, TurnRecord


@dataclass(frozen=True, slots=True)
class Named:
    """A target, and what it is called in tables and figures. `warmup_s` is that of its runs."""

    name: str
    report: TargetReport
    warmup_s: float

    @property
    def shown_run(self) -> Run | None:
        """The run whose course over time is drawn: the first."""
        return self.report.runs[0] if self.report.runs else None

    @property
    def measured_turns(self) -> list[TurnRecord]:
        """The completed turns of all repeats that were sent after the warm-up."""
        return [turn for run in self.report.runs for turn in run.turns if turn.sent_s >= self.warmup_s]


def of_report(report: DensityReport) -> tuple[Named, ...]:
    """The targets of one report, by their own names, which differ."""
    return tuple(Named(target.server.name, target, report.measurement.warmup_s) for target in report.targets)


def of_reports(reports: Sequence[DensityReport]) -> tuple[Named, ...]:
    """The targets of several; a name that more than one has is followed by the report's number, from 1."""
    every = [(number, named) for number, report in enumerate(reports, 1) for named in of_report(report)]
    seen = Counter(named.name for _, named in every)
    return tuple(
        named if seen[named.name] == 1 else replace(named, name=f"{named.name} ({number})") for number, named in every
    )


def names(targets: Sequence[Named]) -> tuple[str, ...]:
    """What they are called."""
    return tuple(target.name for target in targets)
