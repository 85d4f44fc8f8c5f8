"""From the victim's turns to ratios: what an attack costs beside what an honest neighbour of its size costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_RATIO = 2.0
MOST_GROWTH_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds, the 95th percentile over the turns."""

    first_s: float
    token_s: float

    @classmethod
    def of(cls, firsts: Sequence[float], tokens: Sequence[float]) -> Waits:
        """Of at least one turn."""
        return cls(*(float(np.percentile(values, 95)) for values in (firsts, tokens)))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Honest ones, `count` at once: how many tokens a second the server computed for them, and the victim's waits."""

    count: int
    tokens_per_s: float
    waits: Waits


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attack did in so many turns of the victim. `grown_bytes` of memory, `wrong` turns with other tokens."""

    name: str
    description: str
    turns: int
    waits: Waits
    tokens_per_s: float
    grown_bytes: int
    answers: dict[str, int]
    wrong: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ratios of the victim's waits to those beside honest neighbours with the same number of tokens."""

    first_ratio: float
    token_ratio: float
    is_kept: bool


def beside_honest(neighbours: Sequence[Neighbour], tokens_per_s: float) -> Waits:
    """The victim's waits beside honest neighbours with so many tokens a second: between those that were measured, and
    never beside fewer than the fewest.
    """
    known = sorted(neighbours, key=lambda each: each.tokens_per_s)
    rates = [each.tokens_per_s for each in known]

    def at(values: Sequence[float]) -> float:
        return float(np.interp(tokens_per_s, rates, values))

    return Waits(at([each.waits.first_s for each in known]), at([each.waits.token_s for each in known]))


def judge(outcome: Outcome, neighbours: Sequence[Neighbour]) -> Verdict:
    """Whether the attack harms the victim no more than it may, its memory and its tokens included."""
    fair = beside_honest(neighbours, outcome.tokens_per_s)
    first, token = outcome.waits.first_s / fair.first_s, outcome.waits.token_s / fair.token_s
    is_whole = not outcome.wrong and not outcome.error and outcome.grown_bytes <= MOST_GROWTH_BYTES
    return Verdict(first, token, is_whole and max(first, token) <= MOST_RATIO)
