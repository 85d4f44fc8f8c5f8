"""What sessions did, for who looks later: their turns, pauses, waits and moves of KV, and each minute of the server.

Kept for 30 days in a file beside the journal, for closed sessions too. It is no state: a server without it, or whose
disk is full, goes on and remembers less. So it is written some seconds later, and no backup has it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.domain.activations import CheckpointInfo
from app.domain.errors import JournalUnavailable
from app.domain.values import Phase, SessionId, SessionState, Tier
from app.messages import Failed, Paused, TurnFinished
from app.sessions.session import Session, Watcher

logger = logging.getLogger(__name__)

FILE = "history.sqlite3"
RUNNING = "running"
"""An empty file beside it while a server runs. To remove it needs no room: a full disk is no kill."""
KEPT_S = 30 * 24 * 3600.0
MOST_ENTRIES, MOST_MINUTES = 500_000, 200_000
"""About 100 MB and 50 MB. The oldest go."""
WRITE_S = 2.0
"""Between two writes, and how much a server that is killed forgets."""
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
"""
"""`owner` is '' on a server without keys; `session` is '' for what happened to the server. `start`
is the server's: two may have been there in one minute.
"""


@dataclass(slots=True)
class Minute:
    """Sums over one minute of one tenant. `worst_ms`: the longest that an agent's turn waited for its first token."""

    turns: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_recomputed: int = 0
    completion_tokens: int = 0
    worst_ms: float = 0.0
    late: int = 0
    """Turns that began after their session was expected."""
    agents: set[SessionId] = field(default_factory=set)

    def told(self) -> dict[str, Any]:
        """What is kept: how many agents, not which."""
        return {**asdict(self), "agents": len(self.agents), "worst_ms": round(self.worst_ms, 1)}


@dataclass(slots=True)
class _Seen:
    """A session as it was last looked at."""

    phase: Phase
    tier: Tier | None
    returns_at: float | None = None
    begun_at: float = 0.0
    is_paused: bool = False
    late_s: float | None = None


class History(Watcher):
    """Records what the watcher `then` is told of too. Used on the event loop; files are read and written on threads.

    A file that is damaged is made anew. `folder`: None keeps all in memory.
    """

    def __init__(self, folder: Path | None, then: Watcher) -> None:
        self._then = then
        self._folder = folder
        self._lock = threading.Lock()
        self._writing = asyncio.Lock()
        self._connection = _open(folder)
        self._running = None if folder is None else folder.expanduser() / RUNNING
        self._entries: list[tuple[float, str, str, str]] = []
        self._minutes: dict[tuple[int, str], Minute] = {}
        self._seen: dict[SessionId, _Seen] = {}
        self._began = time.time()
        self._looked_at = 0.0
        self._is_failing = False
        self.ended_badly = self._running is not None and self._running.exists()
        """Whether the server before this one was killed, or crashed."""
        self._mark("started")

    def opened(self, session: Session) -> None:
        self._then.opened(session)
        self._seen[session.id] = _Seen(session.phase, session.placed.tier)
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
        if session.phase is not seen.phase:
            seen.phase, seen.returns_at = session.phase, session.returns_at
            if session.phase is not Phase.COMPUTE:  # else the turn tells
                self._note(session, "phase", phase=session.phase, returns_at=session.returns_at)
        if seen.is_paused and session.state is not SessionState.PAUSED:
            seen.is_paused = False
            if session.state is SessionState.QUEUED and session.turn is not None and not session.turn.ending:
                self._note(session, "resumed")
        if session.placed.tier is not seen.tier:
            self._note(session, "moved", tier=session.placed.tier, tokens=session.placed.tokens)
            seen.tier = session.placed.tier

    def grew(self, session: Session) -> None:
        self._then.grew(session)

    def closed(self, session: Session) -> None:
        self._then.closed(session)
        if self._seen.pop(session.id, None) is not None:
            self._note(session, "closed")

    def departed(self, session: Session) -> None:
        self._then.departed(session)
        if self._seen.pop(session.id, None) is not None:
            self._note(session, "departed")

    def begun(self, session: Session) -> None:
        self._then.begun(session)
        seen = self._seen.get(session.id)
        if seen is not None:
            seen.begun_at = time.time()
            seen.late_s = None if seen.returns_at is None else round(seen.begun_at - seen.returns_at, 3)
            seen.returns_at = None

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
        minute = self._minutes.setdefault((int(time.time() // 60), session.owner or ""), Minute())
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
            if session.is_agent:
                minute.worst_ms = max(minute.worst_ms, sum(waits.values()))
            for name, tokens in costs.items():
                setattr(minute, name, getattr(minute, name) + tokens)
            told = {"status": "finished", "finish_reason": event.reason, **costs}
        seconds = None if not seen.begun_at else round(time.time() - seen.begun_at, 3)
        self._note(session, "turn", **told, **waits, seconds=seconds, late_s=seen.late_s)

    def end(self) -> None:
        self._then.end()

    async def run(self) -> None:
        """Write what there is, again and again. Endless."""
        if self._running is not None:
            with suppress(OSError):
                self._running.touch()
        while True:
            await self.write()
            await asyncio.sleep(WRITE_S)

    async def write(self) -> None:
        """Write what has been noted. A disk that is full costs the notes, and a warning."""
        async with self._writing:  # else sums of a minute could come behind later ones
            await self._write_noted()

    async def _write_noted(self) -> None:
        entries, self._entries = self._entries, []
        now = int(time.time() // 60)
        minutes = [(at, owner, self._began, json.dumps(each.told())) for (at, owner), each in self._minutes.items()]
        self._minutes = {key: each for key, each in self._minutes.items() if key[0] >= now}
        if not entries and not minutes:
            return
        try:
            await asyncio.to_thread(self._write, entries, minutes)
            self._is_failing = False
        except sqlite3.Error as error:
            if not self._is_failing:
                logger.warning("the history of sessions was not written: %s", error)
            self._is_failing = True
            await asyncio.to_thread(self._mend, error)

    async def timeline(
        self, session: SessionId, owner: str | None, *, is_operator: bool, before: int | None, limit: int
    ) -> list[dict[str, Any]]:
        """The session's newest entries, the newest first, before the one of that id; whose it is not sees none."""
        await self.write()
        where = "session = ? AND id < ?" + ("" if is_operator else " AND owner = ?")
        values = [session, before or 1 << 62, *([] if is_operator else [owner or ""]), limit]
        rows = await asyncio.to_thread(
            self._read, f"SELECT id, at, body FROM entry WHERE {where} ORDER BY id DESC LIMIT ?", values
        )
        return [{"id": number, "at": at, **json.loads(body)} for number, at, body in rows]

    async def activity(
        self, owner: str | None, *, is_operator: bool, since: float, limit: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Minutes since then, the oldest first, of all tenants together for an operator, and what happened to the
        server meanwhile.
        """
        await self.write()
        mine, values = ("", []) if is_operator else (" AND owner = ?", [owner or ""])
        sums = ", ".join(f"{_KEPT[name]}(json_extract(body, '$.{name}'))" for name in _KEPT)
        minutes = await asyncio.to_thread(
            self._read,
            f"SELECT at, {sums} FROM minute WHERE at >= ?{mine} GROUP BY at ORDER BY at LIMIT ?",
            [int(since // 60), *values, limit],
        )
        marks = await asyncio.to_thread(
            self._read, "SELECT at, body FROM entry WHERE session = '' AND at >= ? ORDER BY id DESC LIMIT ?",
            [since, limit],
        )  # fmt: skip
        told = [{"at": row[0] * 60, **dict(zip(_KEPT, row[1:], strict=True))} for row in minutes]
        return told, [{"at": at, **json.loads(body)} for at, body in reversed(marks)]

    async def close(self) -> None:
        """Write the rest."""
        self._mark("stopped")
        await self.write()
        with self._lock:
            self._connection.close()
        if self._running is not None:
            with suppress(OSError):  # a folder that can only be read now
                self._running.unlink()

    def _mark(self, kind: str) -> None:
        self._entries.append((time.time(), "", "", json.dumps({"kind": kind})))

    def _note(self, session: Session, kind: str, **told: object) -> None:
        if session.unseen:
            return
        body = json.dumps({"kind": kind, **{name: value for name, value in told.items() if value is not None}})
        self._entries.append((time.time(), session.owner or "", session.id, body))

    def _write(self, entries: list[tuple[float, str, str, str]], minutes: list[tuple[int, str, float, str]]) -> None:
        with self._lock, self._connection:
            self._connection.executemany("INSERT INTO entry (at, owner, session, body) VALUES (?, ?, ?, ?)", entries)
            self._connection.executemany("INSERT OR REPLACE INTO minute VALUES (?, ?, ?, ?)", minutes)
            now = time.time()
            if now - self._looked_at > LOOK_S:
                self._looked_at = now
                for table, oldest in (("entry", now - KEPT_S), ("minute", (now - KEPT_S) / 60)):
                    self._connection.execute(f"DELETE FROM {table} WHERE at < ?", [oldest])
                self._connection.execute(
                    "DELETE FROM entry WHERE id <= (SELECT max(id) FROM entry) - ?", [MOST_ENTRIES]
                )
                excess = "SELECT at FROM minute ORDER BY at DESC LIMIT 1 OFFSET ?"
                self._connection.execute(f"DELETE FROM minute WHERE at <= ({excess})", [MOST_MINUTES])

    def _read(self, query: str, values: list[Any]) -> list[Any]:
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


_KEPT = {name: "max" if name == "worst_ms" else "sum" for name in Minute.__dataclass_fields__}
"""How the minutes of several tenants come together: a session has one."""


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
        connection.executescript(_TABLES)
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection
