"""Several measurements of one quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of `count` values, and the two ends."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of the values that there are; None if there are none."""
        known = [value for value in values if value is not None]
        return cls.over(known) if known else None

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        """Of all of them. Raises ValueError if there are none."""
        return cls(median(values), min(values), max(values), len(values))


def in_words(spread: Spread | None, write: Callable[[float], str]) -> str:
    """The middle, and the two ends of several; empty for None."""
    if spread is None:
        return ""
    middle, low, high = map(write, (spread.median, spread.low, spread.high))
    return middle if spread.count == 1 else f"{middle} ({low}–{high})"
