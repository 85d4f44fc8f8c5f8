"""From what was seen to figures."""

from collections import Counter
from dataclasses import dataclass

from loadgen.experiments.oversubscribe.findings import Findings
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.stats.distribution import Distribution


@dataclass(frozen=True, slots=True)
class Plateau:
    """The device's use from the moment on at which demand had passed its budget; in bytes."""

    low: int
    high: int
    samples: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of one target comes to. Bytes are of KV, and highest over the run. Times in seconds."""

    turns_planned: int
    turns_completed: int
    turns_failed: int
    turns_not_run: int
    errors: dict[str, int]
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    turn_s: Distribution | None
    duration_s: float
    demand_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    plateau: Plateau | None
    checked_tokens: int
    matching_tokens: int


def summarize(findings: Findings, plan: OversubscribePlan) -> Summary:
    """The figures of a run, complete or not."""
    planned, completed, failed = plan.sessions * plan.turns, len(findings.turns), len(findings.turn_failures)
    samples = findings.samples
    return Summary(
        turns_planned=planned,
        turns_completed=completed,
        turns_failed=failed,
        turns_not_run=planned - completed - failed,
        errors=dict(sorted(Counter(failure.kind for failure in findings.turn_failures).items())),
        completion_tokens=sum(len(turn.token_ids) for turn in findings.turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in findings.turns),
        cached_tokens=sum(turn.cached_tokens for turn in findings.turns),
        recomputed_tokens=sum(turn.recomputed_tokens for turn in findings.turns),
        turn_s=Distribution.of(turn.seconds for turn in findings.turns),
        duration_s=findings.duration_s,
        demand_bytes=max((sample.demand_bytes for sample in samples), default=0),
        device_bytes=max((sample.device_bytes for sample in samples), default=0),
        host_bytes=max((sample.host_bytes for sample in samples), default=0),
        disk_bytes=max((sample.disk_bytes for sample in samples), default=0),
        plateau=_plateau(findings),
        checked_tokens=sum(max(len(check.crowded), len(check.alone)) for check in findings.checks),
        matching_tokens=sum(check.matching for check in findings.checks),
    )


def _plateau(findings: Findings) -> Plateau | None:
    if findings.budget is None:
        return None
    room = findings.budget.device_bytes
    used = [sample.device_bytes for sample in findings.samples if sample.demand_bytes > room]
    return Plateau(min(used), max(used), len(used)) if used else None
