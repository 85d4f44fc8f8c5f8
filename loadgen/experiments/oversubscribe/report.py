"""The result file of the experiment, and the targets that its figures are held against."""

from dataclasses import dataclass
from typing import Literal

from loadgen.experiments.oversubscribe.findings import Budget, Findings
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.experiments.oversubscribe.summary import Summary
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts
from loadgen.results.per_target import PerTarget
from loadgen.results.text import MIB
from loadgen.results.verdicts import Verdict, all_well, verdict


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


def judge(summary: Summary, findings: Findings) -> tuple[Verdict, ...]:
    """Every target, in the order of the report."""
    budget = findings.budget
    if budget is None:
        return (_turns(summary),)
    return (_demand(summary, budget), _device(summary, budget), _turns(summary), _lost(summary, budget), _same(summary))


def _demand(summary: Summary, budget: Budget) -> Verdict:
    ratio = summary.demand_bytes / budget.device_bytes
    measured = f"{ratio:.1f} times: {mib(summary.demand_bytes)} of {mib(budget.device_bytes)}"
    return verdict("KV of all histories, of what the device holds", "more than it holds", measured, ratio > 1)


def _device(summary: Summary, budget: Budget) -> Verdict:
    within = summary.device_bytes <= budget.device_bytes
    target = f"at most its budget, {mib(budget.device_bytes)}"
    return verdict("KV on the device", target, f"at most {mib(summary.device_bytes)}", within)


def _turns(summary: Summary) -> Verdict:
    measured = f"{summary.turns_completed} of {summary.turns_planned}"
    return verdict("turns completed", "all", measured, summary.turns_completed == summary.turns_planned)


def _lost(summary: Summary, budget: Budget) -> Verdict:
    """Only a server that can keep everything somewhere must not lose any of it."""
    fits = budget.policy != "none" and summary.demand_bytes <= budget.host_bytes + budget.disk_bytes
    target = "none" if fits else "some: host and disk cannot keep it all"
    return verdict(
        "tokens recomputed",
        target,
        f"{summary.recomputed_tokens:,}",
        summary.recomputed_tokens == 0 if fits else None,
    )


def _same(summary: Summary) -> Verdict:
    measured = f"{summary.matching_tokens} of {summary.checked_tokens}"
    met = summary.matching_tokens == summary.checked_tokens if summary.checked_tokens else None
    return verdict("tokens that are the same when the session is alone", "all", measured, met)


def mib(size: int) -> str:
    """Bytes, to be read."""
    return f"{size / MIB:,.0f} MiB" if size >= 10 * MIB or not size else f"{size / MIB:.2f} MiB"
