"""The engine beside what queueing theory says of it."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from loadgen.experiments.simulate.costs import Points
from loadgen.experiments.simulate.plan import ClusterPlan, Policy
from loadgen.experiments.simulate.population import population
from loadgen.experiments.simulate.world.simulation import Simulated, simulate
from loadgen.load.workload import Workload

from ..building import costs

SINGLE = Workload(agents=30_000, turns=1, system_tokens=0)
UTILIZATION = 0.7
TOLERANCE = 0.05


def run(plan: ClusterPlan, load: Workload, decode_s: Points, prompt_s: Points) -> Simulated:
    return simulate(plan, Policy.OWNER, costs(decode_s, prompt_s), population(load, 1))


@pytest.mark.parametrize("seed", [1, 2])
def test_prompts_of_equal_length_wait_as_in_an_m_d_1_queue(seed: int) -> None:
    """Pollaczek and Khinchine: the mean wait is rho * s / (2 * (1 - rho))."""
    service_s = 0.5
    load = replace(SINGLE, seed=seed, rate=UTILIZATION / service_s, context=100, completion_tokens=1)
    plan = ClusterPlan(device_tokens=10**9, step_tokens=100, shared_tokens=100, rows=100, front_s=0.0)

    done = run(plan, load, decode_s=((1, 0.0),), prompt_s=((1, 0.0), (100, service_s)))

    expected_s = service_s + UTILIZATION * service_s / (2 * (1 - UTILIZATION))
    assert fmean(done.tally.ttft_s) == pytest.approx(expected_s, rel=TOLERANCE)


@pytest.mark.parametrize("seed", [1, 2])
def test_prompts_of_measured_lengths_wait_as_in_an_m_g_1_queue(seed: int) -> None:
    """Pollaczek and Khinchine: the mean wait is that of equal lengths, times 1 + the squared variation of them."""
    service_s, ratios = 0.5, (0.25, 0.75, 1.0, 2.0)
    load = replace(SINGLE, seed=seed, rate=UTILIZATION / service_s, context=100, completion_tokens=1)
    plan = ClusterPlan(device_tokens=10**9, step_tokens=100, shared_tokens=100, rows=100, front_s=0.0)
    drawn = replace(costs(((1, 0.0),), ((1, 0.0), (100, service_s))), prompt_ratios=((100, ratios),))

    done = simulate(plan, Policy.OWNER, drawn, population(load, 1))

    wait_s = UTILIZATION * service_s * fmean(ratio**2 for ratio in ratios) / (2 * (1 - UTILIZATION))
    assert fmean(done.tally.ttft_s) == pytest.approx(service_s + wait_s, rel=TOLERANCE)


@pytest.mark.parametrize("seed", [1, 2])
def test_turns_that_decode_together_share_the_processor(seed: int) -> None:
    """Kleinrock: where a step takes as long as its rows together, the mean time is s / (1 - rho)."""
    token_s, tokens = 0.01, 100
    service_s = token_s * tokens
    load = replace(SINGLE, seed=seed, rate=UTILIZATION / service_s, context=1, completion_tokens=tokens)
    plan = ClusterPlan(device_tokens=10**9, step_tokens=1000, shared_tokens=1000, rows=1000, front_s=0.0)

    done = run(plan, load, decode_s=((1, token_s), (2, 2 * token_s)), prompt_s=((1, 0.0),))

    took = [ttft + (tokens - 1) * tpot for ttft, tpot in zip(done.tally.ttft_s, done.tally.tpot_s, strict=True)]
    assert fmean(took) == pytest.approx(service_s / (1 - UTILIZATION), rel=TOLERANCE)
