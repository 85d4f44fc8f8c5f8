"""What the load generator says of a run while it goes."""

import pytest

from loadgen.experiments.density.live import LiveView
from loadgen.experiments.density.progress import Follower
from loadgen.experiments.density.wording import told
from loadgen.load.records import Failure, Run, Sample, TurnCost, TurnRecord
from loadgen.load.trace import AgentPlan, TurnPlan
from loadgen.load.turn_clock import TurnClock

THINKS = TurnPlan(10, 5, 4.0, None, False)
LAST = TurnPlan(10, 5, None, None, False)
TRACE = (AgentPlan(0.0, (THINKS, LAST)), AgentPlan(1.0, (THINKS, LAST)), AgentPlan(20.0, (LAST,)))


def turn(agent: int, number: int, sent_s: float, ttft_s: float = 0.5) -> TurnRecord:
    """A turn of 5 tokens that takes a second."""
    return TurnRecord(agent, number, sent_s, sent_s, (ttft_s,), 1.0, TurnCost(10, 5, 0, 0))


def test_figures_so_far() -> None:
    """A failed turn is its agent's last."""
    so_far = Run(
        turns=[turn(0, 0, 0.0, 9.0), turn(0, 1, 5.0, 0.2), turn(1, 1, 6.0, 0.4)],
        failures=[Failure(1, 2, 0.4, "Timeout", ""), Failure(0, None, 0.4, "Timeout", "")],
        samples=[Sample(0.0, {"device": 2, "to_host": 1, "to_device": 2}, {}, None, None, None, None, None)],
    )
    seen = Follower(TRACE).look(so_far, 10.0)
    assert (seen.completed, seen.planned, seen.failed, seen.done) == (3, 5, 1, 2)
    assert (seen.resumed_p50_s, seen.resumed_p99_s) == pytest.approx((0.3, 0.398))
    assert seen.tokens_per_s == pytest.approx(1.5)
    assert seen.sessions == {"device": 2, "host": 0, "disk": 0, "moving": 3}


def test_a_server_that_takes_a_minute_to_start_does_not_make_the_run_look_a_minute_old() -> None:
    view = LiveView(["djinn"], TRACE, repeats=1)
    watched = view.begin("djinn", 0)
    assert view.look() == ("djinn", "the server starts")
    clock = TurnClock()
    watched.changed(Run(), {clock})
    clock.tokens()
    line = told(*view.look())
    assert "0 of 5 turns, 0 failed; 1 of 3 arrived: 0 thinking, 1 generating, 0 done; " in line
    assert "; 1 tokens, " in line
    assert "0:00" in line
