"""The search finds the border exactly, with few probes, and ends whatever the server does."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiments.capacity.search import Search

RANGES = st.tuples(st.integers(1, 50), st.integers(0, 500)).map(lambda pair: (pair[0], sum(pair)))


def finish(search: Search, holds: Callable[[int], bool]) -> list[int]:
    """Search to the end; returns the numbers that were probed."""
    probed: list[int] = []
    while (agents := search.next()) is not None:
        assert search.least <= agents <= search.most
        assert len(probed) < search.rounds * (search.most - search.least + 1)
        probed.append(agents)
        search.add(agents, holds(agents))
    return probed


@given(RANGES, st.integers(0, 600), st.integers(1, 5))
def test_a_border_is_found_exactly_and_with_few_probes(bounds: tuple[int, int], border: int, rounds: int) -> None:
    least, most = bounds
    search = Search(least, most, rounds)

    probed = finish(search, lambda agents: agents <= border)

    assert search.held == (None if border < least else min(border, most))
    assert search.failed == (None if border >= most else max(border + 1, least))
    doublings, halvings = math.ceil(math.log2(most / least)) + 1, math.ceil(math.log2(most))
    assert len(set(probed)) <= doublings + halvings
    assert {agents for agents, times in Counter(probed).items() if times > 1} <= {search.held, search.failed}


@given(RANGES, st.integers(1, 5), st.integers(0, 2**32))
def test_noise_does_not_keep_it_from_ending(bounds: tuple[int, int], rounds: int, seed: int) -> None:
    noise = random.Random(seed)
    search = Search(*bounds, rounds)

    votes: dict[int, list[bool]] = {}

    def flip(agents: int) -> bool:
        votes.setdefault(agents, []).append(noise.random() < 0.5)
        return votes[agents][-1]

    finish(search, flip)

    if search.held is not None:
        assert 2 * sum(votes[search.held]) > rounds
    if search.failed is not None:
        assert 2 * sum(votes[search.failed]) <= rounds
    if search.held is not None and search.failed is not None:
        assert search.failed == search.held + 1
    assert search.held is not None or search.failed == search.least
    assert search.failed is not None or search.held == search.most


def test_one_bad_round_does_not_lower_the_border() -> None:
    bad = iter([False])
    search = Search(1, 64, rounds=3)

    probed = finish(search, lambda agents: agents < 12 and (agents != 10 or next(bad, True)))

    assert (search.held, search.failed) == (11, 12)
    assert Counter(probed)[10] == 3


@pytest.mark.parametrize(
    ("border", "probed"),
    [(0, [4]), (4, [4, 8, 6, 5]), (13, [4, 8, 16, 12, 14, 13]), (99, [4, 8, 16, 20])],
)
def test_it_doubles_and_bisects(border: int, probed: list[int]) -> None:
    assert finish(Search(4, 20), lambda agents: agents <= border) == probed
