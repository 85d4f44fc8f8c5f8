"""The search for a border: its plan, its probes, the limits that they miss, and when one ends early."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiments.capacity.limits import TPOT, TTFT, Hopes, fatal
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.experiments.capacity.search import Search
from loadgen.experiments.capacity.wording import why
from loadgen.load.records import Failure, Run
from loadgen.load.think import Uniform
from loadgen.load.workload import Workload, plan_trace
from loadgen.stats import Distribution
from tests.loadgen.experiments.capacity.building import PLAN, probe, turn

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


RANGES = st.tuples(st.integers(1, 50), st.integers(0, 500)).map(lambda pair: (pair[0], sum(pair)))


def finish(search: Search, holds: Callable[[int], bool]) -> list[int]:
    """Search to the end; returns the numbers that were probed."""
    probed: list[int] = []
    while (agents := search.next()) is not None:
        assert search.least <= agents <= search.most
        assert len(probed) < search.rounds * (search.most - search.least + 1)
        probed.append(agents)
        search.add(agents, holds(agents))
    return probed


@given(RANGES, st.integers(0, 600), st.integers(1, 5))
def test_a_border_is_found_exactly_and_with_few_probes(bounds: tuple[int, int], border: int, rounds: int) -> None:
    least, most = bounds
    search = Search(least, most, rounds)
    probed = finish(search, lambda agents: agents <= border)
    assert search.held == (None if border < least else min(border, most))
    assert search.failed == (None if border >= most else max(border + 1, least))
    doublings, halvings = math.ceil(math.log2(most / least)) + 1, math.ceil(math.log2(most))
    assert len(set(probed)) <= doublings + halvings
    assert {agents for agents, times in Counter(probed).items() if times > 1} <= {search.held, search.failed}


@given(RANGES, st.integers(1, 5), st.integers(0, 2**32))
def test_noise_does_not_keep_it_from_ending(bounds: tuple[int, int], rounds: int, seed: int) -> None:
    noise = random.Random(seed)
    search = Search(*bounds, rounds)

    votes: dict[int, list[bool]] = {}

    def flip(agents: int) -> bool:
        votes.setdefault(agents, []).append(noise.random() < 0.5)
        return votes[agents][-1]

    finish(search, flip)

    if search.held is not None:
        assert 2 * sum(votes[search.held]) > rounds
    if search.failed is not None:
        assert 2 * sum(votes[search.failed]) <= rounds
    if search.held is not None and search.failed is not None:
        assert search.failed == search.held + 1
    assert search.held is not None or search.failed == search.least
    assert search.failed is not None or search.held == search.most


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 300))
def test_so_many_over_a_limit_put_p95_over_it_now_and_in_the_end(samples: int, over: int, seen: int) -> None:
    over, seen = min(over, samples), min(seen, samples)
    final, so_far = ([0.0] * (count - over) + [1.0] * over for count in (samples, max(seen, over)))
    if over >= fatal(samples):
        assert all(found is not None and found.p95 > 0.5 for found in map(Distribution.of, (final, so_far)))
    else:
        found = Distribution.of([0.0] * (samples - over) + [0.5 + 1e-9] * over)
        assert found is not None
        assert found.p95 <= 0.5 + 1e-9


def test_hopes_are_gone_with_the_turn_that_decides() -> None:
    trace = plan_trace(PLAN.load_of(50))
    hopes, run = Hopes(PLAN, trace), Run()
    slow = fatal(100)
    seen = []
    for agent in range(int(slow) + 1):
        run.turns.append(turn(agent, 1, ttft_s=2.0))
        seen.append(hopes.are_gone(run))
    assert seen == [False] * 5 + [True] * 2


def test_hopes_are_gone_with_slow_tokens_and_with_any_failure() -> None:
    trace = plan_trace(PLAN.load_of(1))
    assert Hopes(PLAN, trace).are_gone(Run(turns=[turn(0, 0, tpot_s=0.3)] * 2))
    assert Hopes(PLAN, trace).are_gone(Run(failures=[Failure(0, None, 1.0, "Timeout", "no answer")]))


def test_a_limit_that_is_missed_is_named_with_its_factor() -> None:
    slow = probe(8, 2.5, 0.5)
    assert [(miss.what, miss.p95_s) for miss in slow.misses] == [(TTFT, 2.5), (TPOT, pytest.approx(0.5))]
    assert why(slow).startswith("first token of a resumed turn: p95 2.50 s, 2.5 times the limit; time per token: p95")
    assert not slow.held
