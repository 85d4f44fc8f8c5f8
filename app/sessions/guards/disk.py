"""Keeps the journal's reserve of the disk free: KV files, which can be recomputed, give way."""

import asyncio
import contextlib
from functools import partial

from app.bridge.executor import EngineExecutor
from app.domain.errors import EngineAway
from app.journal.journal import Journal
from app.machine.disk import DiskRoom
from app.messages import FreeDisk

INTERVAL_S = 0.5


async def guard_disk(executor: EngineExecutor, journal: Journal, room: DiskRoom) -> None:
    """Have KV files deleted while the reserve is not free, for ever. `room` is that of the KV files, on the journal's
    disk.
    """
    while True:
        await asyncio.sleep(INTERVAL_S)
        missing = _missing(journal, room)
        if missing and executor.failure is None:
            with contextlib.suppress(EngineAway):
                await executor.call(partial(FreeDisk, count=missing))


def _missing(journal: Journal, room: DiskRoom) -> int:
    """Bytes that must become free. A journal without room may be at a quota, which no figure shows."""
    return max(room.missing, room.reserve if journal.state.is_full else 0)
