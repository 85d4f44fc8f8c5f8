"""What can be asked for, and what made-up findings come to."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loadgen.experiments.cluster.findings import Fault, Findings, Move, Retries, Routing, WrongTurn
from loadgen.experiments.cluster.page import make_page
from loadgen.experiments.cluster.pinning import cores_for
from loadgen.experiments.cluster.plan import ClusterPlan, Router
from loadgen.experiments.cluster.report import ClusterReport, SizeReport
from loadgen.experiments.cluster.summary import judge, percent
from loadgen.experiments.cluster.tables import tables
from loadgen.load.measurement import Measurement
from loadgen.load.records import Run
from loadgen.load.trace import planned_turns
from loadgen.load.workload import Workload, plan_trace
from loadgen.results.failures import Failure
from loadgen.results.files import read_result
from loadgen.results.inputs import Server, Texts
from loadgen.results.page import write_outputs
from loadgen.results.schema import json_schema
from loadgen.results.verdicts import Outcome
from loadgen.stats import Summary, summarize
from tests.loadgen.experiments.density.building import MACHINE, run_of


def test_replicas_have_cores_of_their_own_only_where_one_is_left_for_the_others() -> None:
    assert cores_for(2, (0, 1, 2)) == (1, 2)
    assert cores_for(2, (0, 1)) == ()
    assert cores_for(1, (4, 5)) == (5,)


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


WRONG = WrongTurn(1, 2, "token 3 of 16 is another one")


def missed(findings: Findings, plan: ClusterPlan = PLAN) -> set[str]:
    run = whole_run()
    return {
        one.what for one in judge(2, Router.OWNER, plan, summary_of(run), findings) if one.outcome is not Outcome.MET
    }


def test_a_run_in_which_all_was_right_meets_every_target() -> None:
    assert missed(good()) == set()
    assert report(good()).succeeded
    assert not report(replace(good(), failures=[Failure("the end", "NotAsMeant", "why")])).succeeded
    run = whole_run()
    run.turns.pop()
    outcomes = {one.what: one.outcome for one in judge(2, Router.OWNER, PLAN, summary_of(run), good())}
    assert outcomes["turns completed"] is Outcome.MISSED


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("turns with a single server's tokens", {"wrong": [WRONG]}),
        ("turns with a single server's tokens", {"compared": 0}),
        ("finished turns lost", {"lost": [WRONG]}),
        ("sessions that exactly one replica has", {"owners": {1: 2, 2: 1}}),
        ("sessions that exactly one replica has", {"owners": {0: 1, 1: 2}}),
        ("turns whose owner was asked first", {"routing": Routing(9_996, 4, 0, 0, 0)}),
        ("turns whose owner was asked first", {"routing": Routing(9_999, 0, 1, 0, 0)}),
        ("sessions moved", {"moves": []}),
        ("replicas killed that came back", {"faults": [Fault("kill", "a", 5.0, None), Fault("drain", "b", 9.5, 12.0)]}),
        ("replicas told to end that came back", {"faults": [Fault("kill", "a", 5.0, 9.0)]}),
    ],
)
def test_each_target_can_be_missed(what: str, changed: dict[str, Any]) -> None:
    assert missed(replace(good(), **changed)) == {what}


def test_the_files_hold_all_and_the_page_shows_it(tmp_path: Path) -> None:
    made = report(replace(good(), lost=[WRONG]))
    data, page, *pictures = write_outputs(made, make_page(made), tmp_path)
    jsonschema.validate(json.loads(data.read_text()), json_schema(ClusterReport))
    assert read_result(data, ClusterReport).sizes[0].findings.owners == {1: 3}
    text = page.read_text()
    for words in ("By number of replicas", "What was done to replicas", "Wrong and lost turns", "2 cores"):
        assert words in text
    assert text.count("<svg") == len(pictures) == 3
    rows = {row[0]: row[1] for table in tables(made) for row in table.rows if len(row) == 2}
    assert (rows["affinity"], percent(0.999999)) == ("100.00 %", "99.99 %")
    assert (rows["moved"], rows["moves refused"]) == ("1.00 MiB", "peer_away 2")
    assert (rows["errors asked again after"], rows["turns that failed before they were done"]) == (
        "replica_away 3",
        "2",
    )
