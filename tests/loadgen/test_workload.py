"""A workload is checked, and decides every time ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import LoadgenError
from loadgen.workload import Workload, plan_agents

workloads = st.builds(
    Workload,
    agents=st.integers(1, 30),
    rate=st.floats(0.01, 1000),
    turns=st.integers(1, 6),
    think=st.tuples(st.floats(0, 10), st.floats(10, 20)),
    seed=st.integers(0, 2**40),
    time_scale=st.floats(0.01, 10),
)


@given(workloads)
def test_equal_workloads_have_equal_plans(workload: Workload) -> None:
    assert plan_agents(workload) == plan_agents(replace(workload))


@given(workloads)
def test_think_times_are_within_bounds(workload: Workload) -> None:
    low, high = (workload.time_scale * bound for bound in workload.think)
    for plan in plan_agents(workload):
        assert len(plan.thinks_s) == workload.turns - 1
        assert all(low <= think <= high * (1 + 1e-9) for think in plan.thinks_s)


@given(workloads)
def test_time_scale_is_a_factor_on_every_time(workload: Workload) -> None:
    scaled, plain = plan_agents(workload), plan_agents(replace(workload, time_scale=1.0))
    for fast, slow in zip(scaled, plain, strict=True):
        assert fast.arrival_s == pytest.approx(slow.arrival_s * workload.time_scale)
        assert fast.thinks_s == pytest.approx([think * workload.time_scale for think in slow.thinks_s])


def test_more_turns_leave_the_arrivals_alone() -> None:
    few, many = plan_agents(Workload(turns=1)), plan_agents(Workload(turns=9))
    assert [plan.arrival_s for plan in few] == [plan.arrival_s for plan in many]


def test_seeds_differ() -> None:
    assert plan_agents(Workload(seed=1)) != plan_agents(Workload(seed=2))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"agents": 0}, "agents"),
        ({"turns": 0}, "turns"),
        ({"context": 0}, "context"),
        ({"resume_tokens": 0}, "resume_tokens"),
        ({"completion_tokens": -1}, "completion_tokens"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"time_scale": float("inf")}, "time_scale"),
        ({"think": (2.0, 1.0)}, "think"),
        ({"think": (-1.0, 1.0)}, "think"),
        ({"think": (0.0, float("inf"))}, "think"),
        ({"seed": -1}, "seed"),
        ({"context": 100, "system_tokens": 100}, "system_tokens"),
        ({"system_tokens": -1}, "system_tokens"),
    ],
)
def test_a_value_out_of_range_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadgenError, match=named):
        Workload(**wrong)


def test_a_default_that_does_not_fit_is_told() -> None:
    with pytest.raises(LoadgenError, match="system_tokens is 128, but must be from 0 to context - 1, 63"):
        Workload(context=64)
