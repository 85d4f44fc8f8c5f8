"""What every agent does and when, decided before the run from the seed alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from loadgen.arrivals import poisson_arrivals
from loadgen.errors import LoadgenError


class Signals(StrEnum):
    """What agents tell a Djinn server about their think times."""

    ETA = "eta"
    """When they begin, and how long they will take."""
    READY = "ready"
    """When they begin, and shortly before they end."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Workload:
    """The load. Lengths in tokens, times in seconds as they would be at `time_scale` 1, `rate` in agents per second.

    The first prompt has `context` tokens, of which the first `system_tokens` are the same for every agent; every later
    turn adds `resume_tokens` of new text. Every turn generates exactly `completion_tokens`. Between turns an agent
    thinks for a time drawn evenly from `think`, (low, high), and says so to servers that can be told. Arrival and think
    times are multiplied by `time_scale`.

    Raises `LoadgenError` if a value is outside its range.
    """

    agents: int = 8
    rate: float = 1.0
    context: int = 1024
    turns: int = 3
    think: tuple[float, float] = (5.0, 15.0)
    system_tokens: int = 128
    resume_tokens: int = 64
    completion_tokens: int = 64
    seed: int = 0
    time_scale: float = 1.0
    signals: Signals = Signals.ETA

    def __post_init__(self) -> None:
        for name in ("agents", "context", "turns", "resume_tokens", "completion_tokens"):
            if getattr(self, name) < 1:
                raise LoadgenError(f"{name} must be at least 1")
        if self.seed < 0:
            raise LoadgenError("seed must be at least 0")
        if not self.rate > 0:
            raise LoadgenError("rate must be above 0")
        if not 0 < self.time_scale < math.inf:
            raise LoadgenError("time_scale must be above 0 and finite")
        low, high = self.think
        if not 0 <= low <= high < math.inf:
            raise LoadgenError("think must be LOW:HIGH with 0 <= LOW <= HIGH, in seconds")
        if not 0 <= self.system_tokens < self.context:
            raise LoadgenError(
                f"system_tokens is {self.system_tokens}, but must be from 0 to context - 1, {self.context - 1}"
            )

    @property
    def final_tokens(self) -> int:
        """Length of an agent's history at the end of its last turn."""
        return self.context + (self.turns - 1) * self.resume_tokens + self.turns * self.completion_tokens


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """When an agent arrives, and how long it thinks after each turn but the last; seconds of the run's own clock."""

    arrival_s: float
    thinks_s: tuple[float, ...]


def plan_agents(workload: Workload) -> tuple[AgentPlan, ...]:
    """The agents in order of arrival; equal for equal workloads.

    Arrivals and think times have a random stream each: more turns leave the arrivals as they were.
    """
    for_arrivals, for_thinks = np.random.default_rng(workload.seed).spawn(2)
    arrivals = poisson_arrivals(workload.agents, workload.rate, for_arrivals)
    thinks = for_thinks.uniform(*workload.think, size=(workload.agents, workload.turns - 1))
    return tuple(
        AgentPlan(arrival * workload.time_scale, tuple((row * workload.time_scale).tolist()))
        for arrival, row in zip(arrivals, thinks, strict=True)
    )
