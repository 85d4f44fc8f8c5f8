"""What happens to sessions without anyone asking: they come back, they expire, and at shutdown their turns end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from app.domain.values import SessionState
from app.messages import Restored
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

SWEEP_INTERVAL_S = 0.5


async def restore(registry: SessionRegistry, sessions: Iterable[Session]) -> None:
    """Open the sessions that the journal has brought back, but for those that have expired meanwhile."""
    for session in sessions:
        await registry.reopen(session)
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
    registry.draining = True
    busy = registry.table.busy
    for session, turn in busy:
        if session.state is SessionState.PAUSED:
            registry.cancel(session, turn)
    ends = [asyncio.create_task(turn.ended.wait()) for _, turn in busy]
    if ends:
        await asyncio.wait(ends, timeout=timeout_s)
        for session, turn in busy:
            if not turn.ended.is_set() and registry.executor.failure is None:
                registry.cancel(session, turn)
        await asyncio.wait(ends)
