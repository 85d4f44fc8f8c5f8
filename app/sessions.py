"""The registry of open sessions: who owns them, what may be done to them when, and when they expire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncIterator, Sequence

from app.domain import FinishReason, Phase, Residency, SamplingParams, SessionState, StopRule
from app.errors import Busy, ContextTooLong, Draining, FieldOutOfRange
from app.executor import EngineExecutor
from app.journal.keeper import SessionKeeper
from app.memory_map import MemoryMap
from app.messages import Cancel, Close, Fork, Inspect, Open, Rewind, SetPhase, Submit, TurnEvent, TurnFinished
from app.metrics import Metrics, TurnClock
from app.session import Session
from app.session_table import SessionTable, has_expired, new_session_id
from app.settings import Settings
from app.stream import Turn

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class SessionRegistry:
    """Every open session. Used on the event loop only."""

    def __init__(self, executor: EngineExecutor, settings: Settings, metrics: Metrics, keeper: SessionKeeper) -> None:
        self.executor = executor
        self.info = executor.engine.info
        self.draining = False
        self._settings = settings
        self._metrics = metrics
        self._keeper = keeper
        self.table = SessionTable(settings.max_sessions)
        executor.on_placed = self.table.place

    def create(
        self,
        owner: str | None = None,
        *,
        metadata: dict[str, str] | None = None,
        ttl_s: int | None = None,
        name: str | None = None,
        ephemeral: bool = False,
    ) -> Session:
        """Open an empty session. Raises `Busy` at `max_sessions`, `Draining` during shutdown."""
        self._admit_session()
        session = Session(new_session_id(), owner, dict(metadata or {}), ttl_s, name=name, ephemeral=ephemeral)
        self.executor.post(lambda ticket: Open(ticket, session.id, owner or ""))
        self.table.add(session)
        self._keeper.note(session)
        return session

    async def create_guaranteed(
        self, owner: str | None = None, *, metadata: dict[str, str] | None = None, ttl_s: int | None = None
    ) -> Session:
        """Open an empty session whose KV never gives way. Raises `Busy` also if no more of them can be promised."""
        session = Session(new_session_id(), owner, dict(metadata or {}), ttl_s, Residency.GUARANTEED)
        async with self.opening(session):
            await self.executor.call(lambda ticket: Open(ticket, session.id, owner or "", session.residency))
        return session

    @contextlib.asynccontextmanager
    async def opening(self, session: Session) -> AsyncIterator[None]:
        """Count the session while the engine opens it; then it is found. Raises `SessionLimit`, `Draining`."""
        self._admit_session()
        with self.table.opening(session):
            try:
                yield
            except asyncio.CancelledError:  # the engine may have it already
                self._post_close(session)
                raise

    async def keep(self, session: Session) -> None:
        """Return when a new session is durable. Raises `NotDurable` if it cannot be; then there is no such session."""
        self._keeper.note(session)
        try:
            await self.settled(session)
        except BaseException:  # a client that has gone does not know the session either
            if session.state is not SessionState.CLOSED:
                self.drop(session)
            raise

    async def settled(self, session: Session) -> None:
        """Return when all that has happened to the session is durable. Raises `NotDurable` if it cannot be."""
        await self._keeper.settled(session)

    async def reopen(self, session: Session) -> None:
        """Open a session that the journal has brought back, unless it has expired.

        A promise about its KV that there is no room for any more is dropped: the session is worth more.
        """
        if has_expired(session):
            self._keeper.forget(session)
            return
        self.table.add(session)
        try:
            await self._open_again(session)
        except Busy as error:
            logger.warning("session %s comes back as best_effort: %s", session.id, error.message)
            session.residency = Residency.BEST_EFFORT
            self._keeper.note(session)
            await self._open_again(session)
        if session.phase is not Phase.COMPUTE:
            await self.executor.call(lambda ticket: SetPhase(ticket, session.id, session.phase))

    async def close(self, session: Session) -> None:
        """Close the session; when this returns, everything that it held is free. A running turn ends as cancelled."""
        self._forget(session)
        await self.executor.call(lambda ticket: Close(ticket, session.id))
        await self.settled(session)

    async def fork(self, session: Session) -> Session:
        """Open a session with the same history and shared KV. Raises `WrongState` unless idle, `Busy`, `Draining`."""
        session.require(SessionState.IDLE, to="fork")
        child = Session(new_session_id(), session.owner, dict(session.metadata), session.ttl_s)
        child.history = session.history[:]
        async with self.opening(child):
            await self.executor.call(lambda ticket: Fork(ticket, session.id, child.id))
        await self.keep(child)
        return child

    async def rewind(self, session: Session, to_token: int) -> None:
        """Drop the history from position `to_token` on. Raises `WrongState` unless idle, `FieldOutOfRange`."""
        session.require(SessionState.IDLE, to="rewind")
        if not 0 <= to_token <= len(session.history):
            raise FieldOutOfRange(f"to_token must be from 0 to {len(session.history)}", param="to_token")
        del session.history[to_token:]
        self._keeper.note(session)
        await self.executor.call(lambda ticket: Rewind(ticket, session.id, to_token))
        await self.settled(session)

    def set_phase(self, session: Session, phase: Phase, resume_in_ms: float | None = None) -> None:
        """Say what the session is doing, and when it will go on, in ms from now. Raises `WrongState` unless idle."""
        with self._metrics.signal.time():
            session.require(SessionState.IDLE, to=f"set the phase to {phase}")
            session.phase = phase
            self.executor.post(lambda ticket: SetPhase(ticket, session.id, phase, resume_in_ms))
            self._keeper.note(session)

    def start_turn(
        self,
        session: Session,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        stop: StopRule,
        *,
        replace: bool = False,
        param: str = "prompt",
    ) -> Turn:
        """Queue a turn that appends `token_ids` to the history, or with `replace` makes them the history.

        Whoever starts a turn must `release` it, however it ends. Raises `WrongState` unless idle, `Busy` when the queue
        is full, `Draining`, and `FieldOutOfRange` if there is no token to start from; `param` names what the tokens
        came from.
        """
        if self.draining:
            raise Draining("the server is shutting down")
        session.require(SessionState.IDLE, to="start a turn")
        if self.table.waiting >= self._settings.max_queue:
            raise Busy(f"the queue is full ({self._settings.max_queue} turns wait)", retry_after_s=RETRY_AFTER_S)
        history = array("I", token_ids) if replace else session.history + array("I", token_ids)
        if not history:
            raise FieldOutOfRange("a turn needs at least 1 token to start from", param=param)
        clock = TurnClock(self._metrics)

        def observe(event: TurnEvent) -> None:
            clock.observe(event)
            usage = session.usage
            usage.queue_ms, usage.restore_ms, usage.prefill_ms = clock.queue_ms, clock.restore_ms, clock.prefill_ms
            session.observe(event)
            if isinstance(event, TurnFinished):
                self._keeper.note(session)

        turn = self.executor.start_turn(
            lambda ticket: Submit(ticket, session.id, tuple(token_ids), sampling, stop, replace), observe
        )
        session.begin(turn, history)
        return turn

    def room(
        self, context: int, max_tokens: int | None, *, param: str = "prompt", limit_param: str = "max_tokens"
    ) -> int:
        """How many tokens a turn on `context` tokens may generate: `max_tokens`, or what there is room for.

        Raises `ContextTooLong` if the context and `max_tokens` exceed the model's length; `param` names what the
        context came from, `limit_param` what `max_tokens` came from.
        """
        room = self.info.max_model_len - context
        wanted = 1 if max_tokens is None else max_tokens
        if room < wanted:
            raise ContextTooLong(
                f"this model's context is {self.info.max_model_len} tokens, but there are {context} and at least "
                f"{wanted} more are to be generated",
                param=limit_param if room >= 0 and max_tokens else param,
            )
        return room if max_tokens is None else max_tokens

    def cancel(
        self,
        session: Session,
        turn: Turn,
        keep: int | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> None:
        """Ask for the end of `turn`, without waiting. The first `keep` generated tokens stay (None: all)."""
        session.cut(turn, keep)
        if session.state is SessionState.IDLE:
            self._keeper.note(session)
        self.executor.post(lambda ticket: Cancel(ticket, session.id, turn.ticket, keep, reason))

    def release(self, session: Session, turn: Turn) -> None:
        """Let go of a turn: one that nobody reads any more must not run on. Call in a `finally`; raises nothing."""
        if not turn.ended.is_set() and self.executor.failure is None:
            self.cancel(session, turn)

    @contextlib.asynccontextmanager
    async def ephemeral(
        self, owner: str | None = None, *, metadata: dict[str, str] | None = None
    ) -> AsyncIterator[Session]:
        """A session for one turn: closed on the way out, which ends the turn if it still runs."""
        session = self.create(owner, metadata=metadata, ephemeral=True)
        try:
            yield session
        finally:
            if session.state is not SessionState.CLOSED:
                self.drop(session)

    async def memory(self) -> MemoryMap:
        """The engine's memory map."""
        found: MemoryMap = await self.executor.call(Inspect)
        return found

    def _admit_session(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down")
        self.table.admit()

    async def _open_again(self, session: Session) -> None:
        owner, token_ids = session.owner or "", tuple(session.history)
        await self.executor.call(lambda ticket: Open(ticket, session.id, owner, session.residency, token_ids))

    def _forget(self, session: Session) -> None:
        session.move(SessionState.CLOSED)
        self.table.remove(session)
        self._keeper.forget(session)

    def drop(self, session: Session) -> None:
        """Close the session without waiting for the engine; one that has died holds nothing to free."""
        self._forget(session)
        self._post_close(session)

    def _post_close(self, session: Session) -> None:
        if self.executor.failure is None:
            self.executor.post(lambda ticket: Close(ticket, session.id))
