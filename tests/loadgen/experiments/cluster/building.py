"""Findings and reports made by hand."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from loadgen.experiments.cluster.findings import Fault, Findings, Move, Retries, Routing
from loadgen.experiments.cluster.plan import ClusterPlan, Router
from loadgen.experiments.cluster.report import ClusterReport, SizeReport
from loadgen.experiments.cluster.summary import judge
from loadgen.load.measurement import Measurement
from loadgen.load.records import Run
from loadgen.load.trace import planned_turns
from loadgen.load.workload import Workload, plan_trace
from loadgen.results.inputs import Server, Texts
from loadgen.stats import Summary, summarize
from tests.loadgen.experiments.density.building import MACHINE, run_of

LOAD = Workload(agents=3, turns=2, context=256)
PLAN = ClusterPlan((1, 2), moves_per_second=2.0, kill_every=5.0, kills=1, drain_at=9.0)


def whole_run() -> Run:
    """Every turn is done."""
    run = run_of(plan_trace(LOAD), 0.1, 1)
    run.turns.append(run.turns[-1])
    run.failures.clear()
    return run


def summary_of(run: Run) -> Summary:
    return summarize([run], planned_turns(plan_trace(LOAD)), Measurement())


def good() -> Findings:
    """All was done that `PLAN` says, and all was right: every target is met."""
    return Findings(
        moves=[Move(1.0, 0.01, 1 << 20, 300, 290)],
        refused=Counter(peer_away=2),
        faults=[Fault("kill", "a", 5.0, 9.0), Fault("drain", "b", 9.5, 12.0)],
        retries=Retries([(0, 1), (1, 1)], 1, Counter(replica_away=3)),
        routing=Routing(owner=5, followed=0, moving_on=0, away=3, lost=1),
        compared=6,
        tokens=384,
        owners={1: 3},
    )


def report(findings: Findings, router: Router = Router.OWNER) -> ClusterReport:
    """Of a cluster of two replicas that was found so."""
    run = whole_run()
    summary = summary_of(run)
    server = Server("2", "http://127.0.0.1:1", "djinn", None, ("djinn", "cluster", "serve"))
    size = SizeReport(2, router, True, server, run, summary, findings, judge(2, router, PLAN, summary, findings))
    return ClusterReport(
        seed=0,
        plan=PLAN,
        workload=LOAD,
        trace_sha256="0",
        prompts_sha256="0",
        texts=Texts("topics", "0"),
        sizes=(size,),
        machine=MACHINE,
        started_at=datetime(2026, 1, 2, tzinfo=UTC),
    )
