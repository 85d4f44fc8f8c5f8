"""What is said of a run while it goes."""

from __future__ import annotations

import pytest

from loadgen.experiments.density.live import LiveView
from loadgen.experiments.density.progress import Follower
from loadgen.experiments.density.wording import told
from loadgen.load.records import Failure, Run, Sample, TurnCost, TurnRecord
from loadgen.load.trace import AgentPlan, TurnPlan
from loadgen.load.turn_clock import TurnClock
from tests.loadgen.recording import sample

THINKS = TurnPlan(10, 5, 4.0, None, False)
LAST = TurnPlan(10, 5, None, None, False)
TRACE = (AgentPlan(0.0, (THINKS, LAST)), AgentPlan(1.0, (THINKS, LAST)), AgentPlan(20.0, (LAST,)))


def turn(agent: int, number: int, sent_s: float, ttft_s: float = 0.5) -> TurnRecord:
    """A turn of 5 tokens that takes a second."""
    return TurnRecord(agent, number, sent_s, sent_s, (ttft_s,), 1.0, TurnCost(10, 5, 0, 0))


def on(**sessions: int) -> list[Sample]:
    return [sample(sessions=sessions)]


def test_agents_arrive_generate_think_and_are_done() -> None:
    run, follower = Run(), Follower(TRACE)
    states = []
    assert follower.look(run, 0.5).left_s is None
    for now_s, new in (
        (0.5, ()),
        (1.5, (turn(0, 0, 0.0),)),
        (3.0, (turn(1, 0, 1.0),)),
        (5.5, ()),
        (21.0, (turn(0, 1, 5.0),)),
    ):
        run.turns += new
        seen = follower.look(run, now_s)
        states.append((seen.thinking, seen.generating, seen.done))
    assert states == [(0, 1, 0), (1, 1, 0), (2, 0, 0), (1, 1, 0), (0, 2, 1)]
    assert seen == Follower(TRACE).look(run, 21.0), "what is read piece by piece is read once"
    assert Follower(TRACE).look(run, 6.5).left_s == pytest.approx(20 + 1 - 6.5), "the last agent's"


def test_figures_so_far() -> None:
    """A failed turn is its agent's last."""
    run = Run(
        turns=[turn(0, 0, 0.0, 9.0), turn(0, 1, 5.0, 0.2), turn(1, 1, 6.0, 0.4)],
        failures=[Failure(1, 2, 0.4, "Timeout", ""), Failure(0, None, 0.4, "Timeout", "")],
        samples=on(device=2, to_host=1, to_device=2),
    )
    seen = Follower(TRACE).look(run, 10.0)
    assert (seen.completed, seen.planned, seen.failed, seen.done) == (3, 5, 1, 2)
    assert (seen.resumed_p50_s, seen.resumed_p99_s) == pytest.approx((0.3, 0.398))
    assert seen.tokens_per_s == pytest.approx(1.5)
    assert seen.sessions == {"device": 2, "host": 0, "disk": 0, "moving": 3}


def test_before_the_first_turn_is_over_it_says_what_happens() -> None:
    """A server that takes a minute to start does not make the run look a minute old: its clock is not there yet."""
    view = LiveView(["djinn"], TRACE, repeats=1)
    watched = view.begin("djinn", 0)
    assert view.look() == ("djinn", "the server starts")
    watched.says = "the server warms up"
    assert told(*view.look()) == "djinn: the server warms up"
    clock = TurnClock()
    watched.changed(Run(), {clock})
    clock.tokens()
    clock.tokens()
    line = told(*view.look())
    assert "0 of 5 turns, 0 failed; 1 of 3 arrived: 0 thinking, 1 generating, 0 done; " in line
    assert "2 tokens, " in line
    assert "0:00" in line
