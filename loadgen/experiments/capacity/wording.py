"""Probes and what they come to, in words."""

from loadgen.experiments.capacity.limits import TPOT, TTFT, Miss
from loadgen.experiments.capacity.report import Findings, Probe, TargetReport
from loadgen.results.text import counts, in_seconds
from loadgen.stats import Summary


def title(target: str, number: int, agents: int, findings: Findings) -> str:
    """The probe that is on, and what has been found so far."""
    return f"{target}, probe {number}, {_agents(agents)} ({_so_far(findings)})"


def _so_far(findings: Findings) -> str:
    if findings.held is None and findings.failed is None:
        return "nothing found yet"
    held = "" if findings.held is None else f"{findings.held:,} held"
    failed = "" if findings.failed is None else f"{findings.failed:,} failed"
    return ", ".join(part for part in (held, failed) if part)


def verdict_line(target: str, probe: Probe) -> str:
    """A probe that is over."""
    verdict = f"held: {_well(probe.summary)}" if probe.held else f"failed: {why(probe)}"
    return f"{target}: {_agents(probe.agents)} {verdict}"


def _well(summary: Summary) -> str:
    figures = ((TTFT, summary.ttft_resumed_s), (TPOT, summary.tpot_s))
    return ", ".join(f"{what} p95 {in_seconds(found.p95)}" for what, found in figures if found is not None)


def why(probe: Probe) -> str:
    """Every reason that a probe failed for; empty if it held."""
    reasons = [_over(miss) for miss in probe.misses]
    errors = {**probe.summary.turn_errors, **probe.summary.other_errors}
    if errors:
        reasons.append(f"errors: {counts(errors)}")
    return "; ".join(reasons)


def _over(miss: Miss) -> str:
    factor = miss.p95_s / miss.limit_s
    return f"{miss.what}: p95 {in_seconds(miss.p95_s)}, {factor:.3g} times the limit"


def held_in_words(target: TargetReport) -> str:
    """The number of agents that the server holds, or all that is known of it."""
    findings = target.findings
    if findings.held is None:
        return "none" if findings.complete else "unknown"
    return f"{findings.held:,}" if findings.complete else f"at least {findings.held:,}"


def _agents(agents: int) -> str:
    return f"{agents:,} {'agent' if agents == 1 else 'agents'}"
