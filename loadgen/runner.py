"""Lets the agents of one run loose on one target."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from client import DjinnError, Timeout
from loadgen.prompts import TokenIds
from loadgen.records import Failure, Run, SignalRecord, TurnClock, TurnRecord
from loadgen.targets import Agent, Target
from loadgen.workload import AgentPlan

CLOSE_TIMEOUT_S = 10.0

COME_BACK_S = 0.1
"""How long before its next turn an agent says that it comes back."""


class WrongTokenCount(DjinnError):
    """The server generated fewer or more tokens than asked for, or showed none: the turn cannot be compared."""


class Runner:
    """One run against `target`, whose every turn generates `completion_tokens`.

    `execute` it once. `on_change` is called after each turn that completed or failed.
    """

    def __init__(self, target: Target, completion_tokens: int, on_change: Callable[[Run], None]) -> None:
        self._target = target
        self._completion_tokens = completion_tokens
        self._on_change = on_change
        self._run = Run()
        self._started = 0.0

    async def execute(self, plans: Sequence[AgentPlan], prompts: Sequence[Sequence[TokenIds]]) -> Run:
        """Run every agent to its end. If it is cancelled, it ends its agents and returns what it has."""
        self._started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as agents:
                for number, (plan, turns) in enumerate(zip(plans, prompts, strict=True)):
                    agents.create_task(self._live(number, plan, turns))
        except asyncio.CancelledError:
            self._run.interrupted = True
        self._run.duration_s = self._now()
        return self._run

    async def _live(self, number: int, plan: AgentPlan, turns: Sequence[TokenIds]) -> None:
        """One agent to its end. A turn that fails is its last: later ones would lack the context that it adds."""
        agent = self._target.new_agent()
        due_s = plan.arrival_s
        try:
            for turn, (new_ids, think_s) in enumerate(zip(turns, (*plan.thinks_s, None), strict=True)):
                await asyncio.sleep(due_s - self._now())
                record = await self._run_turn(agent, number, turn, due_s, new_ids)
                if record is None or think_s is None:
                    break
                due_s = record.sent_s + record.latency_s + think_s
                await self._announce(agent, number, due_s)
        finally:
            await self._close(agent, number)

    async def _announce(self, agent: Agent, number: int, due_s: float) -> None:
        """Tell the server that the agent thinks until `due_s`, and shortly before then that it comes back."""
        await self._signal(agent.leave(max(0.0, due_s - self._now())), number)
        await asyncio.sleep(due_s - COME_BACK_S - self._now())
        await self._signal(agent.come_back(), number)

    async def _signal(self, told: Awaitable[str | None], number: int) -> None:
        sent_s = self._now()
        try:
            phase = await told
        except DjinnError as error:
            self._fail(number, None, error)
            return
        if phase is not None:
            self._run.signals.append(SignalRecord(number, phase, sent_s, self._now() - sent_s))

    async def _run_turn(
        self, agent: Agent, number: int, turn: int, due_s: float, new_ids: TokenIds
    ) -> TurnRecord | None:
        """Run and record one turn; None if it did not complete."""
        sent_s = self._now()
        clock = TurnClock()
        try:
            cost = await agent.run_turn(new_ids, self._completion_tokens, clock)
            if cost.completion_tokens != self._completion_tokens:
                raise WrongTokenCount(f"{cost.completion_tokens} tokens instead of {self._completion_tokens}")
            if not clock.token_times_s:
                raise WrongTokenCount("the turn ended without an event that had tokens")
        except DjinnError as error:
            self._fail(number, turn, error)
            return None
        record = TurnRecord(number, turn, due_s, sent_s, tuple(clock.token_times_s), clock.over_s, cost)
        self._run.turns.append(record)
        self._on_change(self._run)
        return record

    async def _close(self, agent: Agent, number: int) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await agent.close()
        except DjinnError as error:
            self._fail(number, None, error)
        except TimeoutError:
            self._fail(number, None, Timeout(f"no answer to close within {CLOSE_TIMEOUT_S:.0f} s"))

    def _fail(self, number: int, turn: int | None, error: DjinnError) -> None:
        self._run.failures.append(Failure(number, turn, self._now(), type(error).__name__, error.message))
        self._on_change(self._run)

    def _now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._started
