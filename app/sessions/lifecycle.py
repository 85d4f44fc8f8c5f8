"""Changes of sessions that no client asks for: restore, expiry, the end at shutdown, notices of the engine."""

import asyncio
import logging
from collections.abc import Iterable
from typing import assert_never

from app.bridge.executor import EngineExecutor
from app.domain.errors import Busy
from app.domain.values import Phase, Residency, SessionState
from app.messages import Notice, Open, Placed, Restored, SetPhase, Spent
from app.sessions.keeper import SessionKeeper
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.table import SessionTable, has_expired

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5


async def restore(registry: SessionRegistry, sessions: Iterable[Session]) -> None:
    """Open the sessions that the journal has brought back, but for those that have expired meanwhile."""
    for session in sessions:
        if has_expired(session):
            registry.keeper.forget(session)
        else:
            await _reopen(registry, session)
    registry.executor.post(Restored)


async def sweep(registry: SessionRegistry) -> None:
    """Close sessions as they expire, for ever."""
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        for session in registry.table.expired:
            registry.drop(session)


async def drain(registry: SessionRegistry, timeout_s: float) -> None:
    """Refuse new turns and sessions, give running turns `timeout_s` to end, then cancel them and wait for that.

    Nobody can resume a paused turn any more: it is cancelled at once.
    """
    registry.table.draining = True
    busy = registry.table.busy
    for session, turn in busy:
        if session.state is SessionState.PAUSED:
            registry.ends.cancel(session, turn)
    ends = [asyncio.create_task(turn.ended.wait()) for _, turn in busy]
    if ends:
        await asyncio.wait(ends, timeout=timeout_s)
        for session, turn in busy:
            if not turn.ended.is_set() and registry.executor.failure is None:
                registry.ends.cancel(session, turn)
        await asyncio.wait(ends)


async def _reopen(registry: SessionRegistry, session: Session) -> None:
    """Open a session that the journal has brought back.

    If there is no room any more for the KV that was promised to it, it loses the promise: the session is worth more.
    """
    registry.table.add(session)
    try:
        await _open(registry.executor, session)
    except Busy as error:
        logger.warning("session %s comes back as best_effort: %s", session.id, error.message)
        session.residency = Residency.BEST_EFFORT
        registry.keeper.note(session)
        await _open(registry.executor, session)
    if session.phase is not Phase.COMPUTE:
        await registry.executor.call(lambda ticket: SetPhase(ticket, session.id, session.phase))


async def _open(executor: EngineExecutor, session: Session) -> None:
    await executor.call(
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


class Notices:
    """Takes the engine's notices to their sessions. Used on the event loop only."""

    def __init__(self, table: SessionTable, keeper: SessionKeeper) -> None:
        self._table = table
        self._keeper = keeper

    def take(self, notice: Notice) -> None:
        """Note one. A session that has closed meanwhile has nothing left to note."""
        session = self._table.find(notice.session)
        if session is None:
            return
        match notice:
            case Placed():
                session.kv = notice.memory
            case Spent():
                if notice.breakpoint in session.breakpoints:
                    session.spent[notice.breakpoint] = session.breakpoints.pop(notice.breakpoint)
                    self._keeper.note(session)
            case _:
                assert_never(notice)
