"""When agents arrive."""

from enum import StrEnum

import numpy as np


class Arrivals(StrEnum):
    """How the gaps between arrivals are distributed; their mean is the same for all."""

    POISSON = "poisson"
    """Exponentially: agents know nothing of each other."""
    GAMMA = "gamma"
    """By a gamma distribution, whose shape is the burstiness."""
    CONSTANT = "constant"
    """All the same."""


def arrival_times(
    arrivals: Arrivals, agents: int, rate: float, burstiness: float, rng: np.random.Generator
) -> tuple[float, ...]:
    """Arrival times in seconds after the start of the run, ascending, of `rate` agents per second on average.

    The times are absolute, computed before the run: an agent that starts late does not push back those that follow, as
    it would if each waited for its gap after the one before. An infinite rate lets all arrive at 0.

    `burstiness` is used by gamma arrivals alone, with the meaning that it has in `vllm bench serve`: the shape of the
    gaps' distribution, whose scale is 1 / (rate * burstiness). 1 is a Poisson process, less is burstier, more is more
    even.
    """
    gap = 1.0 / rate
    match arrivals:
        case Arrivals.POISSON:
            gaps = rng.exponential(gap, agents)
        case Arrivals.GAMMA:
            gaps = rng.gamma(burstiness, gap / burstiness, agents)
        case Arrivals.CONSTANT:
            gaps = np.full(agents, gap)
    return tuple(np.cumsum(gaps).tolist())
