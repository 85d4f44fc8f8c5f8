"""What is drafted, what is expected of it, and what a drafted token costs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.gpu.planning.drafting import StepCosts
from app.gpu.state.drafts import LONGEST, ORDERS, Drafter

histories = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=8)
"""Few different tokens, in pieces: what a history grows by."""


def search(tokens: list[int]) -> tuple[int, int]:
    """What `Drafter.find` finds, the slow way."""
    for order in ORDERS:
        for place in range(len(tokens) - 1, order - 1, -1):
            if len(tokens) > order and tokens[place - order : place] == tokens[-order:]:
                same = [tokens[place - 1 - n] == tokens[-1 - n] for n in range(min(place, LONGEST))]
                return place, same.index(False) if False in same else len(same)
    return 0, 0


@given(histories)
def test_it_finds_what_a_search_finds_as_the_history_grows(pieces: list[list[int]]) -> None:
    drafter, tokens = Drafter(), list[int]()
    for piece in pieces:
        tokens += piece
        assert drafter.find(tokens) == search(tokens)


LOOP = [5, 6, 7]


def test_it_guesses_what_followed_last_time() -> None:
    guess = Drafter().guess([1, 2, 3, 4, 9, 1, 2, 3], 4)
    assert list(guess.token_ids) == [4, 9, 1, 2]
    assert all(0 < after < before < 1 for before, after in zip(guess.odds, guess.odds[1:], strict=False))


def test_guesses_that_are_right_raise_its_hopes_and_those_that_are_wrong_lower_them() -> None:
    drafter, history = Drafter(), LOOP * 4
    first = drafter.guess(history, 4).odds
    for _ in range(40):
        history.append(LOOP[len(history) % 3])
        sure = drafter.guess(history, 4).odds
    assert first[-1] < 0.5 < 0.9 < sure[-1]
    for number in range(10):
        history.append(100 + number)
        drafter.guess(history, 4)
        history += LOOP * 2
    assert drafter.guess(history, 4).odds[0] < sure[0]


def test_steps_of_many_sizes_show_what_a_token_costs() -> None:
    costs, chance = StepCosts(), random.Random(0)
    for _ in range(200):
        tokens = chance.randint(1, 8)
        costs.note(tokens, (25 + 5 * tokens) * chance.uniform(0.98, 1.02))
    assert costs.per_token == pytest.approx(5, rel=0.1)
    assert costs.seconds(4) == pytest.approx(45, rel=0.05)


def test_a_change_of_pace_is_noticed() -> None:
    costs = StepCosts()
    for base in (25, 250):
        for number in range(200):
            tokens = 1 + number % 8
            costs.note(tokens, base + 2 * tokens)
    assert costs.seconds(1) == pytest.approx(252, rel=0.05)


def test_a_token_costs_neither_less_than_nothing_nor_more_than_its_share_of_the_step() -> None:
    falling, steep = StepCosts(), StepCosts()
    for number in range(100):
        tokens = 1 + number % 8
        falling.note(tokens, 20 - tokens)
        steep.note(tokens, tokens**3)
    assert falling.per_token == 0
    assert steep.seconds(0) >= 0
