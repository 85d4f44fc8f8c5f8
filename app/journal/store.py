"""The journal's SQLite file: its tables, its checks, and one transaction per batch."""

from __future__ import annotations

import os
import sqlite3
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange
from app.domain.homes import Home
from app.domain.values import ModelInfo, Phase, Residency, SessionId
from app.journal import breakpoint_tables, home_table, refusals, response_table
from app.journal.migrations import FORMAT, OLDEST, bring_up_to_date
from app.journal.records import TOKEN_BYTES, ResponseRecord, SessionRecord, VectorKey, WriteBatch, moves
from app.journal.steering import Steering
from app.journal.writing import COLUMNS, Refused, write_batch
from app.machine.files import make_private
from app.machine.units import counted

TABLES = f"""
CREATE TABLE model (name TEXT NOT NULL, vocab_size INTEGER NOT NULL, layers INTEGER NOT NULL, hidden INTEGER NOT NULL)
STRICT;
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, metadata TEXT NOT NULL, ttl_s INTEGER, residency TEXT NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, usage TEXT NOT NULL,
    forked_from TEXT, forked_tokens INTEGER, namespace TEXT
) STRICT, WITHOUT ROWID;
CREATE TABLE tokens (
    session TEXT NOT NULL, position INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
{breakpoint_tables.TABLES}
{response_table.TABLE}
{home_table.TABLE}
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
PRAGMA user_version = {FORMAT};
"""
"""A history is the `ids` of its rows in the order of `position`, which is that of a row's first token. `proof` means
nothing: that it could be written is the proof.
"""
SMALL_BYTES = 64 << 10
"""What a turn or a new session has to write, at most. A journal that has no room even for that keeps no promise; a
larger change may be the only one that does not fit.
"""


class JournalStore:
    """The file at `path`, which is made if it is not there. Used by one thread at a time.

    Commits are written, not flushed (`synchronous=NORMAL` in WAL mode), but for those about sessions that move. The
    death of the process loses none of them.
    After a power cut the last ones, which the system had not flushed yet, may be missing; what is there is whole.
    """

    def __init__(self, path: Path) -> None:
        """Raises `FieldOutOfRange` if the file is damaged, not a journal, of a format that this version does not read,
        or cannot be used now: no session is given up in silence.
        """
        self._path = path
        if not path.exists():
            self._create()
        elif not path.stat().st_size:
            raise refusals.damaged(path, "it is empty")  # it got its name when it was whole
        self._require_writable()
        self._connection = sqlite3.connect(path, isolation_level="IMMEDIATE", check_same_thread=False)
        try:
            self._check()
        except sqlite3.DatabaseError as error:
            self.close()
            raise refusals.unusable(path, error) from error
        except FieldOutOfRange:
            self.close()
            raise

    def load(self, model: ModelInfo) -> list[tuple[SessionRecord, array[int]]]:
        """Every session and its history, by id. From now on the journal is `model`'s, and of this version's format.

        Raises `FieldOutOfRange` if the sessions are another model's, to which their token ids mean nothing: then the
        file is as it was. Raises it too if the file is damaged, or cannot be written now.
        """
        try:
            self._require_free_for(model)
            bring_up_to_date(self._connection, self._path)
            self._claim(model)
            records = [self._record(row) for row in self._connection.execute(f"SELECT {COLUMNS} FROM session")]
            histories = {record.id: array("I") for record in records}
            for session, position, ids in self._connection.execute("SELECT * FROM tokens ORDER BY session, position"):
                if session not in histories or position != len(histories[session]) or len(ids) % TOKEN_BYTES:
                    raise self._damaged(f"the history of session {session} is not whole at token {position}")
                histories[session].frombytes(ids)
        except (sqlite3.DatabaseError, ValueError) as error:
            raise refusals.unusable(self._path, error) from error
        for session, history in histories.items():
            if max(history, default=0) >= model.vocab_size:
                raise self._damaged(f"the history of session {session} has tokens that the model does not have")
        return [(record, histories[record.id]) for record in sorted(records, key=lambda record: record.id)]

    def load_steering(self) -> dict[SessionId, Steering]:
        """That of every session that has some. Raises `FieldOutOfRange` if the file is damaged."""
        try:
            return breakpoint_tables.load_steering(self._connection)
        except (sqlite3.DatabaseError, ValueError) as error:
            raise refusals.unusable(self._path, error) from error

    def load_vectors(self) -> dict[VectorKey, TensorData]:
        """Every owner's vectors. Raises `FieldOutOfRange` if the file is damaged."""
        try:
            return breakpoint_tables.load_vectors(self._connection)
        except (sqlite3.DatabaseError, ValueError) as error:
            raise refusals.unusable(self._path, error) from error

    def load_responses(self) -> list[ResponseRecord]:
        """Every response. Raises `FieldOutOfRange` if the file is damaged."""
        try:
            return response_table.load_responses(self._connection)
        except sqlite3.DatabaseError as error:
            raise refusals.unusable(self._path, error) from error

    def load_homes(self) -> dict[SessionId, Home]:
        """Sessions that have moved. Raises `FieldOutOfRange` if the file is damaged."""
        try:
            return home_table.load_homes(self._connection)
        except (sqlite3.DatabaseError, ValueError) as error:
            raise refusals.unusable(self._path, error) from error

    def apply(self, batch: WriteBatch) -> Refused:
        """`write_batch` to the file. Where sessions move, another server relies on it: then it is flushed too, and what
        was written before it with it.
        """
        if not any(map(moves, batch.values())):
            return write_batch(self._connection, batch)
        self._connection.execute("PRAGMA synchronous = FULL")
        try:
            return write_batch(self._connection, batch)
        finally:
            self._connection.execute("PRAGMA synchronous = NORMAL")

    def prove_writable(self) -> None:
        """Write `SMALL_BYTES` that mean nothing. Raises `sqlite3.Error` if that cannot be done."""
        with self._connection:
            self._connection.execute("REPLACE INTO proof VALUES (1, zeroblob(?))", (SMALL_BYTES,))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _create(self) -> None:
        """Make the file whole before it has its name: so an empty one is known to be damaged."""
        if self._path.with_name(f"{self._path.name}-wal").exists():
            raise self._damaged("the file itself is missing, but the changes to be added to it (-wal) are there")
        unnamed = self._path.with_name(f"{self._path.name}.new")
        unnamed.unlink(missing_ok=True)
        make_private(unnamed)
        connection = sqlite3.connect(unnamed)
        try:
            connection.executescript(TABLES)
        except sqlite3.Error as error:
            raise FieldOutOfRange(f"cannot make the journal {self._path}: {error}", param="state_dir") from error
        finally:
            connection.close()
        os.replace(unnamed, self._path)

    def _check(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if (found := self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise self._damaged(found)
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT and not self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise self._damaged("it has no tables")
        if not OLDEST <= version <= FORMAT:
            raise refusals.of_another_version(self._path, version, OLDEST, FORMAT)

    def _require_writable(self) -> None:
        """SQLite opens a read-only file too, and fails at the first commit. Others than the owner read none: whoever
        made the folder may have let them in.
        """
        for path in (self._path, *(self._path.with_name(f"{self._path.name}-{end}") for end in ("wal", "shm"))):
            try:
                path.open("r+b").close()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise refusals.unwritable(path, error) from error
            make_private(path)

    def _require_free_for(self, model: ModelInfo) -> None:
        theirs, ours = self._owner(), _identity(model)
        count = "SELECT (SELECT count(*) FROM session), (SELECT count(*) FROM vector)"
        sessions, vectors = self._connection.execute(count).fetchone()
        if theirs == ours or not (sessions or vectors):
            return
        if theirs is None:
            raise self._damaged("it does not say which model its sessions are of")
        held = f"{counted(sessions, 'session')} and {counted(vectors, 'vector')}"
        raise refusals.of_another_model(self._path.parent, held, theirs, ours)

    def _claim(self, model: ModelInfo) -> None:
        if self._owner() != _identity(model):
            with self._connection:
                self._connection.execute("DELETE FROM model")
                self._connection.execute("INSERT INTO model VALUES (?, ?, ?, ?)", _identity(model))

    def _owner(self) -> tuple[object, ...] | None:
        """The model whose sessions these are; None: nobody's yet."""
        found: tuple[object, ...] | None = self._connection.execute(
            "SELECT name, vocab_size, layers, hidden FROM model"
        ).fetchone()
        return found

    @staticmethod
    def _record(row: tuple[Any, ...]) -> SessionRecord:
        """Raises `ValueError` for a phase or residency that there is not."""
        read = SessionRecord(*row)  # the table is STRICT
        return replace(read, residency=Residency(read.residency), phase=Phase(read.phase))

    def _damaged(self, why: str) -> FieldOutOfRange:
        return refusals.damaged(self._path, why)


def _identity(model: ModelInfo) -> tuple[object, ...]:
    return model.name, model.vocab_size, model.num_layers, model.hidden_size
