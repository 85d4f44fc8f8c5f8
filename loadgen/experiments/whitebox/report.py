"""The result file of the experiment, and the targets that its figures are held against."""

from dataclasses import dataclass
from typing import Literal

from client import MemoryMap
from loadgen.experiments.whitebox.findings import Arm, Findings
from loadgen.experiments.whitebox.plan import WhiteboxPlan
from loadgen.experiments.whitebox.summary import Ratio, ServerLatency, Summary
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts
from loadgen.results.per_target import PerTarget
from loadgen.results.verdicts import Verdict, all_well, verdict, verdict_of_spread


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


RESTORE_S = 2e-3
DISPATCH_S = 1e-4
KEPT = 0.99


def judge(summary: Summary, findings: Findings) -> list[Verdict]:
    """Every target, in the order of the report."""
    return [
        _accuracy(summary),
        _latency(summary, "djinn_checkpoint_restore_seconds", "a checkpoint is restored, p50", RESTORE_S),
        _latency(summary, "djinn_resume_dispatch_seconds", "a resume is dispatched, p50", DISPATCH_S),
        _divergence(summary),
        _kept("decode rate kept with a breakpoint that never matches", summary.kept[Arm.UNMATCHED]),
        _kept("throughput of others kept while one is paused", summary.kept_by_others),
        _undisturbed(findings),
        _memory(findings),
    ]


def _accuracy(summary: Summary) -> Verdict:
    matching, tokens = sum(row.matching for row in summary.accuracy), sum(row.tokens for row in summary.accuracy)
    everywhere = all(row.paused_everywhere for row in summary.accuracy)
    measured = f"{matching} of {tokens}{'' if everywhere else ', but not every pass paused'}"
    met = matching == tokens and everywhere
    return verdict("tokens that are the same with a pause in every pass", "all", measured, met if tokens else None)


def _latency(summary: Summary, histogram: str, what: str, target_s: float) -> Verdict:
    found: ServerLatency | None = summary.server.get(histogram)
    measured = "the server does not tell" if found is None else f"{1000 * found.p50:.3f} ms"
    return verdict(what, f"under {1000 * target_s:g} ms", measured, None if found is None else found.p50 < target_s)


def _divergence(summary: Summary) -> Verdict:
    differing, turns = sum(row.differing for row in summary.divergence), sum(row.turns for row in summary.divergence)
    met = all(row.differing for row in summary.divergence) if turns else None
    return verdict("steered turns that say something else", "some at every layer", f"{differing} of {turns}", met)


def _kept(what: str, ratio: Ratio | None) -> Verdict:
    target = f"at least {KEPT:.0%}"
    if ratio is None:
        return verdict(what, target, "", None)
    measured = f"{ratio.median:.2%} ({ratio.low:.2%} to {ratio.high:.2%})"
    return verdict_of_spread(what, target, measured, met=ratio.median >= KEPT, could_be=ratio.high >= KEPT)


def _undisturbed(findings: Findings) -> Verdict:
    paused = [window for window in findings.windows if window.paused]
    right = sum(window.undisturbed for window in paused)
    met = right == len(paused) if paused else None
    return verdict("paused turns that end as they would have", "all", f"{right} of {len(paused)}", met)


def _memory(findings: Findings) -> Verdict:
    what = "memory held by sessions afterwards"
    before, after = findings.memory.get("before"), findings.memory.get("after")
    if before is None or after is None:
        return verdict(what, "as before", "", None)
    held, still = _held(before), _held(after)
    return verdict(what, f"as before, {held:,} bytes", f"{still:,} bytes", still <= held)


def _held(memory: MemoryMap) -> int:
    """Bytes of KV in all tiers, and of residual streams."""
    tiers, stack = (memory.data.device, memory.data.host, memory.data.disk), memory.stack
    return sum(tier.owned_bytes for tier in tiers) + stack.checkpoint_bytes + stack.capture_bytes
