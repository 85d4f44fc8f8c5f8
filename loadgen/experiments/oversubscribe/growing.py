"""Sessions that take turns until they have their length."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress

from client import AsyncSession, DjinnError
from loadgen.experiments.oversubscribe.findings import Budget, Findings, GrownTurn, TurnFailure
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.load.prompts import TokenIds
from loadgen.targets.subject import Subject, greedy

Histories = Sequence[Sequence[TokenIds]]
"""What each session adds in each of its turns."""


class Crowd:
    """All sessions of a run. They stay open until it is over: what they have grown to, the server has to keep."""

    def __init__(self, subject: Subject, plan: OversubscribePlan, histories: Histories, findings: Findings) -> None:
        self._subject, self._plan, self._histories, self._findings = subject, plan, histories, findings
        self._sessions: dict[int, AsyncSession] = {}
        self._failed: set[int] = set()
        self._locks = [asyncio.Lock() for _ in range(plan.sessions)]
        self._tokens = [0] * plan.sessions
        self._stack = AsyncExitStack()
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start of the run."""
        return time.perf_counter() - self._started

    def demand(self, budget: Budget) -> int:
        """Bytes of KV that all histories come to."""
        return sum(budget.demand(tokens) for tokens in self._tokens)

    async def grow(self, step: Callable[[], None]) -> None:
        """Run every turn: all sessions' first, then all their second, and so on, `concurrency` at once.

        A turn that fails is its session's last; the others go on.
        """
        order = iter([(turn, number) for turn in range(self._plan.turns) for number in range(self._plan.sessions)])
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.concurrency):
                    group.create_task(self._work(order, step))
        finally:
            self._findings.duration_s = self.seconds

    async def close(self) -> None:
        """Close every session that there is. Raises `DjinnError`."""
        await self._stack.aclose()

    async def _work(self, order: Iterator[tuple[int, int]], step: Callable[[], None]) -> None:
        for turn, number in order:
            async with self._locks[number]:
                if number not in self._failed:
                    await self._try_turn(number, turn)
            step()

    async def _try_turn(self, number: int, turn: int) -> None:
        try:
            await self._take_turn(number, turn)
        except DjinnError as error:
            self._failed.add(number)
            self._findings.turn_failures.append(
                TurnFailure(number, turn, self.seconds, type(error).__name__, error.message)
            )

    async def _take_turn(self, number: int, turn: int) -> None:
        if number not in self._sessions:
            self._sessions[number] = await self._stack.enter_async_context(self._subject.session())
        session, text = self._sessions[number], self._histories[number][turn]
        sent_s = self.seconds
        self._tokens[number] += len(text)
        done = await session.generate(**greedy(text, self._plan.tokens))
        self._tokens[number] += len(done.token_ids)
        usage = done.usage
        self._findings.turns.append(
            GrownTurn(
                number,
                turn,
                sent_s,
                self.seconds - sent_s,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.tokens_recomputed,
                done.token_ids,
            )
        )
        with suppress(DjinnError):  # only a hint: what it would have helped is measured in the turns
            await session.set_phase("io_wait")
