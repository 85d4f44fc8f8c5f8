"""What becomes of sessions and turns while replicas die, end, come, and hand sessions on."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.experiments.simulate.plan import ClusterPlan, Event, Policy
from loadgen.experiments.simulate.population import population
from loadgen.experiments.simulate.world.simulation import Simulated, simulate
from loadgen.load.think import Uniform
from loadgen.load.workload import Signals, Workload

from ..building import agent, costs

LOAD = Workload(
    agents=60, rate=0.5, context=200, turns=4, think=Uniform(2.0, 20.0), completion_tokens=20, eta_noise=0.5, seed=3
)
EVENTS = ("zone@30", "replica@10", "rolling@20", "rolling:2@20", "restarts@20", "add:3@30", "balance@40")
SMALL = {"device_tokens": 1200, "host_tokens": 1500, "disk_tokens": 3000}


def run(policy: Policy, *events: str, load: Workload = LOAD, replicas: int = 6, **sizes: Any) -> Simulated:
    plan = ClusterPlan(replicas=replicas, events=tuple(map(Event.parse, events)), down_s=5.0, **sizes)
    return simulate(plan, policy, costs(), population(load, replicas), load.signals, load.system_tokens)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("events", [*((event,) for event in EVENTS), EVENTS, ()])
@pytest.mark.parametrize("sizes", [{}, SMALL])
def test_every_turn_ends_once_whatever_happens(policy: Policy, events: tuple[str, ...], sizes: dict[str, Any]) -> None:
    tally = run(policy, *events, **sizes).tally

    assert (tally.sessions, tally.turns) == (60 * 6, 4 * 60 * 6)
    assert sorted(tally.number) == sorted([0, 1, 2, 3] * 60 * 6)
    assert min(tally.ttft_s) > 0
    assert tally.generated_tokens == 20 * tally.turns


@pytest.mark.parametrize("signals", Signals)
def test_every_turn_ends_under_each_kind_of_signals(signals: Signals) -> None:
    load = Workload(agents=40, rate=1.0, context=200, turns=3, think=Uniform(1.0, 9.0), seed=1, signals=signals)

    assert run(Policy.OWNER, load=load, replicas=1, **SMALL).tally.turns == 120


def test_equal_runs_are_equal() -> None:
    first, second = (run(Policy.OWNER, *EVENTS).tally for _ in range(2))

    assert (first.ttft_s, first.recomputed_tokens) == (second.ttft_s, second.recomputed_tokens)


@pytest.mark.parametrize(("host_tokens", "again"), [(0, 0), (10_000, 3 * 109)])
def test_a_lost_zone_costs_the_histories_that_were_not_on_disk(host_tokens: int, again: int) -> None:
    """Nine agents on three replicas think while one of these dies. All KV is on disk, or all of it in memory."""
    plan = ClusterPlan(replicas=3, host_tokens=host_tokens, down_s=5.0, events=(Event.parse("zone:3@50"),))

    tally = simulate(plan, Policy.OWNER, costs(), [agent(0.01 * n, [100.0]) for n in range(9)]).tally

    assert (tally.turns, tally.recomputed_tokens, tally.refused) == (18, again, 0)


def test_turns_wait_for_the_replica_that_has_their_session() -> None:
    plan = ClusterPlan(replicas=2, down_s=30.0, retry_s=1.0, events=(Event.parse("zone:2@50"),))

    tally = simulate(plan, Policy.OWNER, costs(), [agent(0.0, [60.0]), agent(0.1, [60.0])]).tally

    waited = sorted(ttft for ttft, number in zip(tally.ttft_s, tally.number, strict=True) if number)
    assert tally.refused == 1
    assert waited[0] < 1.0 < 15.0 < waited[1] < 30.0


def test_a_rolling_update_moves_sessions_instead_of_computing_them_again() -> None:
    moved, waited, hashed = (
        run(policy, event).tally
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
    owner, hashed = (run(policy, "add:6@40").tally for policy in (Policy.OWNER, Policy.HASH))

    assert owner.recomputed_tokens == 0 < hashed.recomputed_tokens


def test_without_affinity_nearly_every_history_is_computed_again() -> None:
    tally = run(Policy.SHORTEST).tally
    histories = sum(200 + 20 + turn * (64 + 20) - 128 for turn in range(3)) * tally.sessions

    assert 0.5 * histories < tally.recomputed_tokens <= histories


def test_the_directory_is_asked_only_while_the_home_of_a_moved_session_is_away() -> None:
    quiet, busy = run(Policy.OWNER).tally, run(Policy.OWNER, "rolling@20").tally

    assert (sum(quiet.finds.values()), sum(quiet.puts.values())) == (0, 0)
    assert sum(busy.finds.values()) == 0  # the front door remembers so few by itself
    assert sum(quiet.named_puts.values()) == quiet.sessions
