"""Spreads against NumPy's quantiles."""

import random
from statistics import StatisticsError

import numpy as np
import pytest

from benchmarks.spread import Spread, full_range, middle_half


def test_the_full_range_has_the_extremes() -> None:
    assert full_range([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


def test_the_middle_half_has_the_quartiles() -> None:
    values = [random.Random(7).gauss(100, 15) for _ in range(51)]

    spread = middle_half(values)

    expected = np.quantile(values, [0.5, 0.25, 0.75])
    np.testing.assert_allclose([spread.median, spread.low, spread.high], expected)


def test_nothing_has_no_spread() -> None:
    with pytest.raises(StatisticsError):
        middle_half([])
