"""When agents arrive."""

from __future__ import annotations

import numpy as np


def poisson_arrivals(agents: int, rate: float, rng: np.random.Generator) -> tuple[float, ...]:
    """Arrival times in seconds after the start of the run, ascending: a Poisson process of `rate` agents per second.

    The times are absolute, computed before the run: an agent that starts late does not push back those that follow, as
    it would if each waited for its gap after the one before. An infinite rate lets all arrive at 0.
    """
    gaps = rng.exponential(1.0 / rate, size=agents)
    return tuple(np.cumsum(gaps).tolist())
