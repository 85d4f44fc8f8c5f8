"""Changes of sessions that no client asks for: restore, expiry, too little room, the end at shutdown."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial

from app.domain.errors import Busy, DjinnError, EngineAway, EngineRestarting, EngineStalled, NotFound, ServerRestarted
from app.domain.memory_map import SessionMemory
from app.domain.values import FinishReason, Phase, Quotas, Residency, SessionState, Ticket
from app.engine_process.executor import EngineExecutor
from app.journal.journal import Journal
from app.machine.budget import DiskRoom
from app.messages import Close, Failed, FreeDisk, FreeHost, KeepKV, KeptKV, Restored, Rewind, SetPhase
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.table import SessionTable, has_expired
from app.sessions.uploads import Uploads

logger = logging.getLogger(__name__)

LATE_S = 10.0
"""For writes that are under way when the time is over: a disk may have stalled."""


async def keep_kv(registry: SessionRegistry, within_s: float) -> None:
    """Have the KV of the sessions that the journal brings back written to disk, those of turns when they are over.

    Ends `LATE_S` after `within_s` seconds at the latest.
    """
    if not registry.keeper.is_durable:
        return
    now = time.time()
    sessions = sorted((each for each in registry.table if not each.ephemeral), key=lambda each: worth(each, now))
    try:
        async with asyncio.timeout(within_s + LATE_S):
            kept: KeptKV = await registry.executor.call(
                partial(KeepKV, sessions=tuple(session.id for session in sessions), within_s=within_s)
            )
    except TimeoutError:
        logger.error("drain: a write of KV has not ended within %g s; the server ends without it", within_s + LATE_S)
        return
    except DjinnError as error:
        logger.warning("drain: KV was not written to disk: %s", error.message)
        return
    logger.info(
        "drain: sessions with KV on disk: %d, with %d tokens; sessions that lose KV: %d, with %d tokens",
        kept.sessions,
        kept.tokens,
        kept.lost,
        kept.lost_tokens,
    )


def worth(session: Session, now: float) -> tuple[bool, bool, float]:
    """Orders sessions, those first whose KV is wanted first."""
    return session.residency is not Residency.GUARANTEED, session.phase is Phase.IDLE, returns_in_s(session, now)


def returns_in_s(session: Session, now: float) -> float:
    """In how many seconds the session may go on. Who has not said when it returns, may stay away for as long again as
    it has been away.
    """
    return now - session.used_at if session.returns_at is None else max(0.0, session.returns_at - now)


SWEEP_INTERVAL_S = 0.5
KEEP_S = 5.0
"""How much longer than turns KV has to get to disk: that of turns which were cancelled at last is not there yet."""
Evacuate = Callable[[float], Awaitable[None]]
"""Takes as many sessions as it can to other servers, within so many seconds."""
AT_ONCE = 64
"""Sessions that are opened together in an engine that knows of none."""


async def restore(registry: SessionRegistry, sessions: Iterable[Session]) -> None:
    """Open the sessions that the journal has brought back, and close those that have expired meanwhile."""
    expired = 0
    for session in sessions:
        registry.table.add(session)
        if has_expired(session):
            expired += 1
            registry.forget(session)
        elif session.usage.paused is not None:
            session.usage.interrupt(len(session.history))
            registry.keeper.note(session)
            session.watcher.stopped(session, Failed(Ticket(0), ServerRestarted()))
    with contextlib.suppress(EngineRestarting):  # the next engine opens them
        await reopen(registry)
    back = list(registry.table)
    if back or expired:
        logger.info(
            "sessions back from the journal: %d, with %d tokens; expired meanwhile: %d",
            len(back),
            sum(len(session.history) for session in back),
            expired,
        )


async def reopen(registry: SessionRegistry) -> None:
    """Open all sessions in an engine that knows of none. Raises `EngineRestarting` if it dies meanwhile."""
    opened: dict[Session, int] = {}
    while missing := [session for session in registry.table if session not in opened]:  # some may come from elsewhere
        missing.sort(key=lambda session: session.residency is not Residency.GUARANTEED)
        for first in range(0, len(missing), AT_ONCE):
            some = missing[first : first + AT_ONCE]
            lengths = await asyncio.gather(*(_reopen(registry, session) for session in some))
            opened |= dict(zip(some, lengths, strict=True))
    registry.executor.post(Restored, while_restarting=True)
    for session, tokens in opened.items():  # what has changed while there was no engine to tell
        if session.state is SessionState.CLOSED:
            registry.executor.post(partial(Close, session=session.id), while_restarting=True)
        elif len(session.history) < tokens:
            rewind = partial(Rewind, session=session.id, to_token=len(session.history))
            registry.executor.post(rewind, while_restarting=True)


async def reopen_late(registry: SessionRegistry, session: Session) -> None:
    """Open a session that is found only now, and that an engine before this one had."""
    if registry.executor.failure is None:  # else it is opened with all others
        with contextlib.suppress(EngineRestarting):
            await _reopen(registry, session)


async def take_up(registry: SessionRegistry, uploads: Uploads) -> None:
    """Go on with an engine that has taken a dead one's place."""
    registry.metrics.engine_restarts.inc()
    registry.turns.deadly.condemn(registry.executor.losses)
    await registry.adapters.reload()
    await uploads.load_all()
    await reopen(registry)
    logger.info("another engine is up; sessions: %d", len(list(registry.table)))


def end_turns(registry: SessionRegistry, error: EngineStalled) -> None:
    """Let go of the turns that an engine has which makes no progress: each fails with `error`, and its session is as
    before. Paused ones stay: they wait for their clients.

    If the engine goes on, it has to have these sessions as they are here. So each is closed there and opened again,
    before any command that comes from now on.
    """
    for session, turn in registry.table.busy:
        if session.under_way:
            registry.executor.fail_turn(turn, error)
            session.place(SessionMemory())
            registry.executor.post(partial(Close, session=session.id))
            registry.executor.post(session.opening)


async def sweep(registry: SessionRegistry) -> None:
    """Close sessions as they expire, for ever."""
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        for session in registry.table.expired:
            if not session.leaving:  # another server may have it, and let it live
                registry.drop(session)


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
    """Sessions whose KV must leave for the others to have `limit` bytes in host memory at most. Sessions
    with a turn, and guaranteed ones, keep theirs.
    """
    used = sum(session.kv.host_bytes for session in sessions)
    for session in sorted(sessions, key=lambda each: each.used_at):
        if used <= limit:
            break
        if session.kv.host_bytes and not session.busy and session.residency is not Residency.GUARANTEED:
            used -= session.kv.host_bytes
            yield session


async def drain(registry: SessionRegistry, timeout_s: float, evacuate: Evacuate | None = None) -> None:
    """Refuse new turns and sessions, give running turns `timeout_s` to end, then cancel them and wait for that.
    Meanwhile, and for `KEEP_S` more, KV is written to disk. Then the watchers of sessions learn that nothing more
    will happen.

    `evacuate` comes first, if it is given: it has `timeout_s` to bring sessions elsewhere. Of those that are left,
    no client can resume a paused turn any more: it is cancelled at once. A cancelled turn has as long to end as KV.
    """
    registry.table.draining = True
    if evacuate is not None:
        began = time.monotonic()
        await evacuate(timeout_s)
        timeout_s = max(0.0, timeout_s - (time.monotonic() - began))
    keeping = asyncio.create_task(keep_kv(registry, timeout_s + KEEP_S))
    try:
        await _end_turns(registry, timeout_s)
        await keeping
    finally:
        keeping.cancel()
        registry.table.watcher.end()


async def _end_turns(registry: SessionRegistry, timeout_s: float) -> None:
    busy = registry.table.busy
    paused = [each for each in busy if each[0].state is SessionState.PAUSED]
    for session, turn in paused:
        registry.pauses.cancel(session, turn, reason=FinishReason.SHUTDOWN)
    logger.info(
        "drain: turns that run or wait: %d, for at most %g s; paused ones, which are cancelled: %d",
        len(busy) - len(paused),
        round(timeout_s, 1),
        len(paused),
    )
    ends = [asyncio.create_task(turn.ended.wait()) for _, turn in busy]
    if ends:
        await asyncio.wait(ends, timeout=timeout_s)
        late = [each for each in busy if not each[1].ended.is_set()]
        finished = sum(turn.ended.is_set() for _, turn in busy) - sum(turn.ended.is_set() for _, turn in paused)
        for session, turn in late:
            if registry.executor.failure is None:
                registry.pauses.cancel(session, turn)
        _, stuck = await asyncio.wait(ends, timeout=KEEP_S + LATE_S)
        logger.info("drain: turns that came to their end: %d; cancelled: %d", finished, len(busy) - finished)
        if stuck:
            logger.error("drain: cancelled turns that have not ended: %d; the server ends without them", len(stuck))


async def _reopen(registry: SessionRegistry, session: Session) -> int:
    """Open one session; returns with how many tokens.

    If there is no room any more for the KV that was promised to it, it loses the promise: the session is worth more.
    """
    session.reopened = True
    session.place(SessionMemory())
    tokens = len(session.history)  # a turn that has finished may still be cut at a stop string
    try:
        await registry.executor.call(session.opening, while_restarting=True)
    except Busy as error:
        logger.warning("a session comes back as best_effort: %s", error.message, extra={"session": session.id})
        session.residency = Residency.BEST_EFFORT
        registry.keeper.note(session)
        await registry.executor.call(session.opening, while_restarting=True)
    if session.phase is not Phase.COMPUTE:
        set_phase = partial(SetPhase, session=session.id, phase=session.phase)
        await registry.executor.call(set_phase, while_restarting=True)
    return tokens
