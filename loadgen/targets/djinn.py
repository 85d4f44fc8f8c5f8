"""A Djinn server through its own protocol: only the new tokens of a turn travel."""

from __future__ import annotations

from client import AsyncSession, AsyncSessions
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.load.turn_clock import TurnClock, Wire
from loadgen.load.workload import Signals
from loadgen.targets.base import MODELS, TargetSpec, check_context, tokenize_call


class DjinnTarget:
    """A Djinn server, whose agents tell it of their think times in the way of `signals`."""

    def __init__(self, spec: TargetSpec, signals: Signals) -> None:
        self.spec = spec
        self._signals = signals
        self._transport = spec.transport()

    async def prepare(self, tokens: int) -> None:
        check_context(self.spec, await self._transport.send(MODELS), tokens)

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        return await self._transport.send(tokenize_call(text, special))

    def new_agent(self) -> DjinnAgent:
        """An agent whose session is opened with its first turn, and counts as part of it."""
        return DjinnAgent(self.spec, self._signals)

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()


class DjinnAgent:
    """An agent whose history is a session on the server, on connections of its own."""

    is_exact = True

    def __init__(self, spec: TargetSpec, signals: Signals) -> None:
        self._wire = Wire()
        self._transport = spec.transport(self._wire.trace)
        self._sessions = AsyncSessions(self._transport)
        self._signals = signals
        self._session: AsyncSession | None = None

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        """Send the new tokens and read the events of the turn; once it is over, ask where its time went."""
        self._wire.clock = clock
        if self._session is None:
            self._session = await self._sessions.create()
        running = self._session.stream(
            token_ids=new_ids, max_tokens=completion_tokens, ignore_eos=True, temperature=0.0
        )
        async with running as turn:
            async for event in turn:
                if event.token_ids:
                    clock.tokens()
        clock.over()
        usage = turn.turn.usage
        resume_ms = (await self._session.refresh()).usage.resume_ms
        return TurnCost(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            recomputed_tokens=usage.tokens_recomputed,
            resume_ms=resume_ms.model_dump(),
            token_ids=turn.turn.token_ids,
        )

    async def leave(self, away_s: float | None) -> str | None:
        """See `signal_leave`."""
        return await signal_leave(self._session, self._signals, away_s)

    async def come_back(self) -> str | None:
        """See `signal_return`."""
        return await signal_return(self._session, self._signals)

    async def close(self) -> None:
        """Close the session, if there is one, for the server to free what it held; and the connections."""
        try:
            if self._session is not None:
                await self._session.close()
        finally:
            await self._transport.close()


async def signal_leave(session: AsyncSession | None, signals: Signals, away_s: float | None) -> str | None:
    """Send `io_wait`, with the time of return if there is one and signals have it; returns the phase."""
    if session is None or signals is Signals.NONE:
        return None
    resume_in_ms = 1000 * away_s if signals is Signals.ETA and away_s is not None else None
    return (await session.set_phase("io_wait", resume_in_ms=resume_in_ms)).phase


async def signal_return(session: AsyncSession | None, signals: Signals) -> str | None:
    """Send `ready`, unless the server knows the time of return; returns the phase."""
    if session is None or signals is not Signals.READY:
        return None
    return (await session.set_phase("ready")).phase
