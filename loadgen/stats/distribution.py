"""Percentiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


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
