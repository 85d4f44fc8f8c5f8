"""Figures follow from records; NumPy is the judge of percentiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.records import Failure, Run, SignalRecord, TurnCost, TurnRecord
from loadgen.stats import Distribution, peak_agents, summarize
from loadgen.workload import Workload

COST = TurnCost(prompt_tokens=100, completion_tokens=4, cached_tokens=60, recomputed_tokens=0)


def record(
    agent: int = 0, turn: int = 0, sent_s: float = 0.0, latency_s: float = 1.0, cost: TurnCost = COST
) -> TurnRecord:
    """A turn that was due 0.25 s before it was sent, with events after 0.5, 0.75 and 0.875 of its latency."""
    times = tuple(latency_s * part for part in (0.5, 0.75, 0.875))
    return TurnRecord(agent, turn, sent_s - 0.25, sent_s, times, latency_s, cost)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles(samples: list[float]) -> None:
    found = Distribution.of(samples)
    assert found is not None
    expected = [np.percentile(samples, q, method="linear") for q in (50, 90, 99, 100)]
    assert [found.p50, found.p90, found.p99, found.max] == pytest.approx(expected)
    assert found.mean == pytest.approx(float(np.mean(samples)))
    assert found.count == len(samples)


def test_no_samples_have_no_distribution() -> None:
    assert Distribution.of([]) is None


def test_what_is_measured_of_a_turn() -> None:
    run = Run(10.0, False, [record(latency_s=1.0), record(turn=1, latency_s=2.0), record(turn=2, latency_s=4.0)])
    summary = summarize(run, Workload(agents=1, turns=3))
    assert summary.ttft_first_s is not None
    assert summary.ttft_resumed_s is not None
    assert summary.inter_token_s is not None
    assert summary.lateness_s is not None
    assert (summary.ttft_first_s.count, summary.ttft_first_s.p50) == (1, 0.5)
    assert (summary.ttft_resumed_s.count, summary.ttft_resumed_s.p50, summary.ttft_resumed_s.max) == (2, 1.5, 2.0)
    assert (summary.inter_token_s.count, summary.inter_token_s.max) == (6, 1.0)
    assert summary.lateness_s.max == 0.25
    assert summary.tokens_per_s == pytest.approx(12 / 10)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.recomputed_tokens) == (300, 180, 0)
    assert summary.succeeded


def test_signals_have_a_distribution() -> None:
    signals = [SignalRecord(0, "io_wait", 1.0, seconds) for seconds in (0.001, 0.002, 0.003)]
    summary = summarize(Run(10.0, signals=signals), Workload())
    assert summary.signal_s is not None
    assert (summary.signal_s.count, summary.signal_s.p50, summary.signal_s.max) == (3, 0.002, 0.003)


def test_failures_are_counted_by_kind_and_what_they_prevented_is_not_lost() -> None:
    failures = [
        Failure(1, 1, 3.0, "RateLimited", ""),
        Failure(2, 0, 4.0, "Timeout", ""),
        Failure(2, None, 4.0, "Timeout", ""),
    ]
    summary = summarize(Run(10.0, False, [record(agent=0), record(agent=1)], failures), Workload(agents=3, turns=2))
    assert summary.turn_errors == {"RateLimited": 1, "Timeout": 1}
    assert summary.other_errors == {"Timeout": 1}
    assert sum(summary.turn_errors.values()) == summary.turns_failed
    assert (summary.turns_planned, summary.turns_completed, summary.turns_failed) == (6, 2, 2)
    assert summary.turns_not_run == 2
    assert not summary.succeeded


def test_a_conversation_that_could_not_be_closed_is_no_success() -> None:
    run = Run(1.0, False, [record()], [Failure(0, None, 1.0, "Timeout", "")])
    assert not summarize(run, Workload(agents=1, turns=1)).succeeded


def test_what_a_server_does_not_tell_is_not_made_up() -> None:
    silent = TurnCost(100, 4, None, None)
    summary = summarize(Run(1.0, False, [record(), record(cost=silent)]), Workload())
    assert (summary.cached_tokens, summary.recomputed_tokens) == (None, None)


def test_a_run_that_was_interrupted_at_once_has_a_summary() -> None:
    summary = summarize(Run(0.0, True), Workload())
    assert summary.ttft_first_s is None
    assert (summary.tokens_per_s, summary.peak_agents, summary.turns_not_run) == (0.0, 0, 24)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=30))
def test_agents_at_once(turns: list[tuple[int, int, int]]) -> None:
    """An agent is there from its first turn to the end of its last, whatever is between."""
    records = [record(agent=agent, sent_s=float(start), latency_s=float(length)) for agent, start, length in turns]
    spans = [[(s, s + n) for a, s, n in turns if a == agent] for agent in {agent for agent, _, _ in turns}]
    there = [{t for t in range(80) if min(s for s, _ in span) <= t < max(e for _, e in span)} for span in spans]
    assert peak_agents(records) == max(sum(t in agent for agent in there) for t in range(80))
