"""The registry of open sessions: who owns them, what may be done to them when, and when they expire."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Sequence

from app.domain import FinishReason, SamplingParams, SessionId, SessionState, StopRule
from app.errors import Busy, ContextTooLong, DjinnError, Draining, FieldOutOfRange, NotFound
from app.executor import EngineExecutor
from app.messages import (
    Cancel,
    Close,
    Fork,
    Inspect,
    MemoryMap,
    Open,
    Rewind,
    SessionMemory,
    Submit,
    TurnEvent,
)
from app.metrics import Metrics, TurnClock
from app.session import Session
from app.settings import Settings
from app.stream import Turn

RETRY_AFTER_S = 1


class SessionRegistry:
    """Every open session. Used on the event loop only."""

    def __init__(self, executor: EngineExecutor, settings: Settings, metrics: Metrics) -> None:
        self.executor = executor
        self.info = executor.engine.info
        self.draining = False
        self._settings = settings
        self._metrics = metrics
        self._sessions: dict[SessionId, Session] = {}

    def create(
        self, owner: str | None = None, *, metadata: dict[str, str] | None = None, ttl_s: int | None = None
    ) -> Session:
        """Open an empty session. Raises `Busy` at `max_sessions`, `Draining` during shutdown."""
        self._admit_session()
        session = Session(new_session_id(), owner, dict(metadata or {}), ttl_s)
        self.executor.post(lambda ticket: Open(ticket, session.id, owner or ""))
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str, owner: str | None = None) -> Session:
        """The owner's session of that id. Raises `NotFound`, also for another owner's session."""
        session = self._sessions.get(SessionId(session_id))
        if session is None or session.owner != owner or _has_expired(session, time.time()):
            raise NotFound(f"no session {session_id}", param="session_id")
        return session

    def page(
        self, owner: str | None = None, *, limit: int, after: str = "", state: SessionState | None = None
    ) -> list[Session]:
        """Up to `limit` of the owner's sessions with ids greater than `after`, oldest first."""
        found = sorted(
            session.id
            for session in self._sessions.values()
            if session.owner == owner and session.id > after and state in (None, session.state)
        )
        return [self._sessions[session_id] for session_id in found[:limit]]

    async def close(self, session: Session) -> None:
        """Close the session; when this returns, everything that it held is free. A running turn ends as cancelled."""
        self._forget(session)
        await self.executor.call(lambda ticket: Close(ticket, session.id))

    async def fork(self, session: Session) -> Session:
        """Open a session with the same history and shared KV. Raises `WrongState` unless idle, `Busy`, `Draining`."""
        self._admit_session()
        session.require(SessionState.IDLE, to="fork")
        child = Session(new_session_id(), session.owner, dict(session.metadata), session.ttl_s)
        child.history = session.history[:]
        self._sessions[child.id] = child  # before the wait, so that `max_sessions` counts it
        try:
            await self.executor.call(lambda ticket: Fork(ticket, session.id, child.id))
        except DjinnError:
            self._sessions.pop(child.id, None)
            raise
        except asyncio.CancelledError:  # the engine may have it already
            if child.id in self._sessions:
                self.drop(child)
            raise
        return child

    async def rewind(self, session: Session, to_token: int) -> None:
        """Drop the history from position `to_token` on. Raises `WrongState` unless idle, `FieldOutOfRange`."""
        session.require(SessionState.IDLE, to="rewind")
        if not 0 <= to_token <= len(session.history):
            raise FieldOutOfRange(f"to_token must be from 0 to {len(session.history)}", param="to_token")
        del session.history[to_token:]
        await self.executor.call(lambda ticket: Rewind(ticket, session.id, to_token))

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
        if self.waiting >= self._settings.max_queue:
            raise Busy(f"the queue is full ({self._settings.max_queue} turns wait)", retry_after_s=RETRY_AFTER_S)
        history = array("I", token_ids) if replace else session.history + array("I", token_ids)
        if not history:
            raise FieldOutOfRange("a turn needs at least 1 token to start from", param=param)
        clock = TurnClock(self._metrics)

        def observe(event: TurnEvent) -> None:
            clock.observe(event)
            session.usage.queue_ms, session.usage.prefill_ms = clock.queue_ms, clock.prefill_ms
            session.observe(event)

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
        session = self.create(owner, metadata=metadata)
        try:
            yield session
        finally:
            if session.state is not SessionState.CLOSED:
                self.drop(session)

    @property
    def waiting(self) -> int:
        """Turns in the queue."""
        return sum(session.state is SessionState.QUEUED for session in self._sessions.values())

    async def memory(self) -> MemoryMap:
        """The engine's memory map."""
        found: MemoryMap = await self.executor.call(Inspect)
        return found

    async def session_memory(self, session: Session) -> SessionMemory:
        """Where the session's KV is."""
        found: SessionMemory = await self.executor.call(lambda ticket: Inspect(ticket, session.id))
        return found

    @property
    def expired(self) -> list[Session]:
        """Sessions whose `ttl_s` has run out."""
        now = time.time()
        return [session for session in self._sessions.values() if _has_expired(session, now)]

    @property
    def busy(self) -> list[tuple[Session, Turn]]:
        """Sessions with a turn in them, and the turn."""
        return [(session, session.turn) for session in self._sessions.values() if session.busy and session.turn]

    def _admit_session(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down")
        if len(self._sessions) >= self._settings.max_sessions:
            raise Busy(f"{self._settings.max_sessions} sessions are open", retry_after_s=RETRY_AFTER_S)

    def _forget(self, session: Session) -> None:
        session.move(SessionState.CLOSED)
        del self._sessions[session.id]

    def drop(self, session: Session) -> None:
        """Close the session without waiting for the engine; one that has died holds nothing to free."""
        self._forget(session)
        if self.executor.failure is None:
            self.executor.post(lambda ticket: Close(ticket, session.id))


def new_session_id() -> SessionId:
    """A fresh id: the time in ms, so that ids sort by age, and 80 random bits, so that nobody can guess one."""
    return SessionId(f"ses_{time.time_ns() // 1_000_000:011x}{secrets.token_hex(10)}")


def _has_expired(session: Session, now: float) -> bool:
    return session.expires_at is not None and session.expires_at <= now
