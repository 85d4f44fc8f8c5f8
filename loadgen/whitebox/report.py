"""What the experiment found, as it is written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.reporting.files import Result
from loadgen.reporting.inputs import Server, Texts
from loadgen.reporting.per_target import PerTarget
from loadgen.verdicts import Verdict, all_well
from loadgen.whitebox.findings import Findings
from loadgen.whitebox.plan import WhiteboxPlan
from loadgen.whitebox.summary import Summary


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's part of a report."""

    server: Server
    layers: tuple[int, ...]
    prompts_sha256: str
    findings: Findings
    summary: Summary
    verdicts: tuple[Verdict, ...]

    @property
    def succeeded(self) -> bool:
        """Whether everything could be measured that the server tells, and no target is missed."""
        return all_well(self.verdicts, self.findings.failures, interrupted=self.findings.interrupted)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhiteboxReport(PerTarget, Result):
    """One run of the experiment."""

    experiment: Literal["whitebox"] = "whitebox"
    plan: WhiteboxPlan
    texts: Texts
    targets: tuple[TargetReport, ...]
