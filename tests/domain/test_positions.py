"""Runs of positions behave like the sets that they stand for."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.domain.positions import Runs, clip_runs, count, join, multiples, next_position, positions_of, runs_of

PLACES = st.integers(0, 40)
SETS = st.sets(PLACES, max_size=12)


def are_runs(runs: Runs) -> bool:
    """Whether every run has what its comment promises, and they follow each other."""
    ends = all(run.end == run.positions[-1] + 1 and (run.step == 1 or len(run.positions) > 1) for run in runs)
    return ends and all(before.end <= after.first for before, after in pairwise(runs))


@given(chosen=SETS, first=PLACES, end=PLACES)
def test_a_part_has_the_positions_that_lie_in_it(chosen: set[int], first: int, end: int) -> None:
    runs = runs_of(sorted(chosen))
    part = clip_runs(runs, first, end)
    assert are_runs(runs)
    assert are_runs(part)
    assert list(positions_of(part)) == [each for each in sorted(chosen) if first <= each < end]
    assert count(part) == len(list(positions_of(part)))


@given(chosen=SETS, first=PLACES)
def test_the_next_position_is_the_lowest_that_is_not_before(chosen: set[int], first: int) -> None:
    found = next_position(runs_of(sorted(chosen)), first)
    assert found == min((each for each in chosen if each >= first), default=None)


@given(one=st.sets(PLACES, min_size=1), other=st.sets(PLACES, min_size=1))
def test_runs_join_behind_each_other(one: set[int], other: set[int]) -> None:
    behind = [max(one) + 1 + each for each in sorted(other)]
    joined = join(runs_of(sorted(one)), runs_of(behind))
    assert are_runs(joined)
    assert list(positions_of(joined)) == [*sorted(one), *behind]


@given(step=st.integers(1, 50), first=PLACES, end=PLACES)
def test_multiples_are_one_run_however_many_there_are(step: int, first: int, end: int) -> None:
    runs = multiples(step, first, end)
    assert are_runs(runs)
    assert len(runs) <= 1
    assert list(positions_of(runs)) == [each for each in range(first, end) if each % step == 0]
    assert runs_of(positions_of(runs)) == runs
