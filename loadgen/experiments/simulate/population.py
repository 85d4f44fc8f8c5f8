"""The agents of a cluster of any size, drawn while they arrive."""

from collections.abc import Iterator
from dataclasses import replace

from loadgen.load.trace import AgentPlan
from loadgen.load.workload import Workload, plan_trace

BLOCK = 50_000
"""Agents drawn at once. So many live in memory beside those that have arrived."""
STRIDE = 1_000_003
"""Between the seeds of two blocks."""


def population(load: Workload, replicas: int) -> Iterator[AgentPlan]:
    """`load` for each of the replicas, in the order of arrivals: as many times the agents, as many times as often.

    Up to `BLOCK` agents these are those of `density`'s trace. More follow each other in blocks, whose arrivals go on.
    """
    left, began_s, block = load.agents * replicas, 0.0, 0
    while left:
        count = min(left, BLOCK)
        part = replace(load, agents=count, rate=load.rate * replicas, seed=load.seed + block * STRIDE)
        last_s = began_s
        for agent in plan_trace(part):
            last_s = began_s + agent.arrival_s
            yield agent if not block else AgentPlan(last_s, agent.turns)
        left, began_s, block = left - count, last_s, block + 1
