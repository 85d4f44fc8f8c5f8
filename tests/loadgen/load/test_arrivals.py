"""Arrivals are computed ahead, and their gaps have the distribution that was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from loadgen.load.arrivals import Arrivals, arrival_times

SAMPLES = 4000


def times(arrivals: Arrivals, agents: int, rate: float, burstiness: float = 1.0, seed: int = 7) -> tuple[float, ...]:
    return arrival_times(arrivals, agents, rate, burstiness, np.random.default_rng(seed))


def gaps(arrivals: Arrivals, rate: float, burstiness: float = 1.0) -> NDArray[np.float64]:
    """Ascending."""
    return np.sort(np.diff(times(arrivals, SAMPLES, rate, burstiness), prepend=0.0))


def passes_kolmogorov_smirnov(samples: NDArray[np.float64], cdf: NDArray[np.float64]) -> bool:
    """Whether ascending samples fit their distribution function, at 1 %: the asymptotic critical value is 1.63 / √n."""
    steps = np.arange(samples.size + 1) / samples.size
    distance = max(np.max(steps[1:] - cdf), np.max(cdf - steps[:-1]))
    return bool(distance < 1.63 / math.sqrt(samples.size))


def erlang_cdf(shape: int, rate: float, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the gamma distribution with a whole shape: 1 - exp(-x) times the first `shape` terms of exp(x)."""
    x = shape * rate * seconds
    terms = [x**k / math.factorial(k) for k in range(shape)]
    return np.asarray(1 - np.exp(-x) * sum(terms))


def half_gamma_cdf(rate: float, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the gamma distribution with shape 1/2: erf(√x)."""
    return np.array([math.erf(math.sqrt(0.5 * rate * gap)) for gap in seconds])


@given(
    arrivals=st.sampled_from(Arrivals),
    agents=st.integers(1, 200),
    rate=st.floats(1e-3, 1e6),
    burstiness=st.floats(0.05, 50),
    seed=st.integers(0, 2**32),
)
def test_ascending_and_decided_by_the_seed(
    arrivals: Arrivals, agents: int, rate: float, burstiness: float, seed: int
) -> None:
    found = times(arrivals, agents, rate, burstiness, seed)
    assert found == times(arrivals, agents, rate, burstiness, seed)
    assert len(found) == agents
    assert found[0] >= 0
    assert list(found) == sorted(found)


@pytest.mark.parametrize("rate", [0.2, 1.0, 50.0])
def test_gaps_of_poisson_arrivals_are_exponential(rate: float) -> None:
    found = gaps(Arrivals.POISSON, rate)
    assert passes_kolmogorov_smirnov(found, 1 - np.exp(-rate * found))
    assert not passes_kolmogorov_smirnov(found, erlang_cdf(2, rate, found))


@pytest.mark.parametrize("shape", [1, 2, 5])
def test_gaps_of_even_gamma_arrivals_have_the_distribution_of_their_shape(shape: int) -> None:
    found = gaps(Arrivals.GAMMA, 3.0, burstiness=shape)
    assert passes_kolmogorov_smirnov(found, erlang_cdf(shape, 3.0, found))
    assert not passes_kolmogorov_smirnov(found, erlang_cdf(shape + 1, 3.0, found))


def test_gaps_of_bursty_gamma_arrivals_have_the_distribution_of_their_shape() -> None:
    found = gaps(Arrivals.GAMMA, 3.0, burstiness=0.5)
    assert passes_kolmogorov_smirnov(found, half_gamma_cdf(3.0, found))
    assert not passes_kolmogorov_smirnov(found, 1 - np.exp(-3.0 * found))


def test_gaps_of_constant_arrivals_are_all_the_same() -> None:
    assert times(Arrivals.CONSTANT, 4, 2.0) == (0.5, 1.0, 1.5, 2.0)


def test_counts_have_the_variance_of_a_poisson_process() -> None:
    """In a Poisson process the variance of the count per second equals its mean; evenly spaced arrivals have none."""
    counts = np.bincount(np.asarray(times(Arrivals.POISSON, 20_000, 10.0, seed=3)).astype(int))[:-1]
    assert np.mean(counts) == pytest.approx(10.0, rel=0.05)
    assert np.var(counts) / np.mean(counts) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("arrivals", Arrivals)
def test_an_infinite_rate_is_all_at_once(arrivals: Arrivals) -> None:
    assert times(arrivals, 3, math.inf) == (0.0, 0.0, 0.0)
