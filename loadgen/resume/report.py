"""What the experiment found, as it is written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.reporting.files import Result
from loadgen.reporting.inputs import Server, Texts
from loadgen.reporting.per_target import PerTarget
from loadgen.resume.findings import Findings
from loadgen.resume.plan import ResumePlan
from loadgen.resume.summary import Summary
from loadgen.verdicts import Verdict, all_well


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's part of a report. `num_layers` are those of its model, `layers` those that were paused after."""

    server: Server
    num_layers: int
    layers: tuple[int, ...]
    findings: Findings
    summary: Summary
    verdicts: tuple[Verdict, ...]

    @property
    def succeeded(self) -> bool:
        """Whether everything was measured, and no target is missed."""
        return all_well(self.verdicts, self.findings.failures, interrupted=self.findings.interrupted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport(PerTarget, Result):
    """One run of the experiment. `model` is the folder's name of what the hand-written offload ran, if it did."""

    experiment: Literal["resume-latency"] = "resume-latency"
    plan: ResumePlan
    model: str | None
    texts: Texts
    targets: tuple[TargetReport, ...]
