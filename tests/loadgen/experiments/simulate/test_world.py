"""A simulated cluster: its engine beside queueing theory, replicas with their tiers, and what becomes of sessions."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from loadgen.experiments.simulate.costs import Costs, StepTimes
from loadgen.experiments.simulate.plan import ClusterPlan, Event, Policy
from loadgen.experiments.simulate.population import population
from loadgen.experiments.simulate.world.simulation import Simulated, simulate
from loadgen.experiments.simulate.world.tally import Tally
from loadgen.load.think import Uniform
from loadgen.load.trace import AgentPlan
from loadgen.load.workload import Signals, Workload
from tests.loadgen.experiments.simulate.building import ONE_EACH, agent, costs

SINGLE = Workload(agents=30_000, turns=1, system_tokens=0)
UTILIZATION = 0.7
TOLERANCE = 0.05


@pytest.mark.parametrize("ratios", [(1.0,), (0.25, 0.75, 1.0, 2.0)])
def test_prompts_wait_as_in_an_m_g_1_queue(ratios: tuple[float, ...]) -> None:
    """Pollaczek and Khinchine: the mean wait is rho * s / (2 * (1 - rho)), times the mean square of the lengths."""
    service_s = 0.5
    load = replace(SINGLE, seed=1, rate=UTILIZATION / service_s, context=100, completion_tokens=1)
    plan = ClusterPlan(device_tokens=10**9, step_tokens=100, shared_tokens=100, rows=100, front_s=0.0)
    drawn = replace(costs(((1, 0.0),), ((1, 0.0), (100, service_s))), prompt_ratios=((100, ratios),))
    done = simulate(plan, Policy.OWNER, drawn, population(load, 1))
    wait_s = UTILIZATION * service_s * fmean(ratio**2 for ratio in ratios) / (2 * (1 - UTILIZATION))
    assert fmean(done.tally.ttft_s) == pytest.approx(service_s + wait_s, rel=TOLERANCE)


def test_turns_that_decode_together_share_the_processor() -> None:
    """Kleinrock: where a step takes as long as its rows together, the mean time is s / (1 - rho)."""
    token_s, tokens = 0.01, 100
    service_s = token_s * tokens
    load = replace(SINGLE, seed=1, rate=UTILIZATION / service_s, context=1, completion_tokens=tokens)
    plan = ClusterPlan(device_tokens=10**9, step_tokens=1000, shared_tokens=1000, rows=1000, front_s=0.0)
    made = costs(((1, token_s), (2, 2 * token_s)), ((1, 0.0),))
    done = simulate(plan, Policy.OWNER, made, population(load, 1))
    took = [ttft + (tokens - 1) * tpot for ttft, tpot in zip(done.tally.ttft_s, done.tally.tpot_s, strict=True)]
    assert fmean(took) == pytest.approx(service_s / (1 - UTILIZATION), rel=TOLERANCE)


def run(agents: list[AgentPlan], signals: Signals = Signals.ETA, made: Costs | None = None, **sizes: Any) -> Tally:
    return simulate(ClusterPlan(front_s=0.0, **sizes), Policy.OWNER, made or costs(), agents, signals).tally


def test_a_turn_alone_takes_its_steps() -> None:
    """600 tokens are steps of 512 and of 88; then nine tokens follow the first."""
    made = costs(first_byte_s=0.1)
    steps = StepTimes(made, 8, 512)
    tally = run([agent(0.0, new=600)], made=made)
    assert tally.ttft_s[0] == pytest.approx(0.1 + steps.mixed(0, 512, luck=0.0) + steps.mixed(0, 88, luck=0.0))
    assert tally.tpot_s[0] == pytest.approx(0.02)


def test_a_short_prompt_passes_a_long_one() -> None:
    tally = run([agent(0.0, new=5000), agent(0.1, new=50)])
    assert tally.number[0] == 0
    assert tally.sent_s[0] == pytest.approx(0.1)
    assert tally.ttft_s[0] < 1.0 < 4.0 < tally.ttft_s[1]


def test_kv_that_is_announced_is_back_when_its_turn_comes() -> None:
    """A GB of KV moves in ten seconds: who says nothing of the return waits for them."""
    slow = Costs(((1, 0.02),), ONE_EACH, ((1, 0.02), (512, 0.02)), 0.0, 0.0, 10**7, 1e8, 1e8)
    told, late = (
        run([agent(0.0, [60.0])], signals, slow, device_tokens=2000).ttft_s[1]
        for signals in (Signals.ETA, Signals.READY)
    )
    assert told == pytest.approx(0.02, abs=0.02)
    assert late > 5.0


def test_a_full_device_has_turns_wait_and_loses_none() -> None:
    tally = run([agent(0.1 * n, [5.0, 5.0]) for n in range(20)], device_tokens=400)
    assert tally.turns == 60
    assert tally.recomputed_tokens == 0


def test_kv_without_room_in_any_tier_is_computed_again() -> None:
    tally = run([agent(0.1 * n, [30.0]) for n in range(8)], device_tokens=400, host_tokens=200, disk_tokens=0)
    assert tally.traffic.dropped > 0 < tally.recomputed_tokens


LOAD = Workload(
    agents=60, rate=0.5, context=200, turns=4, think=Uniform(2.0, 20.0), completion_tokens=20, eta_noise=0.5, seed=3
)
EVENTS = ("zone@30", "replica@10", "rolling@20", "rolling:2@20", "restarts@20", "add:3@30", "balance@40")
SMALL = {"device_tokens": 1200, "host_tokens": 1500, "disk_tokens": 3000}


def cluster(policy: Policy, *events: str, load: Workload = LOAD, replicas: int = 6, **sizes: Any) -> Simulated:
    plan = ClusterPlan(replicas=replicas, events=tuple(map(Event.parse, events)), down_s=5.0, **sizes)
    return simulate(plan, policy, costs(), population(load, replicas), load.signals, load.system_tokens)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("events", [EVENTS, *(pytest.param((event,), marks=pytest.mark.long) for event in EVENTS)])
@pytest.mark.parametrize("sizes", [{}, SMALL])
def test_every_turn_ends_once_whatever_happens(policy: Policy, events: tuple[str, ...], sizes: dict[str, Any]) -> None:
    tally = cluster(policy, *events, **sizes).tally
    assert (tally.sessions, tally.turns) == (60 * 6, 4 * 60 * 6)
    assert sorted(tally.number) == sorted([0, 1, 2, 3] * 60 * 6)
    assert min(tally.ttft_s) > 0
    assert tally.generated_tokens == 20 * tally.turns


@pytest.mark.parametrize(("host_tokens", "again"), [(0, 0), (10_000, 3 * 109)])
def test_a_lost_zone_costs_the_histories_that_were_not_on_disk(host_tokens: int, again: int) -> None:
    """Nine agents on three replicas think while one of these dies. All KV is on disk, or all of it in memory."""
    plan = ClusterPlan(replicas=3, host_tokens=host_tokens, down_s=5.0, events=(Event.parse("zone:3@50"),))
    tally = simulate(plan, Policy.OWNER, costs(), [agent(0.01 * n, [100.0]) for n in range(9)]).tally
    assert (tally.turns, tally.recomputed_tokens, tally.refused) == (18, again, 0)


def test_a_rolling_update_moves_sessions_instead_of_computing_them_again() -> None:
    moved, waited, hashed = (
        cluster(policy, event).tally
        for policy, event in (
            (Policy.OWNER, "rolling@20"),
            (Policy.OWNER, "restarts@20"),
            (Policy.HASH, "rolling@20"),
        )
    )
    assert moved.moves > 0 == moved.recomputed_tokens == moved.refused
    assert sum(moved.puts.values()) == moved.moves
    assert waited.refused > 0 == waited.moves == waited.recomputed_tokens
    assert hashed.recomputed_tokens > 0 == hashed.refused == hashed.moves


def test_new_replicas_cost_histories_where_a_hash_decides_and_none_where_sessions_have_owners() -> None:
    owner, hashed = (cluster(policy, "add:6@40").tally for policy in (Policy.OWNER, Policy.HASH))
    assert owner.recomputed_tokens == 0 < hashed.recomputed_tokens
