"""Keep disk, host memory and the engine within what sessions and tenants may have of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from app.domain.errors import DeadlyTurn, EngineAway, NotFound
from app.domain.values import Quotas, Residency
from app.engine_process.executor import EngineExecutor
from app.journal.journal import Journal
from app.machine.budget import DiskRoom
from app.messages import FreeDisk, FreeHost
from app.sessions.session import Session
from app.sessions.table import SessionTable

logger = logging.getLogger(__name__)

DISK_INTERVAL_S = 0.5


async def guard_disk(executor: EngineExecutor, journal: Journal, room: DiskRoom) -> None:
    """Have KV files deleted while the reserve is not free, for ever. `room` is that of the KV files, on the journal's
    disk.
    """
    while True:
        await asyncio.sleep(DISK_INTERVAL_S)
        # A journal without room may be at a quota, which no figure shows.
        missing = max(room.missing, room.reserve if journal.state.is_full else 0)
        if missing and executor.failure is None:
            with contextlib.suppress(EngineAway):
                await executor.call(partial(FreeDisk, count=missing))


HOST_INTERVAL_S = 0.5


async def guard_host(executor: EngineExecutor, table: SessionTable, quotas: Quotas) -> None:
    """Have KV of tenants that are beyond their limit leave host memory, for ever."""
    while True:
        await asyncio.sleep(HOST_INTERVAL_S)
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


MOST_DEATHS = 3
KNOWN_FOR_S = 3600.0
MOST_KNOWN = 4096
"""Contexts that are remembered. More turns are not there when an engine dies."""


@dataclass(slots=True)
class _Deaths:
    count: int = 0
    last: int = 0
    """The number of the last one."""
    last_at: float = 0.0


class DeadlyTurns:
    """Counts the deaths of the engine beside turns, which it knows by their owner and their context. Used on the event
    loop only.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` tells the time in seconds."""
        self._now = now
        self._known: OrderedDict[bytes, _Deaths] = OrderedDict()
        self._suspects: list[tuple[str | None, array[int]]] = []
        """Turns that ended because the engine had stalled."""

    def check(self, owner: str | None, context: array[int], *, param: str) -> None:
        """Raise `DeadlyTurn` if the engine has died too often while a turn of that context waited or ran."""
        while self._known and next(iter(self._known.values())).last_at <= self._now() - KNOWN_FOR_S:
            self._known.popitem(last=False)
        # While no engine has died lately, this costs nothing.
        deaths = self._known.get(_digest(owner, context)) if self._known else None
        if deaths is not None and deaths.count >= MOST_DEATHS:
            raise DeadlyTurn(
                f"the engine died {deaths.count} times while this turn was there: it is not started again within "
                f"{KNOWN_FOR_S / 60:.0f} minutes, unless its tokens are others",
                param=param,
            )

    def note_death(self, owner: str | None, context: array[int], death: int) -> None:
        """The engine died while the turn waited or ran. `death` is the number of its deaths so far, from 1 on: of turns
        that are alike, such as choices of one prompt, only one counts for each.
        """
        digest = _digest(owner, context)
        deaths = self._known.setdefault(digest, _Deaths())
        if deaths.last == death:
            return
        self._known.move_to_end(digest)
        deaths.count += 1
        deaths.last, deaths.last_at = death, self._now()
        if deaths.count == MOST_DEATHS:
            logger.error("a turn of %d tokens was there at %d deaths of the engine: refused", len(context), MOST_DEATHS)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def suspect(self, owner: str | None, context: array[int]) -> None:
        """The engine stalled while the turn waited or ran. It counts if the engine then dies of it."""
        self._suspects.append((owner, context))

    def condemn(self, death: int) -> None:
        """The engine that had stalled has died: so note its death for each turn that was there then."""
        for owner, context in self._suspects:
            self.note_death(owner, context, death)
        self._suspects.clear()

    def clear(self) -> None:
        """Note that a stalled engine makes progress again: its turns did no harm."""
        self._suspects.clear()

    def note_end(self, owner: str | None, context: array[int]) -> None:
        """The turn has come to an end, so it does no harm."""
        if self._known:
            self._known.pop(_digest(owner, context), None)


def _digest(owner: str | None, context: array[int]) -> bytes:
    return hashlib.blake2b(
        context.tobytes(), digest_size=16, key=hashlib.sha256((owner or "").encode()).digest()
    ).digest()
