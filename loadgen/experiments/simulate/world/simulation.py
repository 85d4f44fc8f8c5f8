"""One simulation from its first agent to its last."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import process_time
from typing import TYPE_CHECKING, Any

from simpy import Environment

from loadgen.errors import LoadgenError
from loadgen.experiments.simulate.costs import Costs
from loadgen.experiments.simulate.plan import ClusterPlan, Policy
from loadgen.experiments.simulate.world.front import Front
from loadgen.experiments.simulate.world.operations import Operations
from loadgen.experiments.simulate.world.session import Session, Turn
from loadgen.experiments.simulate.world.tally import Tally
from loadgen.load.trace import AgentPlan
from loadgen.load.workload import Signals

if TYPE_CHECKING:
    from simpy import Event

COME_BACK_S = 0.1
"""How long before its next turn an agent says that it comes back, as in `density`."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, without their whole parts, spread evenly from 0 to 1 however many they are."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of one simulation. `duration_s` is of the simulated time, `took_s` of a processor."""

    tally: Tally
    duration_s: float
    took_s: float


def simulate(
    plan: ClusterPlan,
    policy: Policy,
    costs: Costs,
    trace: Iterable[AgentPlan],
    signals: Signals = Signals.ETA,
    system_tokens: int = 0,
) -> Simulated:
    """Let the agents of `trace`, in the order of their arrivals, live on the cluster.

    Whole blocks of the first `system_tokens` of each are in every replica's prefix cache. Equal arguments give equal
    results. Raises `LoadgenError` for a session that no device holds.
    """
    began = process_time()
    world = _World(plan, policy, costs, signals, system_tokens // plan.block_tokens * plan.block_tokens)
    with _without_collections():
        world.run(trace)
    return Simulated(world.tally, world.env.now, process_time() - began)


class _World:
    def __init__(self, plan: ClusterPlan, policy: Policy, costs: Costs, signals: Signals, cached_tokens: int) -> None:
        self.env, self.tally = Environment(), Tally()
        self._plan, self._costs, self._signals = plan, costs, signals
        self._cached_tokens = cached_tokens
        self._front = Front(self.env, plan, policy, costs, self.tally)
        Operations(self.env, plan, costs, self._front, self.tally).start()
        self._over = self.env.event()
        self._alive = self._turns = 0
        self._all_have_come = False

    def run(self, trace: Iterable[AgentPlan]) -> None:
        self.env.process(self._arrive(trace))
        self.env.run(until=self._over)

    def _arrive(self, trace: Iterable[AgentPlan]) -> Generator[Event, Any, None]:
        for number, agent in enumerate(trace):
            tokens = sum(turn.new_tokens + turn.completion_tokens for turn in agent.turns) - self._cached_tokens
            if tokens + self._plan.block_tokens > self._plan.device_tokens:
                raise LoadgenError(f"agent {number} has {tokens} tokens at its end, more than a device holds")
            yield self.env.timeout(max(0.0, agent.arrival_s - self.env.now))
            self._alive += 1
            self.tally.sessions += 1
            self.env.process(self._live(Session(number), agent))
        self._all_have_come = True
        if not self._alive:
            self._over.succeed()

    def _live(self, session: Session, agent: AgentPlan) -> Generator[Event, Any, None]:
        env, first_byte_s = self.env, self._costs.first_byte_s + self._plan.front_s
        away_s, early_s = 0.0, self._costs.opening_s
        for number, planned in enumerate(agent.turns):
            sent_s = env.now + away_s
            yield env.timeout(away_s + first_byte_s + early_s)
            new = planned.new_tokens - (0 if number else self._cached_tokens)
            self._turns += 1
            luck = self._turns * GOLDEN % 1
            turn = Turn(session, number, new, planned.completion_tokens, sent_s, env.event(), luck)
            self._front.submit(turn)
            yield turn.done
            early_s = 0.0
            if planned.think_s is not None:
                away_s = planned.think_s
                self._leave(session, planned.announced_s, away_s)
        self._front.place_of(session).forget(session)
        self._alive -= 1
        if self._all_have_come and not self._alive:
            self._over.succeed()

    def _leave(self, session: Session, announced_s: float | None, away_s: float) -> None:
        place, signals = self._front.place_of(session), self._signals
        if signals is Signals.ETA and announced_s is not None:
            place.leave(session, announced_s)
        elif signals is Signals.NONE:
            place.leave(session, None)
        else:
            place.leave(session, None, prefetch_s=max(0.0, away_s - COME_BACK_S))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Millions of objects end with their references. To look for cycles among them takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
