"""Percentiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

FEWEST_SAMPLES = {"p50": 2, "p90": 10, "p95": 20, "p99": 100}
"""Of fewer, a percentile is no more than the greatest of them: a share q needs 1 / (1 - q) samples."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of `count` samples, interpolated linearly between neighbours, in the unit of the samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution | None:
        """The distribution of the samples; None if there are none."""
        values = np.fromiter(samples, float)
        if not values.size:
            return None
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        return cls(values.size, float(values.mean()), p50, p90, p95, p99, float(values.max()))


def percentile(name: str, shown: str, samples: int) -> str:
    """`shown`, the percentile `name` of so many samples, or that they are too few for it."""
    return shown if samples >= FEWEST_SAMPLES[name] else f"too few samples (n={samples})"
