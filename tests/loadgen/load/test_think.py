"""Think times are drawn from what was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import LoadgenError
from loadgen.load.think import LogNormal, ThinkTime, Uniform, parse_think


@pytest.mark.parametrize(
    ("text", "think"),
    [
        ("10:20", Uniform(10.0, 20.0)),
        ("0:0.5", Uniform(0.0, 0.5)),
        ("lognormal:12:0.5", LogNormal(12.0, 0.5)),
        ("lognormal:3:0", LogNormal(3.0, 0.0)),
    ],
)
def test_reading_what_is_written(text: str, think: ThinkTime) -> None:
    assert parse_think(text) == think
    assert str(think) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "5:", "a:b", "2:1", "-1:1", "0:inf", "nan:1", "1:2:3"),
        *("lognormal", "lognormal:1", "lognormal:0:1", "lognormal:-1:1", "lognormal:inf:1"),
        *("lognormal:1:-1", "lognormal:1:11", "lognormal:1:nan", "lognormal:1:2:3", "normal:1:2"),
    ],
)
def test_what_is_no_think_time_is_refused(text: str) -> None:
    with pytest.raises(LoadgenError, match="think time"):
        parse_think(text)


@given(low=st.floats(0, 1e3), span=st.floats(0, 1e3), seed=st.integers(0, 2**32))
def test_uniform_times_are_within_bounds(low: float, span: float, seed: int) -> None:
    drawn = Uniform(low, low + span).draw(np.random.default_rng(seed), (3, 5))
    assert drawn.shape == (3, 5)
    assert np.all((low <= drawn) & (drawn <= low + span))


def test_logarithms_of_lognormal_times_are_normal() -> None:
    """Kolmogorov-Smirnov at 1 %, against the normal distribution function from the error function."""
    drawn = np.sort(LogNormal(12.0, 0.5).draw(np.random.default_rng(5), (40, 100)).ravel())
    cdf = np.array([(1 + math.erf(math.log(value / 12.0) / 0.5 / math.sqrt(2))) / 2 for value in drawn])
    steps = np.arange(drawn.size + 1) / drawn.size
    assert max(np.max(steps[1:] - cdf), np.max(cdf - steps[:-1])) < 1.63 / math.sqrt(drawn.size)


def test_without_spread_every_time_is_the_median() -> None:
    assert set(LogNormal(12.0, 0.0).draw(np.random.default_rng(5), (4, 4)).ravel().tolist()) == {12.0}
