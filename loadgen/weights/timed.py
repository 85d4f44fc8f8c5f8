"""How long it took to answer a batch of prompts greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import LoadgenError
from loadgen.prompts import fingerprint


class NotAsMeant(LoadgenError):
    """What was measured is not what was meant. The text says why."""


@dataclass(frozen=True, slots=True)
class Timed:
    """See `Sample`. `steps_per_s`: how often every session got a token."""

    first_s: float
    tokens_per_s: float
    steps_per_s: float
    answer: str


def timed(times: Sequence[Sequence[float]], answers: Sequence[Sequence[int]]) -> Timed:
    """Of the times of every session's tokens, in seconds from the start.

    Rates are from the moment when every session has its first token to that when one has its last. Raises `NotAsMeant`
    if there is nothing in between.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    counted = sum(1 for each in times for at in each if begin < at <= end)
    if not counted:
        raise NotAsMeant("one session had all of its tokens before another had its first: let there be more tokens")
    rate = counted / (end - begin)
    return Timed(begin, rate, rate / len(times), fingerprint([[tuple(answer)] for answer in answers]))
