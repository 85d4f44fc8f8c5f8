"""What sessions did, for who looks later: their turns, pauses, waits and moves of KV, and each minute of the server.

Kept for 30 days in a file beside the journal, for closed sessions too. It is no state: a server without it, or whose
disk is full, goes on and remembers less. So it is written some seconds later, and no backup has it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.domain.activations import CheckpointInfo
from app.domain.errors import JournalUnavailable
from app.domain.memory_map import MemoryMap, SessionMemory
from app.domain.values import Phase, SessionId, SessionState
from app.messages import Failed, Paused, TurnFinished
from app.sessions.session import Session, Watcher

logger = logging.getLogger(__name__)

FILE = "history.sqlite3"
RUNNING = "running"
"""An empty file beside it while a server runs, which touches it: a server that was killed was there until then. To
remove it needs no room: a full disk is no kill.
"""
KEPT_S = 30 * 24 * 3600.0
MOST_ENTRIES, MOST_MINUTES, MOST_CLOSED = 500_000, 500_000, 200_000
"""About 100 MB, 100 MB and 30 MB. The oldest go."""
WRITE_S = 2.0
"""Between two writes, and how much a server that is killed forgets."""
LOOK_AT_MEMORY_S = 5.0
"""Between two looks at memory."""
SERVER = "\n"
"""Whose minutes are those of the whole server: memory that sessions share, and moves, are no tenant's. A tenants file
cannot have this name.
"""
MOST_WORDS = 16
"""Most words that a search looks for."""
LOOK_S = 3600.0
"""Between two looks for what is too old."""
_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, owner TEXT NOT NULL, session TEXT NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS entry_session ON entry (session, id);
CREATE TABLE IF NOT EXISTS minute (
    at INTEGER NOT NULL, owner TEXT NOT NULL, start REAL NOT NULL, body TEXT NOT NULL, PRIMARY KEY (at, owner, start)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS closed (
    session TEXT PRIMARY KEY, at REAL NOT NULL, owner TEXT NOT NULL, name TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS closed_at ON closed (at);
"""
"""`owner` is '' on a server without keys; `session` is '' for what happened to the server. `start`
is the server's: two may have been there in one minute.
"""

MarkKind = Literal["started", "deployed", "draining", "drained", "stopped", "killed", "engine_restarted"]
"""What happened to the server. One that is `deployed` starts with another version of Djinn, or another model."""


@dataclass(slots=True)
class Minute:
    """One minute of one tenant, or of the whole server: what was counted in it, and what there was at its end.

    `worst_ms`: the longest that an agent's turn waited for its first token.
    """

    turns: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_recomputed: int = 0
    completion_tokens: int = 0
    worst_ms: float = 0.0
    late: int = 0
    """Turns that began after their session was expected."""
    late_restores: int = 0
    """Turns that waited for KV that was not on the device yet."""
    agents: set[SessionId] = field(default_factory=set)
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_to_disk: int = 0
    bytes_from_disk: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    turns_running: int = 0
    """The most that were seen at once."""
    turns_waiting: int = 0

    def told(self) -> dict[str, Any]:
        """What is kept: how many agents, not which. What is 0 goes without saying."""
        told = {**asdict(self), "agents": len(self.agents), "worst_ms": round(self.worst_ms, 1)}
        return {name: value for name, value in told.items() if value}


@dataclass(slots=True)
class _Seen:
    """A session as it was last looked at. `begun_at` and `late_s` are of its last turn."""

    session: Session
    kv: SessionMemory
    signal: tuple[Phase, float | None]
    """Its phase, and when it returns."""
    begun_at: float = 0.0
    is_paused: bool = False
    late_s: float | None = None


class History(Watcher):
    """Records what the watcher `then` is told of too. Used on the event loop; files are read and written on threads.

    A file that is damaged is made anew. `folder`: None keeps all in memory. `runs` is what is deployed: the version of
    Djinn, and the model.
    """

    def __init__(self, folder: Path | None, then: Watcher, **runs: str) -> None:
        self._then = then
        self._folder = folder
        self._lock = threading.Lock()
        self._writing = asyncio.Lock()
        self._connection = _open(folder)
        self._running = None if folder is None else folder.expanduser() / RUNNING
        self._entries: list[tuple[float, str, str, str]] = []
        self._closed: list[tuple[str, float, str, str]] = []
        self._minutes: defaultdict[tuple[int, str], Minute] = defaultdict(Minute)
        self._changed: set[tuple[int, str]] = set()
        """Minutes that have changed since they were written."""
        self._moved: dict[str, int] = {}
        """Bytes that the engine has moved each way, when it was last asked."""
        self._seen: dict[SessionId, _Seen] = {}
        self._began = time.time()
        self._looked_at = 0.0
        self._is_failing = False
        killed_at = None
        if self._running is not None:
            with suppress(FileNotFoundError):
                killed_at = self._running.stat().st_mtime
        self.ended_badly = killed_at is not None
        """Whether the server before this one was killed, or crashed."""
        self._mark_start(runs, killed_at)

    def opened(self, session: Session) -> None:
        self._then.opened(session)
        is_paused = session.state is SessionState.PAUSED  # it is a fork of a paused session
        signal = session.phase, session.returns_at
        self._seen[session.id] = _Seen(session, session.placed, signal, is_paused=is_paused)
        come = "opened" if session.created_at >= self._began else "restored"
        self._note(
            session, come if session.arrived_at is None else "arrived",
            tokens=len(session.history) or None, phase=session.phase, tier=session.placed.tier,
        )  # fmt: skip

    def changed(self, session: Session) -> None:
        self._then.changed(session)
        seen = self._seen.get(session.id)
        if seen is None:
            return
        signal = session.phase, session.returns_at
        if signal != seen.signal:
            seen.signal = signal
            if session.phase is not Phase.COMPUTE:  # else the turn tells
                self._note(session, "phase", phase=session.phase, returns_at=session.returns_at)
        if seen.is_paused and session.state is not SessionState.PAUSED:
            seen.is_paused = False
            if session.state is SessionState.QUEUED and session.turn is not None and not session.turn.ending:
                self._note(session, "resumed")
        before, kv = seen.kv, session.placed
        seen.kv = kv
        if kv.tier is not before.tier:
            self._note(session, "moved", tier=kv.tier, tokens=kv.tokens)
        if kv.bytes_out > before.bytes_out or kv.bytes_in > before.bytes_in:
            minute = self._minute(session.owner or "")
            minute.bytes_out += max(0, kv.bytes_out - before.bytes_out)
            minute.bytes_in += max(0, kv.bytes_in - before.bytes_in)

    def grew(self, session: Session) -> None:
        self._then.grew(session)

    def closed(self, session: Session) -> None:
        self._then.closed(session)
        if self._seen.pop(session.id, None) is not None:
            is_kept = not (session.unseen or session.ephemeral)  # no text of a call that kept nothing is kept here
            self._note(session, "closed", name=(session.label or None) if is_kept else None)
            if is_kept:
                name = session.label.encode(errors="replace").decode()  # SQLite takes no lone surrogates
                self._closed.append((session.id, time.time(), session.owner or "", name))

    def departed(self, session: Session) -> None:
        self._then.departed(session)
        if self._seen.pop(session.id, None) is not None:
            self._note(session, "departed")

    def begun(self, session: Session) -> None:
        self._then.begun(session)
        seen = self._seen.get(session.id)
        if seen is not None:
            seen.begun_at = time.time()
            _, returns_at = seen.signal
            seen.late_s = None if returns_at is None else round(seen.begun_at - returns_at, 3)
            seen.signal = session.phase, session.returns_at

    def armed(self, session: Session) -> None:
        self._then.armed(session)

    def edited(self, session: Session, place: CheckpointInfo) -> None:
        self._then.edited(session, place)

    def stopped(self, session: Session, event: Paused | TurnFinished | Failed) -> None:
        self._then.stopped(session, event)
        seen = self._seen.get(session.id)
        if seen is None:
            return
        if isinstance(event, Paused):
            info, seen.is_paused = event.checkpoint, True
            self._note(session, "paused", layer=info.layer, point=info.point)
            return
        usage = session.usage
        waits = {name: getattr(usage, name) for name in ("queue_ms", "restore_ms", "prefill_ms")}
        minute = self._minute(session.owner or "")
        if session.is_agent:
            minute.agents.add(session.id)
        minute.late += seen.late_s is not None and seen.late_s > 0
        told: dict[str, Any] = {"status": "failed"}
        if isinstance(event, Failed):
            minute.failed += 1
            told["code"] = event.error.code
        else:
            costs = asdict(event.usage)
            minute.turns += 1
            minute.late_restores += usage.restore_ms > 0
            if session.is_agent:
                minute.worst_ms = max(minute.worst_ms, sum(waits.values()))
            for name, tokens in costs.items():
                setattr(minute, name, getattr(minute, name) + tokens)
            told = {"status": "finished", "finish_reason": event.reason, **costs}
            told["recompute_reason"] = usage.recompute_reason
        seconds = None if not seen.begun_at else round(time.time() - seen.begun_at, 3)
        self._note(session, "turn", **told, **waits, seconds=seconds, late_s=seen.late_s)

    def end(self) -> None:
        self._then.end()

    def mark(self, kind: MarkKind, **told: object) -> None:
        """Note that this happens to the server now."""
        self._entries.append((time.time(), "", "", json.dumps({"kind": kind, **told})))

    async def watch(self, read_memory: Callable[[], Awaitable[MemoryMap | None]]) -> None:
        """Sample memory and the queue for ever."""
        while True:
            if (memory := await read_memory()) is not None:
                self._sample(memory)
            await asyncio.sleep(LOOK_AT_MEMORY_S)

    def _sample(self, memory: MemoryMap) -> None:
        device, host, disk = (each.owned_bytes for each in (memory.device, memory.host, memory.disk))
        self._note_use(SERVER, device, host, disk, memory.running, memory.waiting)
        for way, totals in memory.moves.items():
            before = self._moved.get(way, 0)
            if more := totals.bytes - (before if totals.bytes >= before else 0):  # another engine counts anew
                minute = self._minute(SERVER)
                setattr(minute, f"bytes_{way}", getattr(minute, f"bytes_{way}") + more)
            self._moved[way] = totals.bytes
        of_owner = defaultdict[str, list[Session]](list)
        for seen in self._seen.values():
            if seen.session.owner is not None:
                of_owner[seen.session.owner].append(seen.session)
        for owner, sessions in of_owner.items():
            kv, states = [each.kv for each in sessions], [each.state for each in sessions]
            self._note_use(
                owner,
                sum(each.device_bytes for each in kv),
                sum(each.host_bytes for each in kv),
                sum(each.disk_bytes for each in kv),
                states.count(SessionState.RUNNING),
                states.count(SessionState.QUEUED),
            )

    def _note_use(self, owner: str, device: int, host: int, disk: int, running: int, waiting: int) -> None:
        """Note what the owner holds now. A minute in which it holds nothing is not kept."""
        if any((device, host, disk, running, waiting)) or (int(time.time() // 60), owner) in self._minutes:
            minute = self._minute(owner)
            minute.device_bytes, minute.host_bytes, minute.disk_bytes = device, host, disk
            minute.turns_running = max(minute.turns_running, running)
            minute.turns_waiting = max(minute.turns_waiting, waiting)

    async def run(self) -> None:
        """Write the notes for ever, and when the server was last alive."""
        if self._running is not None:
            with suppress(OSError):
                self._running.touch()
        while True:
            try:
                await self.write()
            except Exception:  # the next notes may do better
                logger.exception("the history of sessions was not written")
            if self._running is not None:
                with suppress(OSError):
                    await asyncio.to_thread(os.utime, self._running)
            await asyncio.sleep(WRITE_S)

    async def write(self) -> None:
        """Write what has been noted. A disk that is full costs the notes, and a warning."""
        async with self._writing:  # else sums of a minute could come behind later ones
            await self._write_noted()

    async def _write_noted(self) -> None:
        (entries, self._entries), (closed, self._closed) = (self._entries, []), (self._closed, [])
        changed, self._changed = self._changed, set()
        minutes = [(*key, self._began, json.dumps(self._minutes[key].told())) for key in changed]
        now = int(time.time() // 60)
        for key in [key for key in self._minutes if key[0] < now]:
            del self._minutes[key]
        if not entries and not minutes:
            return
        try:
            await asyncio.to_thread(self._write, entries, minutes, closed)
            self._is_failing = False
        except sqlite3.Error as error:
            if not self._is_failing:
                logger.warning("the history of sessions was not written: %s", error)
            self._is_failing = True
            await asyncio.to_thread(self._mend, error)

    async def timeline(
        self, session: SessionId, owner: str | None, *, is_operator: bool, before: int | None, limit: int
    ) -> list[dict[str, Any]]:
        """The session's newest entries, the newest first, before the one of that id; whose it is not sees none, and an
        operator no name that another tenant has given it.
        """
        await self.write()
        where = "session = ? AND id < ?" + ("" if is_operator else " AND owner = ?")
        values = [session, before or 1 << 62, *([] if is_operator else [owner or ""]), limit]
        rows = await asyncio.to_thread(
            self._read, f"SELECT id, at, owner, body FROM entry WHERE {where} ORDER BY id DESC LIMIT ?", values
        )
        told = [{"id": number, "at": at, **json.loads(body), "owner": of} for number, at, of, body in rows]
        return [each | ({} if each.pop("owner") == (owner or "") else {"name": None}) for each in told]

    async def list_closed(
        self, owner: str | None, *, is_operator: bool, find: str, before: float | None, limit: int
    ) -> list[dict[str, Any]]:
        """Sessions that have closed, the last one first, before that time. Each word of `find` is in its id, or in the
        name that the caller gave it.
        """
        await self.write()
        where = ["at < :before", *([] if is_operator else ["owner = :owner"])]
        values: dict[str, Any] = {"before": before or 1e12, "owner": owner or "", "limit": limit}
        for number, word in enumerate(find.lower().split()[:MOST_WORDS]):
            where.append(f"(instr(session, :w{number}) OR (owner = :owner AND instr(lower(name), :w{number})))")
            values[f"w{number}"] = word
        query = f"SELECT session, at, owner, name FROM closed WHERE {' AND '.join(where)} ORDER BY at DESC LIMIT :limit"
        rows = await asyncio.to_thread(self._read, query, values)
        return [
            {"id": session, "closed_at": at, "tenant": of or None, "name": name if of == (owner or "") else ""}
            for session, at, of, name in rows
        ]

    async def activity(
        self, owner: str | None, *, is_operator: bool, since: float, step_s: int, limit: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Sums over each `step_s` since then, the oldest first, of all tenants together for an operator, and what
        happened to the server meanwhile.
        """
        await self.write()
        sees_all, step = is_operator or owner is None, step_s // 60
        whose = "" if is_operator else "AND owner IN ('', :reader)" if sees_all else "AND owner = :reader"
        sums = ", ".join(f"{how}({name})" for name, how in _OVER_TIME.items())
        of_all = ", ".join(f"coalesce({how}, 0) AS {name}" for name, how in _KEPT.items())
        minutes = await asyncio.to_thread(
            self._read,
            # So many minutes are in as many steps at least: no more need to be read.
            f"SELECT at / :step AS step, {sums} FROM (SELECT at, {of_all} FROM minute WHERE at >= :since {whose} "
            "GROUP BY at ORDER BY at LIMIT :limit * :step) GROUP BY step ORDER BY step LIMIT :limit",
            {
                "since": int(since // step_s) * step,
                "step": step,
                "reader": SERVER if sees_all else owner,
                "limit": limit,
            },
        )
        marks = await asyncio.to_thread(
            self._read, "SELECT at, body FROM entry WHERE session = '' AND at >= ? ORDER BY id DESC LIMIT ?",
            [since, limit],
        )  # fmt: skip
        told = [{"at": row[0] * step_s, **dict(zip(_KEPT, row[1:], strict=True))} for row in minutes]
        return told, [{"at": at, **json.loads(body)} for at, body in reversed(marks)]

    async def close(self) -> None:
        """Write the rest."""
        self.mark("stopped")
        await self.write()
        with self._lock:
            self._connection.close()
        if self._running is not None:
            with suppress(OSError):  # a folder that can only be read now
                self._running.unlink()

    def _mark_start(self, runs: dict[str, str], killed_at: float | None) -> None:
        """Note the start, how it differs from the last one, and when the server before was killed, if it was."""
        ran = list[Any]()
        start = "SELECT body FROM entry WHERE session = '' AND body LIKE '%\"version\"%' ORDER BY id DESC LIMIT 1"
        with suppress(JournalUnavailable):
            ran = self._read(start, [])
        if killed_at is not None:
            self._entries.append((killed_at, "", "", json.dumps({"kind": "killed"})))
        is_other = any(not runs.items() <= json.loads(body).items() for (body,) in ran)
        self.mark("deployed" if is_other else "started", **runs)

    def _minute(self, owner: str) -> Minute:
        """The current minute of the owner, which is written again."""
        key = int(time.time() // 60), owner
        self._changed.add(key)
        return self._minutes[key]

    def _note(self, session: Session, kind: str, **told: object) -> None:
        if session.unseen:
            return
        body = json.dumps({"kind": kind, **{name: value for name, value in told.items() if value is not None}})
        self._entries.append((time.time(), session.owner or "", session.id, body))

    def _write(
        self,
        entries: list[tuple[float, str, str, str]],
        minutes: list[tuple[int, str, float, str]],
        closed: list[tuple[str, float, str, str]],
    ) -> None:
        with self._lock, self._connection:
            self._connection.executemany("INSERT INTO entry (at, owner, session, body) VALUES (?, ?, ?, ?)", entries)
            self._connection.executemany("INSERT OR REPLACE INTO minute VALUES (?, ?, ?, ?)", minutes)
            self._connection.executemany("INSERT OR REPLACE INTO closed VALUES (?, ?, ?, ?)", closed)
            now = time.time()
            if now - self._looked_at > LOOK_S:
                self._looked_at = now
                oldest = now - KEPT_S
                for table, first in (("entry", oldest), ("minute", oldest / 60), ("closed", oldest)):
                    self._connection.execute(f"DELETE FROM {table} WHERE at < ?", [first])
                self._connection.execute(
                    "DELETE FROM entry WHERE id <= (SELECT max(id) FROM entry) - ?", [MOST_ENTRIES]
                )
                for table, most in (("minute", MOST_MINUTES), ("closed", MOST_CLOSED)):
                    excess = f"SELECT at FROM {table} ORDER BY at DESC LIMIT 1 OFFSET ?"
                    self._connection.execute(f"DELETE FROM {table} WHERE at <= ({excess})", [most])

    def _read(self, query: str, values: list[Any] | dict[str, Any]) -> list[Any]:
        """The rows; none of a file that was damaged meanwhile. Raises `JournalUnavailable` if it cannot be read."""
        try:
            with self._lock:
                return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            if self._mend(error):
                return []
            raise JournalUnavailable(f"the history of sessions cannot be read: {error}") from error

    def _mend(self, error: sqlite3.Error) -> bool:
        """Make the file anew if that error says that it is damaged; tells whether it does."""
        if not _is_damage(error):
            return False
        with self._lock:
            self._connection.close()
            if self._folder is not None:
                _remove(self._folder.expanduser() / FILE, error)
            self._connection = _open(self._folder)
        return True


_THERE = ("device_bytes", "host_bytes", "disk_bytes", "turns_running", "turns_waiting")
_OF_READER = (*_THERE, "bytes_out", "bytes_in", "bytes_to_disk", "bytes_from_disk")
"""Only the reader's own minutes have these, for who reads of all those of `SERVER`."""


def _of_tenants(name: str) -> str:
    """The SQL by which minutes of several tenants become one: a session has one tenant."""
    told = f"json_extract(body, '$.{name}')"
    if name in _OF_READER:
        return f"sum({told}) FILTER (WHERE owner = :reader)"
    return f"{'max' if name == 'worst_ms' else 'sum'}({told})"


_KEPT = {name: _of_tenants(name) for name in Minute.__dataclass_fields__}
_OVER_TIME = {name: "max" if name in ("agents", "worst_ms", *_THERE) else "sum" for name in _KEPT}
"""How several minutes become one entry."""


def _open(folder: Path | None) -> sqlite3.Connection:
    """The file, made anew if it is damaged; or memory, without a folder or where no file can be opened."""
    if folder is None:
        return _connect(":memory:")
    path = folder.expanduser() / FILE
    try:
        try:
            return _connect(str(path))
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            _remove(path, error)
            return _connect(str(path))
    except (sqlite3.DatabaseError, OSError) as error:
        logger.warning("%s cannot be opened (%s): what sessions do is in memory, until the server ends", path, error)
        return _connect(":memory:")


def _remove(path: Path, error: sqlite3.Error) -> None:
    logger.warning("%s is damaged (%s): it is made anew", path, error)
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is no history. A disk that is full, or a file that is locked, leaves it as it is."""
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        connection.create_function("lower", 1, str.lower, deterministic=True)  # SQLite's knows English letters only
        connection.executescript(_TABLES)
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection
