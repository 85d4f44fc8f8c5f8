"""What the experiment found, as it is written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.oversubscribe.findings import Findings
from loadgen.oversubscribe.plan import OversubscribePlan
from loadgen.oversubscribe.summary import Summary
from loadgen.reporting.files import Result
from loadgen.reporting.inputs import Server, Texts
from loadgen.reporting.per_target import PerTarget
from loadgen.verdicts import Verdict, all_well


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's part of a report."""

    server: Server
    prompts_sha256: str
    findings: Findings
    summary: Summary
    verdicts: tuple[Verdict, ...]

    @property
    def succeeded(self) -> bool:
        """Whether everything was measured, and no target is missed."""
        return all_well(self.verdicts, self.findings.failures, interrupted=self.findings.interrupted)


@dataclass(frozen=True, slots=True, kw_only=True)
class OversubscribeReport(PerTarget, Result):
    """One run of the experiment."""

    experiment: Literal["oversubscribe"] = "oversubscribe"
    plan: OversubscribePlan
    texts: Texts
    targets: tuple[TargetReport, ...]
