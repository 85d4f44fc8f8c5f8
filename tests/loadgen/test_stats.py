"""Figures follow from records; NumPy is the judge of percentiles."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.records import Failure, Run, SignalRecord, TurnCost, TurnRecord
from loadgen.load.workload import Measurement
from loadgen.stats import Distribution, Goodput, Summary, summarize

PLAIN = Measurement()
COST = TurnCost(prompt_tokens=100, completion_tokens=4, cached_tokens=60, recomputed_tokens=0)


def record(
    agent: int = 0, turn: int = 0, sent_s: float = 0.0, latency_s: float = 1.0, cost: TurnCost = COST
) -> TurnRecord:
    """A turn that was due 0.25 s before it was sent, with events after 0.5, 0.75 and 0.875 of its latency."""
    times = tuple(latency_s * part for part in (0.5, 0.75, 0.875))
    return TurnRecord(agent, turn, sent_s - 0.25, sent_s, times, latency_s, cost)


def figures(*runs: Run, planned: int = 3, measurement: Measurement = PLAIN) -> Summary:
    return summarize(runs, planned, measurement)


def distribution(found: Distribution | None) -> Distribution:
    assert found is not None
    return found


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles(samples: list[float]) -> None:
    assert Distribution.of([]) is None
    found = distribution(Distribution.of(samples))
    expected = [np.percentile(samples, q, method="linear") for q in (50, 90, 95, 99, 100)]
    assert [found.p50, found.p90, found.p95, found.p99, found.max] == pytest.approx(expected)
    assert found.mean == pytest.approx(float(np.mean(samples)))
    assert found.count == len(samples)


def test_what_is_measured_of_a_turn() -> None:
    signals = [SignalRecord(0, "io_wait", 1.0, seconds) for seconds in (0.001, 0.002, 0.003)]
    turns = [record(latency_s=1.0), record(turn=1, latency_s=2.0), record(turn=2, latency_s=4.0)]
    summary = figures(Run(10.0, turns=turns, signals=signals))
    first, resumed = distribution(summary.ttft_first_s), distribution(summary.ttft_resumed_s)
    assert (first.count, first.p50) == (1, 0.5)
    assert (resumed.count, resumed.p50, resumed.max) == (2, 1.5, 2.0)
    assert distribution(summary.inter_token_s).max == 1.0
    assert distribution(summary.lateness_s).max == 0.25
    assert distribution(summary.tpot_s).max == pytest.approx(4.0 * (0.875 - 0.5) / 3)
    assert distribution(summary.signal_s).p50 == 0.002
    assert summary.tokens_per_s == pytest.approx(12 / 10)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.recomputed_tokens) == (300, 180, 0)
    assert summary.succeeded


def test_tokens_that_another_server_computed_again_are_those_of_the_history_that_were_not_cached() -> None:
    """The history of the second turn has 100 + 4 tokens, of which the last has not been computed; 96 were cached."""
    first = replace(COST, cached_tokens=0, recomputed_tokens=None)
    second = TurnCost(prompt_tokens=150, completion_tokens=4, cached_tokens=96, recomputed_tokens=None)
    third = TurnCost(prompt_tokens=200, completion_tokens=4, cached_tokens=160, recomputed_tokens=None)
    turns = [record(turn=number, cost=cost) for number, cost in enumerate((first, second, third))]
    assert figures(Run(9.0, turns=turns)).recomputed_tokens == 103 - 96
    assert figures(Run(9.0, turns=turns[:1])).recomputed_tokens == 0


def test_goodput_counts_turns_that_met_every_limit() -> None:
    """TTFT is 0.5, 1 and 2 s; time per further token 0.125, 0.25 and 0.5 s."""
    turns = [record(agent=agent, latency_s=2.0**agent) for agent in range(3)]
    run = Run(10.0, turns=turns, failures=[Failure(3, 0, 4.0, "Timeout", "")])
    for ttft_s, tpot_s, good in ((1.0, None, 2), (None, 0.125, 1), (1.0, 0.2, 1), (9.0, 9.0, 3)):
        limits = Measurement(slo_ttft_s=ttft_s, slo_tpot_s=tpot_s)
        assert figures(run, measurement=limits).goodput == Goodput(good / 10, good / 4)
    assert figures(run).goodput is None
