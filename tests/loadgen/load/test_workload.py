"""A workload is checked, and decides every time and every length ahead."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import LoadgenError
from loadgen.load.arrivals import Arrivals
from loadgen.load.think import LogNormal, Uniform
from loadgen.load.trace import AgentPlan, Trace, TurnPlan, scaled, write_trace
from loadgen.load.workload import Replay, Workload, plan_trace

workloads = st.builds(
    Workload,
    agents=st.integers(1, 30),
    rate=st.floats(0.01, 1000),
    turns=st.integers(1, 6),
    think=st.builds(Uniform, st.floats(0, 10), st.floats(10, 20)),
    eta_noise=st.just(0.0) | st.floats(0, 2),
    tool_share=st.floats(0, 1),
    seed=st.integers(0, 2**40),
    time_scale=st.floats(0.01, 10),
)


def arrivals(trace: Trace) -> list[float]:
    return [agent.arrival_s for agent in trace]


def earlier_turns(trace: Trace) -> list[TurnPlan]:
    """Those that another turn follows."""
    return [turn for agent in trace for turn in agent.turns[:-1]]


@given(workloads)
def test_equal_workloads_have_equal_traces(workload: Workload) -> None:
    assert plan_trace(workload) == plan_trace(replace(workload))


@given(workloads)
def test_an_agent_is_away_between_turns_and_at_no_other_time(workload: Workload) -> None:
    for agent in plan_trace(workload):
        assert len(agent.turns) == workload.turns
        assert all(turn.think_s is not None and turn.announced_s is not None for turn in agent.turns[:-1])
        assert (agent.turns[-1].think_s, agent.turns[-1].announced_s, agent.turns[-1].tool) == (None, None, False)


@given(workloads)
def test_lengths_are_those_of_the_workload(workload: Workload) -> None:
    for agent in plan_trace(workload):
        new = [turn.new_tokens for turn in agent.turns]
        assert new == [workload.context, *(workload.turns - 1) * [workload.resume_tokens]]
        for turn in agent.turns:
            expected = workload.tool_completion_tokens if turn.tool else workload.completion_tokens
            assert turn.completion_tokens == expected


@given(workloads)
def test_think_times_are_within_bounds(workload: Workload) -> None:
    assert isinstance(workload.think, Uniform)
    low, high = workload.time_scale * workload.think.low, workload.time_scale * workload.think.high
    for turn in earlier_turns(plan_trace(workload)):
        assert turn.think_s is not None
        assert turn.tool or low <= turn.think_s <= high * (1 + 1e-9)


@given(workloads)
def test_time_scale_is_a_factor_on_every_time(workload: Workload) -> None:
    plain = plan_trace(replace(workload, time_scale=1.0))
    assert plan_trace(workload) == scaled(plain, workload.time_scale)


def test_seeds_differ() -> None:
    assert plan_trace(Workload(seed=1)) != plan_trace(Workload(seed=2))


BASE = Workload(40, turns=4, tool_share=0.5, eta_noise=0.2)


@pytest.mark.parametrize(
    "other",
    [
        {"turns": 9},
        {"think": LogNormal(3.0, 1.0)},
        {"eta_noise": 0.0},
        {"tool_share": 0.0},
        {"tool_think": LogNormal(9.0, 2.0)},
        {"context": 2000, "resume_tokens": 1, "completion_tokens": 1},
    ],
)
def test_what_else_agents_do_leaves_the_arrivals_alone(other: dict[str, Any]) -> None:
    assert arrivals(plan_trace(replace(BASE, **other))) == arrivals(plan_trace(BASE))


@pytest.mark.parametrize(
    "other",
    [
        {"arrivals": Arrivals.CONSTANT},
        {"arrivals": Arrivals.GAMMA, "burstiness": 0.3},
        {"rate": math.inf},
        {"eta_noise": 1.0},
        {"eta_noise": 0.0},
        {"system_tokens": 0},
    ],
)
def test_what_else_changes_leaves_think_times_and_tools_alone(other: dict[str, Any]) -> None:
    before, after = (earlier_turns(plan_trace(workload)) for workload in (BASE, replace(BASE, **other)))
    assert [(turn.think_s, turn.tool) for turn in before] == [(turn.think_s, turn.tool) for turn in after]


def test_more_tools_leave_the_other_turns_and_the_earlier_tools_as_they_were() -> None:
    few, many = (earlier_turns(plan_trace(replace(BASE, tool_share=share))) for share in (0.2, 0.6))
    assert {index for index, turn in enumerate(few) if turn.tool} < {i for i, turn in enumerate(many) if turn.tool}
    assert all(before == after for before, after in zip(few, many, strict=True) if before.tool == after.tool)


def test_the_share_of_tools_is_what_was_asked_for() -> None:
    """A binomial count lies within 4 standard deviations but for 1 in 15,000."""
    turns = earlier_turns(plan_trace(Workload(1000, turns=5, tool_share=0.3)))
    assert sum(turn.tool for turn in turns) == pytest.approx(1200, abs=4 * math.sqrt(4000 * 0.3 * 0.7))


@pytest.mark.parametrize(("share", "tools"), [(0.0, 0), (1.0, 120)])
def test_no_turn_or_every_turn_calls_a_tool(share: float, tools: int) -> None:
    turns = earlier_turns(plan_trace(replace(BASE, tool_share=share)))
    assert sum(turn.tool for turn in turns) == tools


def test_tools_take_their_own_time() -> None:
    trace = plan_trace(Workload(20, turns=5, think=Uniform(50, 60), tool_share=0.5, tool_think=Uniform(1, 2)))
    for turn in earlier_turns(trace):
        low, high = (1, 2) if turn.tool else (50, 60)
        assert turn.think_s is not None
        assert low <= turn.think_s <= high


def test_without_noise_what_is_announced_is_exact() -> None:
    for turn in earlier_turns(plan_trace(replace(BASE, eta_noise=0.0, time_scale=0.3))):
        assert turn.announced_s == turn.think_s


def test_noise_is_a_lognormal_factor() -> None:
    """Mean and deviation of its logarithm; 4 standard errors of 6,000 samples."""
    turns = earlier_turns(plan_trace(Workload(2000, turns=4, eta_noise=0.5, think=Uniform(5, 9))))
    logs = [math.log(turn.announced_s / turn.think_s) for turn in turns if turn.announced_s and turn.think_s]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in logs) / len(logs))
    assert len(logs) == 6000
    assert mean == pytest.approx(0.0, abs=4 * 0.5 / math.sqrt(6000))
    assert deviation == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(2 * 6000))


def test_a_replayed_trace_is_what_is_in_the_file(tmp_path: Path) -> None:
    trace = plan_trace(BASE)
    write_trace(trace, tmp_path / "trace.jsonl")
    assert plan_trace(Replay(trace=tmp_path / "trace.jsonl")) == trace
    assert plan_trace(Replay(trace=tmp_path / "trace.jsonl", time_scale=0.5)) == scaled(trace, 0.5)


def test_a_trace_whose_prompts_are_shorter_than_the_system_text_is_refused(tmp_path: Path) -> None:
    short = AgentPlan(0.0, (TurnPlan(20, 1, None, None, tool=False),))
    write_trace((*plan_trace(BASE)[:3], short), tmp_path / "trace.jsonl")
    with pytest.raises(
        LoadgenError, match="system_tokens is 20, but must be less than the 20 tokens with which agent 3"
    ):
        plan_trace(Replay(trace=tmp_path / "trace.jsonl", system_tokens=20))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"agents": 0}, "agents"),
        ({"turns": 0}, "turns"),
        ({"context": 0}, "context"),
        ({"resume_tokens": 0}, "resume_tokens"),
        ({"completion_tokens": -1}, "completion_tokens"),
        ({"tool_completion_tokens": 0}, "tool_completion_tokens"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"arrivals": Arrivals.GAMMA, "burstiness": 0.0}, "burstiness"),
        ({"arrivals": Arrivals.GAMMA, "burstiness": math.inf}, "burstiness"),
        ({"eta_noise": -0.1}, "eta_noise"),
        ({"eta_noise": math.nan}, "eta_noise"),
        ({"tool_share": -0.1}, "tool_share"),
        ({"tool_share": 1.1}, "tool_share"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"time_scale": float("inf")}, "time_scale"),
        ({"seed": -1}, "seed"),
        ({"context": 100, "system_tokens": 100}, "system_tokens"),
        ({"system_tokens": -1}, "system_tokens"),
        ({"burstiness": 2.0}, "burstiness has no effect, because arrivals is not gamma"),
        ({"tool_completion_tokens": 5}, "tool_completion_tokens has no effect, because tool_share is 0"),
        ({"tool_think": Uniform(1, 2)}, "tool_think has no effect, because tool_share is 0"),
    ],
)
def test_a_value_out_of_range_or_without_effect_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadgenError, match=named):
        Workload(**wrong)


def test_a_default_that_does_not_fit_is_told() -> None:
    with pytest.raises(LoadgenError, match="context must be above system_tokens, which is 128; got 64"):
        Workload(context=64)
