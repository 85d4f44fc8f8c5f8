"""What a probe of so many agents runs, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.load.think import Uniform
from loadgen.load.workload import Workload, plan_trace

LOAD = Workload(turns=4, think=Uniform(10.0, 20.0), context=256)


@pytest.mark.parametrize("agents", [8, 64, 256])
def test_all_agents_are_there_together(agents: int) -> None:
    trace = plan_trace(CapacityPlan(LOAD).load_of(agents))
    ends = [agent.arrival_s + sum(turn.think_s or 0.0 for turn in agent.turns) for agent in trace]
    assert len(trace) == agents
    assert max(agent.arrival_s for agent in trace) < min(ends)


def test_more_agents_arrive_in_the_same_time_and_do_the_same() -> None:
    plan = CapacityPlan(LOAD)
    few, many = plan.load_of(8), plan.load_of(32)
    assert many.rate == pytest.approx(4 * few.rate)
    assert [agent.turns for agent in plan_trace(few)] == [agent.turns for agent in plan_trace(many)[:8]]


def test_agents_that_do_not_think_all_arrive_at_once() -> None:
    assert CapacityPlan(Workload(think=Uniform(0.0, 0.0))).load_of(3).rate == math.inf


def test_every_probe_has_texts_of_its_own() -> None:
    plan = CapacityPlan(LOAD, least=1, most=20, rounds=3)
    numbers = [plan.texts_of(agents, turn) for agents in range(1, 21) for turn in range(3)]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"least": 0}, "--least must be at least 1, not 0"),
        ({"least": 9, "most": 8}, "--most must be at least --least, which is 9, not 8"),
        ({"rounds": 0}, "--rounds must be at least 1, not 0"),
        ({"slo_ttft_s": 0.0}, "--slo-ttft must be above 0 and finite, in seconds, not 0"),
        ({"slo_tpot_s": math.nan}, "--slo-tpot must be above 0 and finite, in seconds, not nan"),
        ({"turn_timeout_s": math.inf}, "--turn-timeout must be above 0 and finite, in seconds, not inf"),
        ({"load": Workload(turns=1)}, "--turns must be at least 2, for a turn to be resumed, not 1"),
    ],
)
def test_what_is_out_of_range_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadgenError) as refused:
        CapacityPlan(**{"load": LOAD, **changed})
    assert str(refused.value) == message
