"""Figures, how much they vary, and the targets that they are held against. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from loadgen.report.text import number


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of `count` values, and the two ends, or the bounds of what the middle may be."""

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

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a median has to keep, itself included."""

    bound: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        """Whether `value` is on the right side of the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


class Outcome(StrEnum):
    """Whether a figure is what it should be."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "within the noise"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `unit` is `×` for a ratio. `by` says of what it is, such as which target; `target` is None for what
    is only reported. Without a `spread` it could not be measured.
    """

    name: str
    unit: str
    spread: Spread | None
    target: Target | None = None
    by: Mapping[str, str] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome | None:
        """None without a target. Within the noise: the target is missed, but lies within the bounds."""
        if self.target is None:
            return None
        if self.spread is None:
            return Outcome.UNKNOWN
        if self.target.is_met(self.spread.median):
            return Outcome.MET
        best = self.spread.high if self.target.at_least else self.spread.low
        return Outcome.UNDECIDED if self.target.is_met(best) else Outcome.MISSED

    @property
    def value(self) -> str:
        """The median and its bounds, to be read."""
        if self.spread is None:
            return ""
        shown = [
            number(each, ratio=self.unit == "×") for each in (self.spread.median, self.spread.low, self.spread.high)
        ]
        return f"{shown[0]} {self.unit}".strip() + ("" if shown[1] == shown[2] else f" [{shown[1]}, {shown[2]}]")

    @property
    def wanted(self) -> str:
        """The target, to be read."""
        if self.target is None:
            return ""
        sign = "≥" if self.target.at_least else "≤"
        return f"{sign} {number(self.target.bound, ratio=self.unit == '×', whole=True)} {self.unit}".strip()


By = Mapping[str, str]
_WHOLE: By = {}


def exact(name: str, unit: str, value: float | None, target: Target | None = None, by: By = _WHOLE) -> Figure:
    """A figure of one value; None: it could not be measured."""
    return Figure(name, unit, None if value is None else Spread(value, value, value, 1), target, by)


def all_of(name: str, right: int, whole: int, by: By = _WHOLE) -> Figure:
    """So many of the whole, where all should be; of nothing it is not measured."""
    return exact(name, f"of {whole:,}", right if whole else None, Target(whole, at_least=True), by)


def none_of(name: str, count: int, by: By = _WHOLE) -> Figure:
    """How many there are of what should not be."""
    return exact(name, "", count, Target(0), by)


def some(name: str, count: int, least: int = 1, by: By = _WHOLE) -> Figure:
    """How many there are of what there should be at least so many of."""
    return exact(name, "", count, Target(least, at_least=True), by)
