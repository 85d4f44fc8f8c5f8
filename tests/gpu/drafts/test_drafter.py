"""What a drafter expects of its guesses."""

from __future__ import annotations

from app.gpu.drafts.drafter import Drafter

LOOP = [5, 6, 7]


def test_it_guesses_what_followed_last_time() -> None:
    guess = Drafter().guess([1, 2, 3, 4, 9, 1, 2, 3], 4)
    assert list(guess.token_ids) == [4, 9, 1, 2]
    assert all(0 < after < before < 1 for before, after in zip(guess.odds, guess.odds[1:], strict=False))


def test_it_guesses_nothing_for_what_is_new() -> None:
    assert not Drafter().guess([1, 2, 3, 4, 5], 4).token_ids


def test_guesses_that_are_right_raise_its_hopes() -> None:
    drafter, history = Drafter(), LOOP * 4
    first = drafter.guess(history, 4).odds
    for _ in range(40):
        history = [*history, LOOP[len(history) % 3]]
        last = drafter.guess(history, 4).odds
    assert first[-1] < 0.5 < 0.9 < last[-1]


def test_guesses_that_are_wrong_lower_them() -> None:
    drafter, history = Drafter(), LOOP * 4
    first = drafter.guess(history, 4).odds
    for number in range(10):
        history = [*history, 100 + number]
        drafter.guess(history, 4)
        history = [*history, *LOOP * 2]
        last = drafter.guess(history, 4).odds
    assert last[0] < first[0]
