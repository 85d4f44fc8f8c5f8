"""`loadgen capacity`: the search for a border, and a server that holds a known number of agents."""

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli import main
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.experiments.capacity.probing import Probe, hosting, misses
from loadgen.experiments.capacity.search import Search
from loadgen.load.records import Failure, Run, TurnCost, TurnRecord
from loadgen.load.think import Uniform
from loadgen.load.workload import Workload, plan_trace
from loadgen.stats import summarize
from loadgen.targets import TargetSpec
from tests.loadgen.experiments.conftest import interrupt, result, sessions_on, value
from tests.serving import serve

PLAN = CapacityPlan(load=Workload(turns=3, completion_tokens=11), least=2, most=8, rounds=3)


def turn(agent: int, number: int, ttft_s: float = 0.1, tpot_s: float = 0.05) -> TurnRecord:
    """A turn of 11 tokens."""
    end_s = ttft_s + 10 * tpot_s
    return TurnRecord(agent, number, 0.0, 0.0, (ttft_s, end_s), end_s, TurnCost(10, 11, 0, 0))


def run_of(agents: int, ttft_s: float, tpot_s: float = 0.05, failures: Sequence[Failure] = ()) -> Run:
    """Three turns of each agent, but for those that failed; the first tokens of resumed ones come after `ttft_s`."""
    lost = {(failure.agent, failure.turn) for failure in failures}
    places = [(agent, number) for agent in range(agents) for number in range(3)]
    turns = [turn(*place, ttft_s if place[1] else 5.0, tpot_s) for place in places if place not in lost]
    return Run(duration_s=10.0, turns=turns, failures=list(failures))


def probe(agents: int, ttft_s: float, tpot_s: float = 0.05, failures: Sequence[Failure] = ()) -> Probe:
    """A probe of a whole run."""
    run = run_of(agents, ttft_s, tpot_s, failures)
    summary = summarize([run], 3 * agents, PLAN.measurement)
    missed = misses(summary, PLAN)
    return Probe(agents, summary.succeeded and not missed, False, missed, run, summary)


THINKING = Workload(turns=4, think=Uniform(10.0, 20.0), context=256)


def test_all_agents_are_there_together_and_more_do_the_same_in_the_same_time() -> None:
    few, many = (CapacityPlan(load=THINKING).load_of(agents) for agents in (8, 256))
    for load in (few, many):
        trace = plan_trace(load)
        ends = [agent.arrival_s + sum(turn.think_s or 0.0 for turn in agent.turns) for agent in trace]
        assert max(agent.arrival_s for agent in trace) < min(ends)
    assert many.rate == pytest.approx(32 * few.rate)
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


@dataclass
class Counting:
    """A server that is started for its run, and counts how often."""

    spec: TargetSpec
    name: str = "managed"
    running: None = None
    starts: int = 0
    stops: int = 0

    @asynccontextmanager
    async def reach(self) -> AsyncIterator[TargetSpec]:
        self.starts += 1
        yield self.spec
        self.stops += 1


@pytest.mark.parametrize(("tools", "starts"), [(False, [1, 1, 2]), (True, [1, 2, 3])])
async def test_a_server_is_kept_unless_sessions_may_be_left_on_it(tools: bool, starts: list[int]) -> None:
    target = Counting(TargetSpec("managed", "http://nowhere", "stub", tools=tools))
    refused = probe(4, 0.1, failures=[Failure(0, 1, 1.0, "RateLimited", "full")])
    seen = []
    async with hosting(target) as host:
        for last in (None, probe(4, 9.0), refused):
            assert await host.reach(last) == target.spec
            seen.append(target.starts)
            assert target.stops == target.starts - 1
    assert seen == starts


TURNS = 3
LOAD = f"""
    --turns {TURNS} --context 60 --resume-tokens 20 --completion-tokens 2 --system-tokens 8 --think 0:0 --most 4
    --slo-ttft 60 --slo-tpot 60
""".split()


def capacity(output: Path, *arguments: str) -> int:
    return main(["capacity", *LOAD, "--output", str(output), *arguments])


PROBES = "Probes"


def test_the_number_that_a_server_holds_is_found(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One server opens two sessions at most: three agents are refused."""
    with serve(max_sessions=2) as small:
        assert capacity(tmp_path, "--target", f"two={small}", "--target", f"many={url}") == 0
        assert sessions_on(small) == sessions_on(url) == []
    found = result(tmp_path, f"1 to 4 agents, {TURNS} turns each", "RateLimited")
    assert [value(found, "agents held", target=name) for name in ("two", "many")] == [2, 4]
    assert [row["agents"] for row in found.rows(PROBES) if row["target"] == "two"] == [1, 2, 4, 3]
    shown = capsys.readouterr().err
    assert "two, probe 4, 3 agents (2 held, 4 failed)" in shown
    assert "two: 3 agents failed: " in shown


@pytest.mark.long
def test_an_interrupted_search_leaves_its_probes(url: str, tmp_path: Path) -> None:
    """Ctrl-C comes while two agents think: in the second probe."""
    thinking = ["--turns", "2", "--think", "1:1", "--output", str(tmp_path)]
    command = ["capacity", "--target", f"one={url}", *LOAD, *thinking]
    interrupt(command, lambda: [each.info.phase for each in sessions_on(url)] == 2 * ["io_wait"])
    found = result(tmp_path)
    assert found.interrupted
    assert [row["agents"] for row in found.rows(PROBES)] == [1]
