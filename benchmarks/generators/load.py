"""What both generators are asked to put on the server."""

from dataclasses import dataclass
from math import inf

import numpy as np

from loadgen.load.arrivals import Arrivals, arrival_times
from loadgen.load.trace import AgentPlan, Trace, TurnPlan


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` prompts of `prompt_tokens`, each for exactly `completion_tokens`, that arrive as a Poisson process of
    `rate` per second; at infinite rate all at once.
    """

    name: str
    requests: int
    rate: float
    prompt_tokens: int
    completion_tokens: int

    def trace(self, seed: int) -> Trace:
        """One agent with one turn for each request. The first arrives at once, so that no generator's clock runs
        before there is work.
        """
        turns = (TurnPlan(self.prompt_tokens, self.completion_tokens, think_s=None, announced_s=None, tool=False),)
        times = arrival_times(Arrivals.POISSON, self.requests, self.rate, 1.0, np.random.default_rng(seed))
        return tuple(AgentPlan(time - times[0], turns) for time in times)


# Odd numbers of requests: the two generators define the median of an even number differently.
FULL = (
    Load("steady", requests=41, rate=1.5, prompt_tokens=192, completion_tokens=32),
    Load("burst", requests=31, rate=inf, prompt_tokens=192, completion_tokens=64),
)
"""A server that keeps up, for what a user waits; and one that has more than it can do, for what it can."""
QUICK = (
    Load("steady", requests=7, rate=2.0, prompt_tokens=64, completion_tokens=16),
    Load("burst", requests=7, rate=inf, prompt_tokens=64, completion_tokens=16),
)
