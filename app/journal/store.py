"""The journal's SQLite file: its checks, its formats, and one transaction per batch."""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from app.domain.errors import FieldOutOfRange
from app.domain.values import ModelInfo, Phase, Residency
from app.journal import tables
from app.journal.lease import LEASE_TABLE, OUT_OF_REACH, Lease, Renewals, find_lease, put_lease
from app.journal.migrations import FORMAT, OLDEST, bring_up_to_date, rename_tenants
from app.journal.records import TOKEN_BYTES, Identity, SessionRecord, WriteBatch, moves
from app.journal.tables import COLUMNS, Fence, Refused, write_batch
from app.machine.files import counted, explain, make_private

BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def unusable(path: Path, error: Exception) -> FieldOutOfRange:
    """SQLite, or a reader of its answers, raised `error`. Only some of SQLite's codes mean damage."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        advice = f"make room there. Files in {path.parent / 'kv'} may go: they cost time, and nothing else"
    elif code in BUSY:
        advice = "another program keeps it for itself; end that program, and start again"
    elif code in OUT_OF_REACH:
        advice = "look at its disk, which may be broken or have no room. Leave the file where it is: it may be whole"
    else:
        return damaged(path, str(error))
    return refusal(f"cannot open the journal {path}: {error}; {advice}")


def damaged(path: Path, why: str) -> FieldOutOfRange:
    """What is in the file is not what was written."""
    return refusal(
        f"Djinn cannot read the journal {path}: {why}; put back a copy of it, or move it away to start without the "
        "sessions in it"
    )


def no_news(path: Path, error: OSError) -> FieldOutOfRange:
    """The file of a lease's news cannot be read or made."""
    return refusal(
        f"cannot use {path}, where a server without room says that it lives: {explain(error)}; make room, make it "
        "readable and writable, or name another folder with --state-dir"
    )


def refusal(message: str) -> FieldOutOfRange:
    """A server cannot start with the journal in its `--state-dir`."""
    return FieldOutOfRange(message, param="state_dir")


T = TypeVar("T")
TABLES = f"""
CREATE TABLE model (name TEXT NOT NULL, vocab_size INTEGER NOT NULL, layers INTEGER NOT NULL, hidden INTEGER NOT NULL)
STRICT;
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, metadata TEXT NOT NULL, ttl_s INTEGER, residency TEXT NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, usage TEXT NOT NULL,
    forked_from TEXT, forked_tokens INTEGER, namespace TEXT,
    adapter TEXT, adapter_digest TEXT
) STRICT, WITHOUT ROWID;
CREATE TABLE tokens (
    session TEXT NOT NULL, position INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
{tables.BREAKPOINT_TABLES}
{tables.RESPONSE_TABLE}
{tables.HOME_TABLES}
{tables.IDENTITY_TABLE}
{tables.KEYED_TABLE}
{tables.API_KEY_TABLE}
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
PRAGMA user_version = {FORMAT};
"""
"""A history is the `ids` of its rows in the order of `position`, which is that of a row's first token. `proof` means
nothing: that it could be written is the proof.
"""


def make_journal(path: Path) -> None:
    """Make the file whole before it has its name: so an empty one is known to be damaged. Raises `FieldOutOfRange`."""
    if path.with_name(f"{path.name}-wal").exists():
        raise damaged(path, "the file itself is missing, but the changes to be added to it (-wal) are there")
    unnamed = path.with_name(f"{path.name}.new")
    unnamed.unlink(missing_ok=True)
    make_private(unnamed)
    connection = sqlite3.connect(unnamed)
    try:
        connection.executescript(TABLES)
    except sqlite3.Error as error:
        raise FieldOutOfRange(f"cannot make the journal {path}: {error}", param="state_dir") from error
    finally:
        connection.close()
    os.replace(unnamed, path)


SMALL_BYTES = 64 << 10
"""What a turn or a new session has to write, at most. A journal that has no room even for that keeps no promise; a
larger change may be the only one that does not fit.
"""


class JournalStore:
    """The file at `path`, which is made if it is not there. Used by one thread at a time.

    Commits are written, not flushed (`synchronous=NORMAL` in WAL mode), but for those about sessions that move. The
    death of the process loses none of them.
    After a power cut the last ones, which the system had not flushed yet, may be missing; what is there is whole.

    WAL is for one machine at a time: it has a part in memory that processes share. A file that is `shared` by machines
    is written without it, and each commit is flushed.
    """

    def __init__(self, path: Path, *, shared: bool = False, hold: Callable[[JournalStore], None] | None = None) -> None:
        """`hold` makes the file this server's, and calls `set_modes`. It is called before the whole file is read, which
        may take long and keep others from writing.

        Raises `FieldOutOfRange` if the file is damaged, not a journal, of a format that this version does not read,
        or cannot be used now: no session is given up in silence.
        """
        self._path = path
        self._renewals = Renewals(path)
        self._modes = ("DELETE", "FULL") if shared else ("WAL", "NORMAL")
        self.fence: Fence = lambda connection: None
        """Called in each transaction: it raises an exception unless the folder is still this server's."""
        if not path.exists():
            make_journal(path)
        elif not path.stat().st_size:
            raise damaged(path, "it is empty")  # it got its name when it was whole
        self._require_writable()
        self._connection = sqlite3.connect(path, isolation_level="IMMEDIATE", check_same_thread=False)
        try:
            if hold is None:
                self.set_modes()
            else:
                hold(self)
            self._check()
        except sqlite3.DatabaseError as error:
            self.close()
            raise unusable(path, error) from error
        except BaseException:
            self.close()
            raise

    def set_modes(self) -> None:
        """Choose between WAL and none. Only who holds the file may. SQLite does not leave WAL while others have the
        file open. Raises `sqlite3.Error`.
        """
        mode, flush = self._modes
        self._connection.execute(f"PRAGMA journal_mode = {mode}")
        self._connection.execute(f"PRAGMA synchronous = {flush}")

    def load(
        self, model: ModelInfo, keys: Mapping[str, str] = MappingProxyType({})
    ) -> list[tuple[SessionRecord, array[int]]]:
        """Every session and its history, by id. From now on the journal is `model`'s, and of this version's format.
        Sessions of `keys` have the names that those have now (`rename_tenants`).

        Raises `FieldOutOfRange` if the sessions are another model's, to which their token ids mean nothing: then the
        file is as it was. Raises it too if the file is damaged, or cannot be written now.
        """
        try:
            self._require_free_for(model)
            bring_up_to_date(self._connection, self._path, self.fence)
            self._claim(model)
            rename_tenants(self._connection, keys, self.fence)
            rows = [SessionRecord(*row) for row in self._connection.execute(f"SELECT {COLUMNS} FROM session")]
            records = [replace(each, residency=Residency(each.residency), phase=Phase(each.phase)) for each in rows]
            histories = {record.id: array("I") for record in records}
            for session, position, ids in self._connection.execute("SELECT * FROM tokens ORDER BY session, position"):
                if session not in histories or position != len(histories[session]) or len(ids) % TOKEN_BYTES:
                    raise damaged(self._path, f"the history of session {session} is not whole at token {position}")
                histories[session].frombytes(ids)
        except (sqlite3.DatabaseError, ValueError) as error:
            raise unusable(self._path, error) from error
        for session, history in histories.items():
            if max(history, default=0) >= model.vocab_size:
                raise damaged(self._path, f"the history of session {session} has tokens that the model does not have")
        return [(record, histories[record.id]) for record in sorted(records, key=lambda record: record.id)]

    def read(self, load: Callable[[sqlite3.Connection], T]) -> T:
        """What `load`, a function of `tables`, finds in the file. Raises `FieldOutOfRange` if the file is damaged."""
        try:
            return load(self._connection)
        except (sqlite3.DatabaseError, ValueError, LookupError, TypeError) as error:
            raise unusable(self._path, error) from error

    def apply(self, batch: WriteBatch) -> Refused:
        """`write_batch` to the file. Where sessions move, another server relies on it: then it is flushed too, and what
        was written before it with it.
        """
        if not any(map(moves, batch.values())):
            return write_batch(self._connection, batch, self.fence)
        with self._flushed():
            return write_batch(self._connection, batch, self.fence)

    def write_identity(self, identity: Identity) -> None:
        """Have that one, flushed. Raises `sqlite3.Error`, and what the fence raises."""
        with self._flushed(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self.fence(self._connection)
            self._connection.execute("REPLACE INTO identity VALUES (1, ?, ?, ?)", astuple(identity))

    @contextmanager
    def _flushed(self) -> Iterator[None]:
        """What is committed in the block survives a power cut."""
        self._connection.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self._connection.execute(f"PRAGMA synchronous = {self._modes[1]}")

    def prove_writable(self) -> None:
        """Write `SMALL_BYTES` that mean nothing. Raises `sqlite3.Error` if that cannot be done."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self.fence(self._connection)
            self._connection.execute("REPLACE INTO proof VALUES (1, zeroblob(?))", (SMALL_BYTES,))

    def make_news(self) -> None:
        """Have the file that a lease needs beside this one. Raises `FieldOutOfRange` if there can be none."""
        try:
            self._renewals.make()
        except OSError as error:
            raise no_news(self._renewals.path, error) from error

    def lease(self) -> Lease | None:
        """That of the folder; None: others have the file for long. Raises `FieldOutOfRange` if it is damaged, or its
        news cannot be read.
        """
        return self._unless_busy(self._look_at_lease)

    def take_lease(self, found: Lease, taken: Lease) -> bool:
        """Put `taken` in the place of `found`, which has been seen. False, and nothing is done, if it has changed
        since. It is flushed: a power cut must not bring the former holder back. Raises like `lease`.
        """
        with self._flushed():
            return self._unless_busy(partial(self._replace_lease, found, taken)) or False

    def _replace_lease(self, found: Lease, taken: Lease) -> bool:
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            is_unchanged = self._look_at_lease() == found
            if is_unchanged:
                self._connection.execute(LEASE_TABLE)
                put_lease(self._connection, taken)
        return is_unchanged

    def _unless_busy(self, do: Callable[[], T]) -> T | None:
        """What `do` returns; None: others have the file for long. Raises like `lease`."""
        try:
            return do()
        except OSError as error:
            raise no_news(self._renewals.path, error) from error
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:  # its extended codes have more bits
                raise unusable(self._path, error) from error
            return None

    def _look_at_lease(self) -> Lease:
        return replace(find_lease(self._connection), news=self._renewals.read())

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _check(self) -> None:
        if (found := self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise damaged(self._path, found)
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT and not self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise damaged(self._path, "it has no tables")
        if not OLDEST <= version <= FORMAT:
            age = "a newer" if version > FORMAT else "an older"
            raise refusal(
                f"the journal {self._path} was written by {age} version of Djinn: its format is {version}, this "
                f"version reads {OLDEST} to {FORMAT}. It is not damaged. Go on with that version, put back a backup "
                "that this version wrote, name another folder with --state-dir, or move the file away to start without "
                "its sessions"
            )

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
                raise refusal(
                    f"cannot write the journal {path}: {explain(error)}; make it writable, or name another folder with "
                    "--state-dir"
                ) from error
            make_private(path)

    def _require_free_for(self, model: ModelInfo) -> None:
        theirs, ours = self._owner(), _identity(model)
        named = "SELECT name FROM sqlite_schema WHERE name IN ('upload', 'vector')"  # before format 10 it is `vector`
        (table,) = self._connection.execute(named).fetchone()
        count = f"SELECT (SELECT count(*) FROM session), (SELECT count(*) FROM {table})"
        sessions, uploads = self._connection.execute(count).fetchone()
        if theirs == ours or not (sessions or uploads):
            return
        if theirs is None:
            raise damaged(self._path, "it lacks the model of its sessions")
        held = f"{counted(sessions, 'session')} and {counted(uploads, 'upload')}"
        sizes = "vocabulary {1}, {2} layers of {3}"
        raise refusal(
            f"the {held} in {self._path.parent} are those of model {theirs[0]!r} ({sizes.format(*theirs)}), not of "
            f"{ours[0]!r} ({sizes.format(*ours)}); serve that model, or name another folder with --state-dir"
        )

    def _claim(self, model: ModelInfo) -> None:
        if self._owner() != _identity(model):
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self.fence(self._connection)
                self._connection.execute("DELETE FROM model")
                self._connection.execute("INSERT INTO model VALUES (?, ?, ?, ?)", _identity(model))

    def _owner(self) -> tuple[object, ...] | None:
        """The model whose sessions these are; None: none yet."""
        found: tuple[object, ...] | None = self._connection.execute(
            "SELECT name, vocab_size, layers, hidden FROM model"
        ).fetchone()
        return found


def _identity(model: ModelInfo) -> tuple[object, ...]:
    return model.name, model.vocab_size, model.num_layers, model.hidden_size
