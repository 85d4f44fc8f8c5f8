"""The registry of open sessions: opened, closed, forked, rewound."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, assert_never

from app.domain.errors import (
    EngineAway,
    EngineError,
    EngineStalled,
    FieldOutOfRange,
    JournalUnavailable,
    NotDurable,
    WrongState,
)
from app.domain.homes import Home, new_session_id
from app.domain.memory_map import MemoryMap
from app.domain.values import Adapter, ForkPoint, Phase, Quotas, Residency, SessionId, SessionState, Ticket
from app.engine_process.executor import EngineExecutor
from app.engine_process.turn import Turn
from app.logs import is_background
from app.messages import Close, Command, Fork, Inspect, Lacking, Notice, Placed, Rewind, SetPhase, Spent
from app.sessions.adapters import Adapters
from app.sessions.charges import Charges, logprob_budget
from app.sessions.keeper import SessionKeeper
from app.sessions.keyed import KeyedRequest
from app.sessions.pauses import Pauses
from app.sessions.session import Session
from app.sessions.side_work import SideWork
from app.sessions.table import SessionTable
from app.sessions.tool_waits import ToolWaits, expected_wait
from app.sessions.turns import Turns
from app.sessions.whitebox import Whitebox
from app.settings import Settings
from app.telemetry.metrics import Metrics
from app.text.tokenizer import Tokens

if TYPE_CHECKING:
    from app.telemetry.spans import SpanTraces

SHARE = 0.05
"""Of the engine's time, that all maps together take."""
LONGEST_REST_S = 1.0
"""A delayed map delays its readers for this long at most."""
PATIENCE_S = 5.0
"""How long metrics, findings and the live stream wait for the engine: half of the time that Prometheus waits for them,
and a third of the silence after which the page takes the server to be away.
"""


class MemoryReads:
    """Has one map made at a time, for all who have asked by then, and rests after it. Used on the event loop only."""

    def __init__(self, executor: EngineExecutor) -> None:
        self._executor = executor
        self._next: asyncio.Task[MemoryMap] | None = None
        """One that the engine has not been asked for yet."""
        self._made = asyncio.Lock()
        self._rests_until = 0.0

    async def read(self) -> MemoryMap:
        """The engine's memory map, as it is now or a moment later. Raises what `EngineExecutor.call` raises."""
        self._executor.check()  # a map that is waited for may never come
        if self._next is None:
            self._next = asyncio.create_task(self._make())
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())  # its readers may have left
        return await asyncio.shield(self._next)

    async def try_read(self) -> MemoryMap | None:
        """The map, or None if the engine is away, or does not answer soon: it may hang."""
        with contextlib.suppress(EngineError, EngineAway, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                return await self.read()
        return None

    async def _make(self) -> MemoryMap:
        async with self._made:
            await asyncio.sleep(max(0.0, self._rests_until - time.perf_counter()))
            self._next = None  # later readers want a newer one
            found: MemoryMap = await self._executor.call(Inspect, stall_ends_it=True)
            self._rests_until = time.perf_counter() + min(LONGEST_REST_S, found.seconds * (1 / SHARE - 1))
            return found


class SessionRegistry:
    """Every open session, and what can be done to them. Used on the event loop only.

    Routes reach through it: `table` finds sessions, `turns` starts turns, `pauses` ends and resumes them.
    """

    def __init__(
        self,
        executor: EngineExecutor,
        table: SessionTable,
        keeper: SessionKeeper,
        tokens: Tokens,
        metrics: Metrics,
        settings: Settings,
        quotas: Quotas,
        adapters: Adapters,
        traces: SpanTraces | None = None,
    ) -> None:
        self.executor, self.adapters = executor, adapters
        self.table = table
        self.keeper = keeper
        self._replica = settings.replica
        self.metrics = metrics
        self.part_tokens = min(settings.max_step_tokens, executor.engine.info.max_model_len)
        """Most tokens that one pass of a session has."""
        self.whitebox = Whitebox(executor, keeper)
        self.pauses = Pauses(executor, table, keeper)
        reads = MemoryReads(executor)
        self.memory, self.try_memory = reads.read, reads.try_read
        self.tool_waits = ToolWaits()
        self.side_work = SideWork(table.others_run)
        room = logprob_budget(int(settings.max_logprobs_bytes))
        charges = Charges(table, quotas, room, executor.engine.info)
        self.turns = Turns(
            executor,
            table,
            keeper,
            tokens,
            metrics,
            self.pauses,
            charges,
            self.side_work,
            self.tool_waits,
            adapters,
            settings.max_turns,
            traces,
        )

    def new_id(self) -> SessionId:
        """A fresh id, which names this server if it is one of a cluster."""
        return new_session_id(self._replica)

    def make_room(self, owner: str | None, count: int = 1) -> None:
        """Close as many sessions that may give way as must, before the owner opens `count` more.

        Raises `TenantLimit` or `SessionLimit` if that is not enough, `Draining`, and `EngineAway`; then none has
        closed.
        """
        giving = self.table.giving_way(owner, count)
        self.executor.check()
        for session in giving:
            self.drop(session)

    def check_room(self, owner: str | None) -> None:
        """Raise what `make_room` would raise now, and close nothing."""
        self.table.giving_way(owner, 1)
        self.executor.check()

    def create(
        self,
        owner: str | None = None,
        *,
        metadata: dict[str, str] | None = None,
        ttl_s: int | None = None,
        name: str | None = None,
        ephemeral: bool = False,
        unseen: bool = False,
        adapter: Adapter | None = None,
        prefix: tuple[Session, int] | None = None,
    ) -> Session:
        """Open an empty session, or with a `prefix` one that has the first tokens of an idle session, with their KV.

        Raises `TenantLimit`, `SessionLimit` if none gives way, `Draining` during shutdown.
        """
        self.make_room(owner)
        labels = dict(metadata or {})
        session = Session(self.new_id(), owner, labels, ttl_s, name=name, ephemeral=ephemeral, adapter=adapter)
        session.background, session.unseen = ephemeral and is_background(), unseen
        opening: Callable[[Ticket], Command] = session.opening
        if prefix is not None:
            parent, length = prefix
            opening = partial(Fork, session=parent.id, child=session.id)
            session.history, session.namespace = parent.history[:length], parent.namespace
        self.executor.post(opening)
        if prefix is not None and len(session.history) < len(prefix[0].history):
            self.executor.post(lambda ticket: Rewind(ticket, session.id, len(session.history)))
        self.table.add(session)
        self.keeper.note(session)
        return session

    async def create_guaranteed(
        self,
        owner: str | None = None,
        *,
        metadata: dict[str, str] | None = None,
        ttl_s: int | None = None,
        adapter: Adapter | None = None,
    ) -> Session:
        """Open an empty session whose KV never gives way. Raises `Busy` also if no more of them can be promised."""
        self.table.require_guarantee(owner)
        labels = dict(metadata or {})
        session = Session(self.new_id(), owner, labels, ttl_s, Residency.GUARANTEED, adapter=adapter)
        async with self.opening(session):
            await self.executor.call(session.opening, stall_ends_it=True)
        return session

    @contextlib.asynccontextmanager
    async def opening(self, session: Session) -> AsyncIterator[None]:
        """Count the session while the engine opens it; then it is found. Raises what `make_room` raises."""
        self.make_room(session.owner)
        with self.table.opening(session):
            try:
                yield
            except (asyncio.CancelledError, EngineStalled):  # the engine may have it already, or soon
                self.abandon(session)
                raise

    async def keep(self, session: Session, keyed: KeyedRequest | None = None) -> None:
        """Return when a new session is durable, and with it that `keyed` has opened it. Raises `JournalUnavailable`;
        then there is no such session.
        """
        self.keeper.note(session, keyed=() if keyed is None else [keyed.record(session.id)])
        try:
            await self.keeper.settled(session)
        except BaseException as error:  # a client that has gone does not know the session either
            if session.state is not SessionState.CLOSED:
                self.drop(session)
            if isinstance(error, NotDurable):
                raise JournalUnavailable(f"no session was opened: {error.reason}") from error
            raise
        if keyed is not None:
            keyed.session, keyed.is_done = session.id, True

    async def close(self, session: Session) -> None:
        """Close the session; when this returns, everything that it held is free. A running turn ends as cancelled.

        Raises `NotDurable`.
        """
        self.forget(session)
        if self.executor.stall is not None:
            self._close_in_engine(session)  # which does it when it goes on
        else:
            with contextlib.suppress(EngineAway):  # an engine that has died holds nothing of it
                await self.executor.call(lambda ticket: Close(ticket, session.id), stall_ends_it=True)
        try:
            await self.keeper.settled(session)
        except NotDurable as error:
            raise NotDurable(error.reason, done="the session is closed, but a restart would bring it back") from error

    async def fork(self, session: Session, keyed: KeyedRequest | None = None) -> Session:
        """Open a session with the same history, breakpoints and shared KV; that of a paused one is paused too.

        Raises `WrongState` unless idle or paused, `Busy`, `Draining`, `Moving`, `JournalUnavailable`.
        """
        session.require(SessionState.IDLE, SessionState.PAUSED, to="fork")
        self.table.require_no_drain(session)
        origin = ForkPoint(session.id, len(session.history))
        child = Session(self.new_id(), session.owner, dict(session.metadata), session.ttl_s, forked_from=origin)
        child.namespace, child.adapter = session.namespace, session.adapter
        child.history, child.uncounted = session.history[:], session.uncounted
        child.usage.answers = session.usage.answers[:]
        child.breakpoints, child.interventions = dict(session.breakpoints), session.interventions
        if (place := session.paused_place) is not None:
            await self.turns.fork_paused(session, child, place, self.opening(child))
        else:
            async with self.opening(child):
                await self.executor.call(lambda ticket: Fork(ticket, session.id, child.id), stall_ends_it=True)
        await self.keep(child, keyed)
        return child

    async def rewind(self, session: Session, to_token: int) -> None:
        """Drop the history from position `to_token` on. Raises `WrongState` unless idle, `FieldOutOfRange`."""
        session.require(SessionState.IDLE, to="rewind")
        if not 0 <= to_token <= len(session.history):
            raise FieldOutOfRange(f"to_token must be from 0 to {len(session.history)}", param="to_token")
        self.executor.check()
        session.truncate(to_token)
        self.keeper.note(session)
        await self.executor.call(lambda ticket: Rewind(ticket, session.id, to_token))
        await self.keeper.settled(session)

    def set_phase(
        self, session: Session, phase: Phase, resume_in_ms: float | None = None, lengths: tuple[float, ...] = ()
    ) -> None:
        """Say what the session is doing, and when it will go on, in ms from now. `lengths` are as those of `SetPhase`.

        Raises `WrongState` unless idle or paused.
        """
        with self.metrics.signal.time():
            session.require(SessionState.IDLE, SessionState.PAUSED, to=f"set the phase to {phase}")
            returns_at = None if resume_in_ms is None else time.time() + resume_in_ms / 1000
            session.signal(phase, returns_at, is_guess=bool(lengths))
            self.executor.post(lambda ticket: SetPhase(ticket, session.id, phase, resume_in_ms, lengths))
            self.keeper.note(session)

    def wait_for_tools(self, session: Session, turn: Turn, tools: Iterable[str]) -> None:
        """`turn` has ended in calls of `tools`: its session is in `io_wait` until its next turn.

        A client may read an answer late. If the session has had another turn since, it waits for other things. One that
        leaves for another server is told nothing more. Nothing says when a batch goes on: its sessions do not wait.
        """
        is_over = session.state is not SessionState.IDLE or session.turn is not turn
        if is_over or session.leaving or is_background():
            return
        lengths = self.tool_waits.begin(session, tools)
        if self.executor.failure is None:  # else the answer is there all the same
            expected = expected_wait(lengths)
            self.set_phase(session, Phase.IO_WAIT, None if expected is None else 1000 * expected, lengths)

    @contextlib.asynccontextmanager
    async def ephemeral(
        self,
        owner: str | None = None,
        *,
        metadata: dict[str, str] | None = None,
        unseen: bool = False,
        adapter: Adapter | None = None,
        prefix: tuple[Session, int] | None = None,
    ) -> AsyncIterator[Session]:
        """A session for one call: closed on the way out, which ends a turn that still runs."""
        session = self.create(owner, metadata=metadata, ephemeral=True, unseen=unseen, adapter=adapter, prefix=prefix)
        try:
            yield session
        finally:
            if session.state is not SessionState.CLOSED:
                self.drop(session)

    def forget(self, session: Session) -> None:
        """Close a session that no engine has, or whose engine is told by the caller."""
        session.move(SessionState.CLOSED)
        self.table.remove(session)
        self.keeper.forget(session)

    def drop(self, session: Session) -> None:
        """Close the session without waiting for the engine; one that has died holds nothing to free."""
        self.forget(session)
        self._close_in_engine(session)

    def release_kv(self, session: Session) -> None:
        """Have the engine keep the session's KV only as that of a prefix. The next turn takes what is still there."""
        self._close_in_engine(session)
        if self.executor.failure is None:
            self.executor.post(partial(session.opening, had_kv=False))

    def give_model(self, session: Session, adapter: Adapter | None) -> None:
        """Have a session that has no token yet be computed with the adapter. Raises `WrongState` for any other."""
        if session.is_of(adapter):
            return
        if session.history or session.busy or session.breakpoints:
            model = self.executor.engine.info.name if session.adapter is None else session.adapter.name
            raise WrongState(f"session {session.id} is of model {model!r}, which it keeps", param="model")
        self.executor.check()
        session.adapter = adapter
        self.release_kv(session)
        self.keeper.note(session)

    def depart(self, session: Session, home: Home, responses: Iterable[str] = ()) -> None:
        """Let go of a session that another server has taken with these responses, without waiting."""
        session.move(SessionState.CLOSED)
        self.table.remove(session, departs=True)
        self.keeper.depart(session, home, responses)
        self._close_in_engine(session)

    def abandon(self, session: Session) -> None:
        """Close a session that is still opening, without waiting for the engine. The journal does not know it yet."""
        session.move(SessionState.CLOSED)
        self._close_in_engine(session)

    def _close_in_engine(self, session: Session) -> None:
        if self.executor.failure is None:
            self.executor.post(lambda ticket: Close(ticket, session.id))


def take_notice(table: SessionTable, keeper: SessionKeeper, notice: Notice) -> None:
    """Take a notice of the engine to its session. One that has closed meanwhile has nothing left to note."""
    session = table.find(notice.session)
    if session is None:
        return
    match notice:
        case Placed():
            session.place(notice.memory)
        case Spent():
            if notice.breakpoint in session.breakpoints:
                session.spent[notice.breakpoint] = session.breakpoints.pop(notice.breakpoint)
                keeper.note(session)
                session.watcher.armed(session)
        case Lacking():
            table.on_lacking(session, notice)
        case _:
            assert_never(notice)
