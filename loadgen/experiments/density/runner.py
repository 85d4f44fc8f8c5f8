"""Lets the agents of one run loose on one target."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from client import DjinnError, Timeout
from loadgen.load.prompts import TokenIds
from loadgen.load.records import Failure, Run, SignalRecord, TurnRecord
from loadgen.load.trace import AgentPlan, Trace, TurnPlan
from loadgen.load.turn_clock import TurnClock
from loadgen.targets import Agent, MakesAgents

T = TypeVar("T")

OnChange = Callable[[Run, Collection[TurnClock]], None]
"""Told of a run that has changed, with the clocks of the turns that are in flight, which go on."""

CLOSE_TIMEOUT_S = 10.0

COME_BACK_S = 0.1
"""How long before its next turn an agent says that it comes back."""


class WrongTokenCount(DjinnError):
    """The server generated fewer or more tokens than asked for, or showed none: the turn cannot be compared."""


class Runner:
    """One run of the agents of `target`.

    `execute` it once. `on_change` is called at the start, and after each turn that completed or failed. A turn or a
    signal that takes longer than `turn_timeout_s` has failed.
    """

    def __init__(self, target: MakesAgents, on_change: OnChange, turn_timeout_s: float = math.inf) -> None:
        self._target = target
        self._on_change = on_change
        self._turn_timeout_s = turn_timeout_s
        self._run = Run()
        self._in_flight: set[TurnClock] = set()
        self._started = 0.0

    async def execute(self, trace: Trace, prompts: Sequence[Sequence[TokenIds]]) -> Run:
        """Run every agent to its end, with `prompts` as what each adds in each of its turns.

        If it is cancelled, it ends its agents and returns what it has.
        """
        agents = [self._target.new_agent() for _ in trace]
        self._started = time.perf_counter()
        self._changed()
        try:
            async with asyncio.TaskGroup() as lives:
                for number, (agent, plan, own_prompts) in enumerate(zip(agents, trace, prompts, strict=True)):
                    lives.create_task(self._live(agent, number, plan, own_prompts))
        except asyncio.CancelledError:
            self._run.interrupted = True
        self._run.duration_s = self._now()
        return self._run

    async def _live(self, agent: Agent, number: int, plan: AgentPlan, prompts: Sequence[TokenIds]) -> None:
        """One agent to its end. A turn that fails is its last: later ones would lack the context that it adds."""
        due_s = plan.arrival_s
        try:
            for turn, (planned, new_ids) in enumerate(zip(plan.turns, prompts, strict=True)):
                await asyncio.sleep(due_s - self._now())
                record = await self._run_turn(agent, number, turn, due_s, planned, new_ids)
                if record is None or planned.think_s is None:
                    break
                over_s = record.sent_s + record.latency_s
                due_s = over_s + planned.think_s
                announced_s = None if planned.announced_s is None else over_s + planned.announced_s
                await self._announce(agent, number, due_s, announced_s)
        finally:
            await self._close(agent, number)

    async def _announce(self, agent: Agent, number: int, due_s: float, announced_s: float | None) -> None:
        """Tell the server that the agent comes back at `announced_s`, and shortly before `due_s` that it does."""
        away_s = None if announced_s is None else max(0.0, announced_s - self._now())
        await self._signal(agent.leave(away_s), number)
        await asyncio.sleep(due_s - COME_BACK_S - self._now())
        await self._signal(agent.come_back(), number)

    async def _signal(self, told: Awaitable[str | None], number: int) -> None:
        sent_s = self._now()
        try:
            phase = await within(self._turn_timeout_s, told)
        except DjinnError as error:
            self._fail(number, None, error)
            return
        if phase is not None:
            self._run.signals.append(SignalRecord(number, phase, sent_s, self._now() - sent_s))

    async def _run_turn(
        self, agent: Agent, number: int, turn: int, due_s: float, planned: TurnPlan, new_ids: TokenIds
    ) -> TurnRecord | None:
        """Run and record one turn; None if it did not complete."""
        clock = TurnClock()
        self._in_flight.add(clock)
        try:
            cost = await within(self._turn_timeout_s, agent.run_turn(new_ids, planned.completion_tokens, clock))
            if agent.is_exact and cost.completion_tokens != planned.completion_tokens:
                raise WrongTokenCount(f"{cost.completion_tokens} tokens instead of {planned.completion_tokens}")
            if not clock.token_times_s:
                raise WrongTokenCount("the turn ended without an event that had tokens")
        except DjinnError as error:
            self._in_flight.discard(clock)
            self._fail(number, turn, error)
            return None
        self._in_flight.discard(clock)
        sent_s, token_times_s = clock.started - self._started, tuple(clock.token_times_s)
        record = TurnRecord(number, turn, due_s, sent_s, token_times_s, clock.over_s, cost, planned.tool)
        self._run.turns.append(record)
        self._changed()
        return record

    async def _close(self, agent: Agent, number: int) -> None:
        try:
            await within(CLOSE_TIMEOUT_S, agent.close())
        except DjinnError as error:
            self._fail(number, None, error)

    def _fail(self, number: int, turn: int | None, error: DjinnError) -> None:
        self._run.failures.append(Failure(number, turn, self._now(), type(error).__name__, error.message))
        self._changed()

    def _changed(self) -> None:
        self._on_change(self._run, self._in_flight)

    def _now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._started


async def within(seconds: float, answer: Awaitable[T]) -> T:
    """The answer. Raises `Timeout` if it does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise Timeout(f"no answer within {seconds:g} s") from None
