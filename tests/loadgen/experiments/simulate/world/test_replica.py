"""One replica: steps, tiers, and KV that is back in time."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.simulate.costs import Costs, StepTimes
from loadgen.experiments.simulate.plan import ClusterPlan, Policy
from loadgen.experiments.simulate.world.simulation import simulate
from loadgen.experiments.simulate.world.tally import Tally
from loadgen.load.trace import AgentPlan
from loadgen.load.workload import Signals

from ..building import ONE_EACH, agent, costs


def run(agents: list[AgentPlan], signals: Signals = Signals.ETA, made: Costs | None = None, **sizes: Any) -> Tally:
    return simulate(ClusterPlan(front_s=0.0, **sizes), Policy.OWNER, made or costs(), agents, signals).tally


def test_a_turn_alone_takes_its_steps() -> None:
    """600 tokens are steps of 512 and of 88; then nine tokens follow the first."""
    made = costs(first_byte_s=0.1)
    steps = StepTimes(made, 8, 512)

    tally = run([agent(0.0, new=600)], made=made)

    assert tally.ttft_s[0] == pytest.approx(0.1 + steps.mixed(0, 512, luck=0.0) + steps.mixed(0, 88, luck=0.0))
    assert tally.tpot_s[0] == pytest.approx(0.02)


def test_drafts_shorten_the_turns_that_have_them() -> None:
    """Of ten tokens after the first, half of the turns have two and a half a step, so that four steps are enough."""
    drafted = costs(decoded=((1, (1.0, 2.5)),))

    tally = run([agent(10.0 * n, completion=11) for n in range(8)], made=drafted)

    assert sorted(tally.tpot_s) == pytest.approx([4 * 0.02 / 10] * 4 + [0.02] * 4)


def test_a_prompt_beside_turns_that_decode_takes_its_time_and_theirs() -> None:
    made = costs()
    steps = StepTimes(made, 8, 512)

    tally = run([agent(0.0, completion=100), agent(1.0)], made=made)

    step_s, alone_s = steps.mixed(1, 0, luck=0.0), steps.mixed(0, 100, luck=0.0)
    assert step_s == pytest.approx(0.02)
    waited_s = tally.ttft_s[0] - alone_s - step_s
    assert 0 <= waited_s <= step_s


def test_prompts_slow_those_down_that_decode() -> None:
    alone = run([agent(0.0, completion=100)])
    both = run([agent(0.0, completion=100), agent(1.0, new=1000)])

    assert min(both.tpot_s) > 1.1 * alone.tpot_s[0]


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


def test_a_session_that_no_device_holds_is_refused() -> None:
    with pytest.raises(LoadgenError, match="agent 0 has 110 tokens at its end, more than a device holds"):
        run([agent(0.0)], device_tokens=100)
