"""The targets that a cluster is held against."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.experiments.cluster.findings import Findings
from loadgen.experiments.cluster.plan import ClusterPlan, Router
from loadgen.results.verdicts import Verdict, verdict
from loadgen.stats import Summary


def judge(
    replicas: int, router: Router, plan: ClusterPlan, summary: Summary, findings: Findings
) -> tuple[Verdict, ...]:
    """Every target, in the order of the report. Where a hash chooses, no replica owns a session."""
    owned = _owned(plan, findings) if router is Router.OWNER else ()
    return (*_kept(summary, findings), *owned, *_done(replicas, router, plan, findings))


def _kept(summary: Summary, findings: Findings) -> Iterator[Verdict]:
    """What must hold whatever was done."""
    completed, planned = summary.turns_completed, summary.turns_planned
    yield verdict("turns completed", "all", f"{completed:,} of {planned:,}", completed == planned)
    same = findings.compared - len(findings.wrong)
    yield verdict(
        "turns with a single server's tokens",
        "all",
        f"{same:,} of {findings.compared:,}",
        None if not findings.compared else not findings.wrong,
    )


def _owned(plan: ClusterPlan, findings: Findings) -> Iterator[Verdict]:
    """What must hold of sessions that have an owner."""
    lost = len(findings.lost)
    yield verdict("finished turns lost", "none", f"{lost:,}", not lost)
    sessions = sum(findings.owners.values())
    one = findings.owners.get(1, 0)
    yield verdict(
        "sessions that exactly one replica has",
        "all",
        f"{one:,} of {sessions:,}",
        None if not sessions else one == sessions,
    )
    routing = findings.routing
    affinity = None if routing is None else routing.affinity
    told = "not told" if routing is None or affinity is None else f"{percent(affinity)}, {routing.followed:,} followed"
    # A replica may not have heard yet where a session has moved: it learns that with the session's next turn.
    target = "100 %, but once for each move"
    most = len(findings.moves) + (0 if plan.drain_at is None else sessions)
    is_met = None if routing is None or affinity is None else not routing.moving_on and routing.followed <= most
    yield verdict("turns whose owner was asked first", target, told, is_met)


def _done(replicas: int, router: Router, plan: ClusterPlan, findings: Findings) -> Iterator[Verdict]:
    """What was to be done to it."""
    if plan.moves(replicas, router):
        yield verdict("sessions moved", "some", f"{len(findings.moves):,}", bool(findings.moves))
    if plan.kill_every is not None:
        kills = came_back(findings, "kill")
        target = f"{plan.kills}" if plan.kills else "some"
        yield verdict("replicas killed that came back", target, f"{kills}", kills >= max(1, plan.kills))
    if plan.drain_at is not None:
        drains = came_back(findings, "drain")
        yield verdict("replicas told to end that came back", "1", f"{drains}", drains == 1)


def came_back(findings: Findings, kind: str) -> int:
    """Faults of that kind whose replica took new work again."""
    return sum(fault.kind == kind and fault.ended_s is not None for fault in findings.faults)


def percent(share: float) -> str:
    """Such as 99.99 %; only what is whole is 100 %."""
    return f"{int(10_000 * share) / 100:.2f} %"
