"""The result file of the experiment, and names for the targets of one or several of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from loadgen.load.measurement import Measurement
from loadgen.load.records import Run, TurnRecord
from loadgen.load.workload import Replay, Workload
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts
from loadgen.stats import Headline, Summary


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's part of a report: every repeat in `runs`, what they come to together, and how much they differ."""

    server: Server
    prompts_sha256: str
    runs: tuple[Run, ...]
    summary: Summary
    spread: dict[str, Headline]


@dataclass(frozen=True, slots=True, kw_only=True)
class DensityReport(Result):
    """One run of the experiment."""

    experiment: Literal["density"] = "density"
    workload: Workload | Replay
    trace_sha256: str
    measurement: Measurement
    texts: Texts
    targets: tuple[TargetReport, ...]

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it early."""
        return any(run.interrupted for target in self.targets for run in target.runs)

    @property
    def succeeded(self) -> bool:
        """Whether every turn of every target completed."""
        return all(target.summary.succeeded for target in self.targets)


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
