"""Probes that never were, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.experiments.capacity.limits import misses
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.experiments.capacity.report import Probe
from loadgen.load.records import Failure, Run, TurnCost, TurnRecord
from loadgen.load.workload import Workload
from loadgen.stats import summarize

LOAD = Workload(turns=3, completion_tokens=11)
PLAN = CapacityPlan(LOAD, least=2, most=8, rounds=3)


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


def probe(agents: int, ttft_s: float, tpot_s: float = 0.05, failures: Sequence[Failure] = (), number: int = 0) -> Probe:
    """A probe of a whole run."""
    run = run_of(agents, ttft_s, tpot_s, failures)
    summary = summarize([run], 3 * agents, PLAN.measurement)
    missed = misses(summary, PLAN)
    return Probe(agents, number, summary.succeeded and not missed, False, missed, "0" * 64, "1" * 64, run, summary)
