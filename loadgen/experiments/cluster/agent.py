"""An agent of the density experiment that asks again where a cluster says so, and knows its session's history."""

from __future__ import annotations

from client import AsyncSession, AsyncSessions
from client.errors import DjinnError
from client.models import Usage
from loadgen.experiments.cluster.findings import Findings, WrongTurn
from loadgen.experiments.cluster.retrying import code_of, is_harmless, is_retryable, pause, retried
from loadgen.experiments.soak.recovery import settled
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.load.turn_clock import TurnClock, Wire
from loadgen.load.workload import Signals
from loadgen.targets import TargetSpec
from loadgen.targets.djinn import signal_leave, signal_return
from loadgen.targets.subject import greedy


class LostTurn(DjinnError):
    """A turn whose end the client had been told is not there any more, or another one in its place."""


class ClusterAgent:
    """One agent. Its session stays open when the agent is closed: it is asked for at the end of the run.

    `turns` are the tokens of its turns as it was told them, each with what was sent.
    """

    is_exact = True

    def __init__(self, number: int, spec: TargetSpec, signals: Signals, findings: Findings) -> None:
        self.number = number
        self.session: AsyncSession | None = None
        self.turns: list[tuple[TokenIds, TokenIds]] = []
        self.rests = False
        """Whether it is away between two turns."""
        self._findings, self._errors = findings, findings.retries.errors
        self._signals = signals
        self._wire = Wire()
        self._transport = spec.transport(self._wire.trace)

    @property
    def history(self) -> TokenIds:
        """What its session must have, as it was told."""
        return tuple(token for prompt, made in self.turns for token in (*prompt, *made))

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        """See `Agent.run_turn`. The clock runs through all tries. Raises `LostTurn` if an earlier turn is gone."""
        self._wire.clock = clock
        self.rests = False
        if self.session is None:
            self.session = await retried(self._errors, AsyncSessions(self._transport).create)
        failed = False
        while True:
            try:
                made, usage = await stream_turn(self.session, new_ids, completion_tokens, clock)
                break
            except DjinnError as error:
                if not is_retryable(error):
                    raise
                self._errors[code_of(error)] += 1
                if not failed:
                    self._findings.retries.turns.append((self.number, len(self.turns)))
                failed = True
                await pause(error)
                found = None if is_harmless(error) else await self._found(self.session, new_ids, completion_tokens)
            if found is not None:
                self._findings.retries.recovered += 1
                made, usage = found
                clock.tokens()
                break
        clock.over()
        self.turns.append((new_ids, made))
        resume_ms = None if failed else await self._resume_ms(self.session)
        return TurnCost(usage.prompt_tokens, len(made), usage.cached_tokens, usage.tokens_recomputed, resume_ms)

    async def _found(self, session: AsyncSession, new_ids: TokenIds, tokens: int) -> tuple[TokenIds, Usage] | None:
        """The turn, if it was done although its answer has not come. What was done of another is undone.

        Raises `LostTurn`.
        """
        known = self.history
        history = await retried(self._errors, lambda: settled(session))
        if history is None or history[: len(known)] != known:
            was = "gone" if history is None else f"another one, of {len(history)} tokens"
            raise self._lost(f"a history of {len(known)} tokens is {was}")
        new = history[len(known) :]
        if new[: len(new_ids)] == new_ids and len(new) == len(new_ids) + tokens:
            usage = (await retried(self._errors, session.refresh)).usage.last_turn
            if usage is not None:
                return new[len(new_ids) :], usage
        if new:
            await retried(self._errors, lambda: session.rewind(len(known)))
        return None

    def _lost(self, what: str) -> LostTurn:
        self._findings.lost.append(WrongTurn(self.number, len(self.turns) - 1, what))
        return LostTurn(what)

    async def _resume_ms(self, session: AsyncSession) -> dict[str, float]:
        info = await retried(self._errors, session.refresh)
        return info.usage.resume_ms.model_dump()

    async def leave(self, away_s: float | None) -> str | None:
        """See `signal_leave`."""
        phase = await retried(self._errors, lambda: signal_leave(self.session, self._signals, away_s))
        self.rests = True
        return phase

    async def come_back(self) -> str | None:
        """See `signal_return`."""
        self.rests = False
        return await retried(self._errors, lambda: signal_return(self.session, self._signals))

    async def close(self) -> None:
        """Close the connections."""
        self.rests = False
        await self._transport.close()


class ClusterAgents:
    """Makes the agents of one run, and has them all."""

    def __init__(self, spec: TargetSpec, signals: Signals, findings: Findings) -> None:
        self.every: list[ClusterAgent] = []
        self._spec, self._signals, self._findings = spec, signals, findings

    def new_agent(self) -> ClusterAgent:
        """The next one."""
        self.every.append(ClusterAgent(len(self.every), self._spec, self._signals, self._findings))
        return self.every[-1]


async def stream_turn(
    session: AsyncSession, new_ids: TokenIds, tokens: int, clock: TurnClock
) -> tuple[TokenIds, Usage]:
    """Take a turn of exactly so many tokens, greedily; `clock` is told of its events anew. Returns the tokens, and what
    the turn has cost.
    """
    clock.token_times_s.clear()
    async with session.stream(**greedy(new_ids, tokens)) as turn:
        async for event in turn:
            if event.token_ids:
                clock.tokens()
    return turn.turn.token_ids, turn.turn.usage
