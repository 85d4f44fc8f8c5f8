"""Journals and what goes into them, for tests."""

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.domain.points import Point, PointShape
from app.domain.values import ModelInfo, Phase, Residency, SessionId
from app.journal.journal import Journal
from app.journal.records import Change, SessionRecord
from app.journal.store import JournalStore

FILE = "journal.sqlite3"


def model_info(name: str = "tiny", vocab_size: int = 512) -> ModelInfo:
    """A model of that name and vocabulary; the rest is of no matter to the journal."""
    points = {Point.RESID_POST: (PointShape(64),) * 2}
    return ModelInfo(name, 1024, vocab_size, 2, 64, 2, 16, "float32", "cpu", 1, 1, "float32", points=points)


def record(session: str, **changed: Any) -> SessionRecord:
    """A session with a value in every field."""
    whole = SessionRecord(
        id=SessionId(session),
        owner="me",
        name=None,
        metadata='{"a": "b"}',
        ttl_s=60,
        residency=Residency.GUARANTEED,
        phase=Phase.IO_WAIT,
        created_at=1.5,
        used_at=2.5,
        usage='{"prompt_tokens": 1}',
        forked_from=SessionId("ses_other"),
        forked_tokens=7,
        namespace="ses_imported",
    )
    return replace(whole, **changed)


def change(session: str, position: int, token_ids: Sequence[int], **changed: Any) -> Change:
    """The session's history from `position` on is `token_ids` now."""
    return Change(record(session, **changed), position, array("I", token_ids).tobytes())


def _connection_of(kept: Journal | JournalStore) -> sqlite3.Connection:
    return (kept.store if isinstance(kept, Journal) else kept)._connection


def limit_pages(kept: Journal | JournalStore, more: int = 0) -> None:
    """The disk has room for so many pages more, as far as SQLite knows."""
    connection = _connection_of(kept)
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + more}")


def be_impatient(kept: Journal | JournalStore) -> None:
    """Wait for a file that another process holds for 10 ms only."""
    _connection_of(kept).execute("PRAGMA busy_timeout = 10")


def started(folder: Path, lease_s: float | None = None) -> Journal:
    journal = Journal(folder, lease_s)
    journal.store.load(model_info())
    journal.start()
    return journal


def execute(path: Path, sql: str) -> None:
    """Change the file as no server does."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)


@contextmanager
def held_up(folder: Path) -> Iterator[None]:
    """Another process writes to the journal in `folder`: all others wait."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield
        holder.execute("ROLLBACK")


def filled(path: Path, sessions: int = 50) -> None:
    """A journal of `sessions` sessions of 500 tokens, closed."""
    with closing(JournalStore(path)) as store:
        store.load(model_info())
        store.apply({SessionId(f"ses_{index}"): change(f"ses_{index}", 0, range(500)) for index in range(sessions)})


def histories(path: Path) -> dict[str, list[int]]:
    """What a fresh start finds in the file."""
    with closing(JournalStore(path)) as store:
        return {found.id: list(history) for found, history in store.load(model_info())}
