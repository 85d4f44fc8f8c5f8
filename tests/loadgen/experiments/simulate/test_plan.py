"""What can be asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.simulate.costs import StepTimes
from loadgen.experiments.simulate.plan import ClusterPlan, Event
from loadgen.experiments.simulate.population import population
from loadgen.load.workload import Workload, plan_trace
from tests.loadgen.experiments.simulate.building import costs


@pytest.mark.parametrize("text", ["zone:3@60", "replica@1.5", "rolling:2@0", "add:10@7", "balance@3"])
def test_an_event_reads_as_it_is_shown(text: str) -> None:
    assert str(Event.parse(text)) == text


def test_one_replica_has_the_agents_of_density() -> None:
    load = Workload(agents=20, seed=5)
    assert tuple(population(load, 1)) == plan_trace(load)


def test_a_step_has_its_place_among_the_measured_ones_of_its_kind() -> None:
    prompts = ((1, (0.9, 1.0, 1.1, 3.0)), (100, (1.0, 1.2)))
    drawn = replace(costs(((1, 0.02),), ((1, 0.1),)), decode_ratios=(0.5, 2.0), prompt_ratios=prompts)
    steps = StepTimes(drawn, 1, 100)
    assert [steps.mixed(1, 0, luck) for luck in (0.0, 0.49, 0.5, 0.99)] == pytest.approx([0.01, 0.01, 0.04, 0.04])
    assert [steps.mixed(0, 1, luck) for luck in (0.0, 0.25, 0.74, 0.75)] == pytest.approx([0.09, 0.1, 0.11, 0.3])
    assert [steps.mixed(0, tokens, 0.9) / steps.mixed(0, tokens, 0.3) for tokens in (50, 51)] == pytest.approx([3, 1.2])
    assert steps.mixed(1, 1, 0.75) == pytest.approx(0.04 + 0.3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decode_s": ()}, "decode_s needs points"),
        ({"decoded": ((1, (0.5,)),)}, "at least one token of a step"),
        ({"decode_ratios": ()}, "decode_ratios needs numbers from 0 on"),
        ({"prompt_ratios": ((1, (1.0,)), (2, (-0.1, 1.0)))}, "prompt_ratios needs numbers from 0 on"),
    ],
)
def test_costs_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadgenError, match=message):
        replace(costs(), **given)
    with pytest.raises(LoadgenError, match="replicas must be at least 1"):
        ClusterPlan(replicas=0)
