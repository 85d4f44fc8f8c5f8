"""The index of n-grams against a search of the whole history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.gpu.drafts import ngrams
from app.gpu.drafts.ngrams import LONGEST, ORDERS, NgramIndex, follow

histories = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=8)
"""Few different tokens, in pieces: what a history grows by."""


def search(tokens: list[int]) -> tuple[int, int]:
    """See `NgramIndex.find`."""
    for order in ORDERS:
        for place in range(len(tokens) - 1, order - 1, -1):
            if len(tokens) > order and tokens[place - order : place] == tokens[-order:]:
                same = [tokens[place - 1 - n] == tokens[-1 - n] for n in range(min(place, LONGEST))]
                return place, same.index(False) if False in same else len(same)
    return 0, 0


@given(histories)
def test_it_finds_what_a_search_finds_as_the_history_grows(pieces: list[list[int]]) -> None:
    index, tokens = NgramIndex(), list[int]()
    for piece in pieces:
        tokens += piece
        index.extend(tokens)
        assert index.find(tokens) == search(tokens)


def test_the_latest_of_many_places_counts() -> None:
    tokens = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]
    index = NgramIndex()
    index.extend(tokens)
    place, same = index.find(tokens)
    assert (place, same) == (7, 3)
    assert follow(tokens, place, 3) == [8, 1, 2]


def test_a_history_that_repeats_itself_goes_on_repeating_itself() -> None:
    assert follow([9, 4, 5, 4, 5], 3, 5) == [4, 5, 4, 5, 4]


def test_a_long_history_is_indexed_in_part() -> None:
    """Its memory is bounded, however long it is."""
    limit = ngrams.MAX_INDEXED
    tokens = [1, 2, 3, *range(10, 10 + limit), 4, 3, 2, 1]
    index = NgramIndex()
    index.extend(tokens)
    assert index.find(tokens) == (0, 0)
    assert sum(map(len, index._places.values())) <= len(ORDERS) * limit
