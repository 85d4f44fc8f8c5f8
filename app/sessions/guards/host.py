"""Keeps each tenant's KV in host memory within its limit: that of sessions that were unused for longest gives way."""

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from functools import partial

from app.bridge.executor import EngineExecutor
from app.domain.errors import EngineAway, NotFound
from app.domain.limits import Quotas
from app.domain.values import Residency
from app.messages import FreeHost
from app.sessions.session import Session
from app.sessions.table import SessionTable

INTERVAL_S = 0.5


async def guard_host(executor: EngineExecutor, table: SessionTable, quotas: Quotas) -> None:
    """Have KV of tenants that are beyond their limit leave host memory, for ever."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        for owner, sessions in table.by_owner().items():
            limit = quotas.limits(owner).host_bytes
            if limit is not None and executor.failure is None:
                for session in beyond(sessions, limit):
                    with contextlib.suppress(EngineAway, NotFound):  # it may have been closed meanwhile
                        await executor.call(partial(FreeHost, session=session.id))


def beyond(sessions: Collection[Session], limit: int) -> Iterator[Session]:
    """Sessions whose KV must leave for the others to have `limit` bytes in host memory at most. A session with a turn
    and one that was promised its place keep theirs.
    """
    used = sum(session.kv.host_bytes for session in sessions)
    for session in sorted(sessions, key=lambda each: each.used_at):
        if used <= limit:
            break
        if session.kv.host_bytes and not session.busy and session.residency is not Residency.GUARANTEED:
            used -= session.kv.host_bytes
            yield session
