"""Spreads against NumPy's quantiles."""

import random
from statistics import StatisticsError

import numpy as np
import pytest

from benchmarks.spread import middle_half, ratio_of_medians
from loadgen.results.spread import Spread


def test_the_full_range_has_the_extremes() -> None:
    assert Spread.over([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0, 4)


def test_the_middle_half_has_the_quartiles() -> None:
    values = [random.Random(7).gauss(100, 15) for _ in range(51)]

    spread = middle_half(values)

    expected = np.quantile(values, [0.5, 0.25, 0.75])
    np.testing.assert_allclose([spread.median, spread.low, spread.high], expected)


def test_nothing_has_no_spread() -> None:
    with pytest.raises(StatisticsError):
        middle_half([])


def test_a_ratio_of_medians_has_an_interval_that_holds_the_true_ratio() -> None:
    noise = np.random.default_rng(1)
    base = noise.normal(100, 10, size=200)
    values = 1.2 * noise.normal(100, 10, size=200)

    spread = ratio_of_medians(values.tolist(), base.tolist())

    assert spread.median == pytest.approx(np.median(values) / np.median(base))
    assert spread.low < 1.2 < spread.high
    assert spread.high - spread.low < 0.1


def test_rounds_that_rise_and_fall_together_leave_no_doubt_about_their_ratio() -> None:
    base = np.random.default_rng(2).uniform(1, 2, size=50).tolist()

    spread = ratio_of_medians([2 * value for value in base], base)

    assert (spread.low, spread.median, spread.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_ratio_needs_as_many_of_both() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio_of_medians([1.0, 2.0], [1.0])
