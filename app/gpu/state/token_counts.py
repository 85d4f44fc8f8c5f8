"""Which tokens a turn's history has, for penalties: kept from step to step, so that a step counts what is new."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple


class Seen(NamedTuple):
    """The tokens of a history, each once, and how often each was generated."""

    tokens: array[int]
    generated: array[int]


class TokenCounts:
    """The counts of one turn, whose history only grows."""

    def __init__(self, prompt_tokens: int) -> None:
        """Tokens from position `prompt_tokens` on are generated."""
        self._prompt_tokens = prompt_tokens
        self._places = dict[int, int]()
        self._tokens, self._generated = array("q"), array("q")
        self._counted = 0

    def seen(self, history: Sequence[int], drafted: Sequence[int] = ()) -> Seen:
        """What the history has, as if the `drafted` tokens had been generated after it."""
        for position, token in enumerate(history[self._counted :], self._counted):
            place = self._places.setdefault(token, len(self._tokens))
            if place == len(self._tokens):
                self._tokens.append(token)
                self._generated.append(0)
            self._generated[place] += position >= self._prompt_tokens
        self._counted = len(history)
        tokens, generated, new = self._tokens[:], self._generated[:], dict[int, int]()
        for token in drafted:
            place = self._places.get(token, -1)
            if place < 0:
                place = new.setdefault(token, len(tokens))
            if place == len(tokens):
                tokens.append(token)
                generated.append(0)
            generated[place] += 1
        return Seen(tokens, generated)
