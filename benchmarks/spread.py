"""Several measurements of one quantity as one figure. Pure."""

from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, and the bounds that its maker names."""

    median: float
    low: float
    high: float


def full_range(values: list[float]) -> Spread:
    """With the lowest and the highest. Raises statistics.StatisticsError for no values."""
    return Spread(median(values), min(values), max(values))


def middle_half(values: list[float]) -> Spread:
    """With the lower and the upper quartile: of many values, the extremes only say how long was measured.

    Raises statistics.StatisticsError for fewer than two values.
    """
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)
