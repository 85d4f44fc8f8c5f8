"""What a batch of prompts was answered with, and how long that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import NotAsMeant
from loadgen.prompts import fingerprint


@dataclass(frozen=True, slots=True)
class Timed:
    """See `Sample`. `steps_per_s`: how often every session got a token."""

    first_s: float
    tokens_per_s: float
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens of every session, and when each of them came, in seconds from the start."""

    token_ids: Sequence[Sequence[int]]
    times: Sequence[Sequence[float]]

    @property
    def fingerprint(self) -> str:
        """Of the tokens."""
        return fingerprint([[tuple(tokens)] for tokens in self.token_ids])

    def timed(self) -> Timed:
        """Rates are from the moment when every session has its first token to that when one has its last. Raises
        `NotAsMeant` if there is nothing in between.
        """
        begin, end = max(each[0] for each in self.times), min(each[-1] for each in self.times)
        counted = sum(1 for each in self.times for at in each if begin < at <= end)
        if not counted:
            raise NotAsMeant("one session had all of its tokens before another had its first: let there be more tokens")
        rate = counted / (end - begin)
        return Timed(begin, rate, rate / len(self.times))
