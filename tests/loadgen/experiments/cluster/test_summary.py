"""What made-up findings come to, and how they are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loadgen.experiments.cluster.findings import Fault, Findings, Routing, WrongTurn
from loadgen.experiments.cluster.page import make_page
from loadgen.experiments.cluster.plan import ClusterPlan, Router
from loadgen.experiments.cluster.report import ClusterReport
from loadgen.experiments.cluster.summary import judge, percent
from loadgen.experiments.cluster.tables import tables
from loadgen.results.failures import Failure
from loadgen.results.files import read_result
from loadgen.results.page import write_outputs
from loadgen.results.schema import json_schema
from loadgen.results.verdicts import Outcome
from tests.loadgen.experiments.cluster.building import PLAN, good, report, summary_of, whole_run

WRONG = WrongTurn(1, 2, "token 3 of 16 is another one")


def missed(findings: Findings, plan: ClusterPlan = PLAN) -> set[str]:
    run = whole_run()
    return {
        one.what for one in judge(2, Router.OWNER, plan, summary_of(run), findings) if one.outcome is not Outcome.MET
    }


def test_a_run_in_which_all_was_right_meets_every_target() -> None:
    assert missed(good()) == set()
    assert report(good()).succeeded


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


def test_each_session_that_a_drain_moves_may_be_followed_once() -> None:
    followed = replace(good(), routing=Routing(9_997, 3, 0, 0, 0))
    assert followed.owners == {1: 3}
    assert missed(followed) == set()
    assert missed(followed, replace(PLAN, drain_at=None)) == {"turns whose owner was asked first"}


def test_a_turn_that_failed_for_good_is_a_missed_target() -> None:
    run = whole_run()
    run.turns.pop()
    outcomes = {one.what: one.outcome for one in judge(2, Router.OWNER, PLAN, summary_of(run), good())}
    assert outcomes["turns completed"] is Outcome.MISSED


def test_one_replica_is_not_blamed_for_moves_that_cannot_be() -> None:
    run = whole_run()
    verdicts = judge(1, Router.OWNER, PLAN, summary_of(run), replace(good(), moves=[]))
    assert all(one.outcome is Outcome.MET for one in verdicts)
    assert "sessions moved" not in {one.what for one in verdicts}


def test_where_a_hash_chooses_nobody_owns_a_session_and_none_is_moved() -> None:
    made = report(replace(good(), moves=[], routing=None, owners={}, cold=4), Router.HASH)
    assert made.succeeded
    asked = {one.what for one in made.sizes[0].verdicts}
    assert {"turns completed", "replicas killed that came back"} <= asked
    assert asked.isdisjoint({"sessions moved", "sessions that exactly one replica has", "finished turns lost"})
    rows = {row[0]: row[1] for table in tables(made) for row in table.rows if len(row) == 2}
    assert rows["turns at a replica without all of the history"] == "4"
    assert made.sizes[0].name == "2 replicas, hashed"


def test_what_failed_makes_the_run_fail() -> None:
    assert not report(replace(good(), failures=[Failure("the end", "NotAsMeant", "why")])).succeeded


def test_affinity_is_of_turns_that_reached_a_replica() -> None:
    assert Routing(owner=97, followed=1, moving_on=1, away=50, lost=1).affinity == pytest.approx(0.98)
    assert Routing(0, 0, 0, 5, 0).affinity is None


def test_only_what_is_whole_is_100_percent() -> None:
    assert (percent(1.0), percent(0.999999)) == ("100.00 %", "99.99 %")


def test_the_files_hold_all_and_the_page_shows_it(tmp_path: Path) -> None:
    made = report(replace(good(), lost=[WRONG]))
    data, page, *pictures = write_outputs(made, make_page(made), tmp_path)
    jsonschema.validate(json.loads(data.read_text()), json_schema(ClusterReport))
    assert read_result(data, ClusterReport).sizes[0].findings.owners == {1: 3}
    text = page.read_text()
    for words in ("By number of replicas", "What was done to replicas", "Wrong and lost turns", "2 cores"):
        assert words in text
    assert text.count("<svg") == len(pictures) == 3


def test_the_table_has_what_was_moved_and_asked_again() -> None:
    rows = {row[0]: row[1] for table in tables(report(good())) for row in table.rows if len(row) == 2}
    assert rows["affinity"] == "100.00 %"
    assert rows["moved"] == "1.00 MiB"
    assert rows["moves refused"] == "peer_away 2"
    assert rows["errors asked again after"] == "replica_away 3"
    assert rows["turns that failed before they were done"] == "2"
