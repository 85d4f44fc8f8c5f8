"""The registry of open sessions: who owns them, what may be done to them when, and when they expire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from app.bridge.executor import EngineExecutor
from app.domain.errors import Busy, Draining, FieldOutOfRange
from app.domain.memory_map import MemoryMap
from app.domain.values import Phase, Residency, SessionState
from app.messages import Close, Fork, Inspect, Open, Rewind, SetPhase
from app.metrics.turns import Metrics
from app.sessions.breakpoints import Breakpoints
from app.sessions.keeper import SessionKeeper
from app.sessions.pauses import Pauses
from app.sessions.session import Session
from app.sessions.table import has_expired, new_session_id
from app.sessions.turns import SessionTurns
from app.settings import Settings
from app.text.tokenizer import Tokens

logger = logging.getLogger(__name__)


class SessionRegistry(SessionTurns):
    """Every open session. Used on the event loop only."""

    def __init__(
        self, executor: EngineExecutor, settings: Settings, metrics: Metrics, keeper: SessionKeeper, tokens: Tokens
    ) -> None:
        super().__init__(executor, settings, metrics, keeper)
        self.breakpoints = Breakpoints(executor, keeper, self.table, part_tokens=self.part_tokens)
        self.pauses = Pauses(self, tokens)
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
                self.abandon(session)
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
        """Open a session with the same history, breakpoints and shared KV; that of a paused one is paused too.

        Raises `WrongState` unless idle or paused, `Busy`, `Draining`.
        """
        session.require(SessionState.IDLE, SessionState.PAUSED, to="fork")
        child = Session(new_session_id(), session.owner, dict(session.metadata), session.ttl_s)
        child.history = session.history[:]
        child.breakpoints, child.interventions = dict(session.breakpoints), session.interventions
        place = self.pauses.place(session)
        async with self.opening(child):
            if place is None:
                await self.executor.call(lambda ticket: Fork(ticket, session.id, child.id))
            else:
                await self.pauses.fork(session, child, place)
        await self.keep(child)
        return child

    async def rewind(self, session: Session, to_token: int) -> None:
        """Drop the history from position `to_token` on. Raises `WrongState` unless idle, `FieldOutOfRange`."""
        session.require(SessionState.IDLE, to="rewind")
        if not 0 <= to_token <= len(session.history):
            raise FieldOutOfRange(f"to_token must be from 0 to {len(session.history)}", param="to_token")
        session.truncate(to_token)
        self._keeper.note(session)
        await self.executor.call(lambda ticket: Rewind(ticket, session.id, to_token))
        await self.settled(session)

    def set_phase(self, session: Session, phase: Phase, resume_in_ms: float | None = None) -> None:
        """Say what the session is doing, and when it will go on, in ms from now.

        Raises `WrongState` unless idle or paused.
        """
        with self._metrics.signal.time():
            session.require(SessionState.IDLE, SessionState.PAUSED, to=f"set the phase to {phase}")
            session.phase = phase
            self.executor.post(lambda ticket: SetPhase(ticket, session.id, phase, resume_in_ms))
            self._keeper.note(session)

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
        await self.executor.call(
            lambda ticket: Open(
                ticket,
                session.id,
                session.owner or "",
                session.residency,
                tuple(session.history),
                tuple(session.breakpoints.values()),
                session.interventions,
            )
        )

    def _forget(self, session: Session) -> None:
        session.move(SessionState.CLOSED)
        self.table.remove(session)
        self._keeper.forget(session)

    def drop(self, session: Session) -> None:
        """Close the session without waiting for the engine; one that has died holds nothing to free."""
        self._forget(session)
        self._close_in_engine(session)

    def abandon(self, session: Session) -> None:
        """Close a session that nobody has found yet, without waiting for the engine: nothing more is noted."""
        session.move(SessionState.CLOSED)
        self._close_in_engine(session)

    def _close_in_engine(self, session: Session) -> None:
        if self.executor.failure is None:
            self.executor.post(lambda ticket: Close(ticket, session.id))
