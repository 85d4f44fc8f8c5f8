"""Arrivals are a Poisson process, computed ahead."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import poisson_arrivals


@given(agents=st.integers(1, 200), rate=st.floats(1e-3, 1e6), seed=st.integers(0, 2**32))
def test_ascending_and_decided_by_the_seed(agents: int, rate: float, seed: int) -> None:
    times = poisson_arrivals(agents, rate, np.random.default_rng(seed))
    assert times == poisson_arrivals(agents, rate, np.random.default_rng(seed))
    assert len(times) == agents
    assert times[0] >= 0
    assert list(times) == sorted(times)


@pytest.mark.parametrize("rate", [0.2, 1.0, 50.0])
def test_gaps_are_exponential(rate: float) -> None:
    """Kolmogorov-Smirnov against the exponential distribution: 1.63 / sqrt(n) is the critical value at 1 %."""
    times = poisson_arrivals(4000, rate, np.random.default_rng(7))
    gaps = np.sort(np.diff(times, prepend=0.0))
    expected = 1 - np.exp(-rate * gaps)
    steps = np.arange(gaps.size + 1) / gaps.size
    distance = max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))
    assert distance < 1.63 / np.sqrt(gaps.size)


def test_counts_have_the_variance_of_a_poisson_process() -> None:
    """In a Poisson process the variance of the count per second equals its mean; evenly spaced arrivals have none."""
    times = np.asarray(poisson_arrivals(20_000, 10.0, np.random.default_rng(3)))
    counts = np.bincount(times.astype(int))[:-1]
    assert np.mean(counts) == pytest.approx(10.0, rel=0.05)
    assert np.var(counts) / np.mean(counts) == pytest.approx(1.0, abs=0.15)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert poisson_arrivals(3, float("inf"), np.random.default_rng(0)) == (0.0, 0.0, 0.0)
