"""One turn's drafts: the tokens that its history suggests, and how likely each of them is to be right.

They are found by prompt lookup (Saxena, 2023), without a search: what followed the last few tokens where those stood
before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.grammars.matcher import Matcher

ORDERS = (4, 2, 1)
"""Tokens that have to be the same, the longest first."""
LONGEST = 16
"""Tokens before a place that are compared at most."""
MAX_INDEXED = 1 << 13
"""Tokens of a history that are indexed when its index is made, while all sessions wait: about 300 bytes and half a
microsecond each.
"""
_PRIORS = {1: 0.15, 2: 0.3, 3: 0.5, 4: 0.7, 5: 0.8}
"""By the binary digits of how many tokens are the same: the share of guesses that turn out right, to begin with."""
_RATE = 0.1
"""Weight of the last guess in that share."""


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """A token that is computed before it is chosen. `matcher` has taken it, if the turn has a grammar."""

    token_id: int
    matcher: Matcher | None = None


Guess = list[tuple[int, float]]
"""The next tokens, and for each the probability that it and those before it will be chosen."""


class Drafter:
    """Guesses, and learns from what was chosen, whether a guess was computed or not. For one turn: it only grows."""

    def __init__(self) -> None:
        self._places: dict[int, dict[tuple[int, ...], int]] = {order: {} for order in ORDERS}
        """For each n-gram of the history, the place after the last one that has a token behind it."""
        self._end: int | None = None
        """N-grams that end before it have been indexed; None: none has."""
        self._right = dict(_PRIORS)
        self._guess: Sequence[int] = ()
        self._length = 0
        """Of the history when it was made."""
        self._same = 0
        """How many tokens were the same before the guess."""

    def guess(self, tokens: Sequence[int], count: int) -> Guess:
        """The `count` tokens that follow the history, or none."""
        self._learn(tokens)
        place, self._same = self.find(tokens)
        self._guess, self._length = follow(tokens, place, count) if self._same else (), len(tokens)
        guess, odds = Guess(), 1.0
        for number, token_id in enumerate(self._guess):
            odds *= self._right[self._evidence(number)]
            guess.append((token_id, odds))
        return guess

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The place before the end where most recently the same n-gram ended, and how many tokens before it are those
        before the end, at most `LONGEST`. (0, 0) if there is none.
        """
        self._take_up(tokens)
        for order, places in self._places.items():
            place = places.get(tuple(tokens[-order:]))
            if place is not None:
                return place, _same_before(tokens, place)
        return 0, 0

    def _take_up(self, tokens: Sequence[int]) -> None:
        """Index the tokens that the history has got since the last call."""
        first = max(0, len(tokens) - MAX_INDEXED) if self._end is None else self._end
        for order, places in self._places.items():
            ends = range(max(first, order), len(tokens))
            if ends:
                grams = zip(
                    *(tokens[end - order : end - order + len(ends)] for end in range(ends[0], ends[0] + order)),
                    strict=True,
                )
                places.update(zip(grams, ends, strict=True))
        self._end = len(tokens)

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compare the last guess with the tokens that were chosen since, up to the first that differs."""
        for number, (guessed, chosen) in enumerate(zip(self._guess, tokens[self._length :], strict=False)):
            evidence = self._evidence(number)
            self._right[evidence] += _RATE * ((guessed == chosen) - self._right[evidence])
            if guessed != chosen:
                return

    def _evidence(self, number: int) -> int:
        """How much speaks for the guess of that number, if those before it are right."""
        return min(self._same + number, LONGEST).bit_length()


def follow(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """The `count` tokens that stood at `place`. Those that run past the end go on with themselves: a history that
    repeats itself is expected to do so again.
    """
    period = len(tokens) - place
    return [tokens[place + offset % period] for offset in range(count)]


def _same_before(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` are those before the end."""
    length = 0
    while length < min(place, LONGEST) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
