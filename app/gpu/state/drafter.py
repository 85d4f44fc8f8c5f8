"""One turn's drafts: the tokens that its history suggests, and how likely each of them is to be right."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.gpu.state.ngrams import LONGEST, NgramIndex, follow
from app.grammars.matcher import Matcher

_PRIORS = {1: 0.15, 2: 0.3, 3: 0.5, 4: 0.7, 5: 0.8}
"""By the binary digits of how many tokens are the same: the share of guesses that turn out right, to begin with."""
_RATE = 0.1
"""Weight of the last guess in that share."""


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """A token that is computed before it is chosen. `matcher` has taken it, if the turn has a grammar."""

    token_id: int
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Guess:
    """The next tokens, and for each the probability that it and those before it will be chosen."""

    token_ids: Sequence[int] = ()
    odds: Sequence[float] = ()


class Drafter:
    """Guesses, and learns from what was chosen, whether a guess was computed or not. For one turn: it only grows."""

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._right = dict(_PRIORS)
        self._guess: Sequence[int] = ()
        self._length = 0
        """Of the history when it was made."""
        self._same = 0
        """How many tokens were the same before the guess."""

    def guess(self, tokens: Sequence[int], count: int) -> Guess:
        """The `count` tokens that follow the history, or none."""
        self._learn(tokens)
        self._index.extend(tokens)
        place, self._same = self._index.find(tokens)
        self._guess, self._length = follow(tokens, place, count) if self._same else (), len(tokens)
        odds, right = [], 1.0
        for number in range(len(self._guess)):
            right *= self._right[self._evidence(number)]
            odds.append(right)
        return Guess(self._guess, odds)

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
