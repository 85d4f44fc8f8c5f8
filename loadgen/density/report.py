"""What the density experiment found, as it is written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.measurement import Measurement
from loadgen.records import Run
from loadgen.reporting.files import Result
from loadgen.reporting.inputs import Server, Texts
from loadgen.stats import Headline, Summary
from loadgen.workload import Replay, Workload


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
        """Whether somebody ended it early."""
        return any(run.interrupted for target in self.targets for run in target.runs)

    @property
    def succeeded(self) -> bool:
        """Whether every turn of every target completed."""
        return all(target.summary.succeeded for target in self.targets)
