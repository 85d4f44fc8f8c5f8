"""The result file of the experiment."""

from dataclasses import dataclass
from typing import Literal

from loadgen.experiments.soak.findings import Findings
from loadgen.experiments.soak.plan import SoakPlan
from loadgen.experiments.soak.summary import Summary
from loadgen.results.files import Result
from loadgen.results.inputs import Server
from loadgen.results.verdicts import Verdict, all_well


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport(Result):
    """One run of the experiment."""

    experiment: Literal["soak"] = "soak"
    plan: SoakPlan
    server: Server
    findings: Findings
    summary: Summary
    verdicts: tuple[Verdict, ...]

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it early."""
        return self.findings.interrupted

    @property
    def succeeded(self) -> bool:
        """Whether every token was right, every error had its fault, and no target is missed."""
        return all_well(self.verdicts, self.findings.failures, interrupted=self.findings.interrupted)
