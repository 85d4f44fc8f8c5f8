"""Figures of many measurements with other bounds than the lowest and the highest. Pure."""

from statistics import median, quantiles

import numpy as np

from loadgen.report.figures import Spread

RESAMPLES = 2000
CONFIDENCE = 0.95


def middle_half(values: list[float]) -> Spread:
    """With the lower and the upper quartile: of many values, the extremes only say how long was measured.

    Raises statistics.StatisticsError for fewer than two values.
    """
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def ratio_of_medians(values: list[float], base: list[float]) -> Spread:
    """The median of `values` over that of `base`, with the bounds of its 95 % confidence interval.

    Entry k of both was measured in round k. The interval is a percentile bootstrap over rounds (Efron and Tibshirani,
    An Introduction to the Bootstrap, chapter 13) from a fixed seed. Raises ValueError unless both have as many entries.
    """
    pairs = np.array(list(zip(values, base, strict=True)))
    rounds = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    above, below = np.moveaxis(np.median(pairs[rounds], axis=1), -1, 0)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(above / below, [tail, 1 - tail]).tolist()
    return Spread(median(values) / median(base), low, high, len(values))
