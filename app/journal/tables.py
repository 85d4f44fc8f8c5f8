"""The tables of a journal, and a file that has them."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.journal import breakpoint_tables, home_table, key_names, keyed_table, refusals, response_table
from app.journal.migrations import FORMAT
from app.machine.files import make_private

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
{keyed_table.TABLE}
{key_names.TABLE}
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
PRAGMA user_version = {FORMAT};
"""
"""A history is the `ids` of its rows in the order of `position`, which is that of a row's first token. `proof` means
nothing: that it could be written is the proof.
"""


def make_journal(path: Path) -> None:
    """Make the file whole before it has its name: so an empty one is known to be damaged. Raises `FieldOutOfRange`."""
    if path.with_name(f"{path.name}-wal").exists():
        raise refusals.damaged(path, "the file itself is missing, but the changes to be added to it (-wal) are there")
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
