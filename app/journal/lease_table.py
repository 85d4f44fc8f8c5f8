"""The journal's row of who holds the folder. Any version reads a journal without it: it is made when it is needed."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

from app.domain.leases import NOBODYS, Lease
from app.journal.renewals import Renewals

TABLE = """
CREATE TABLE IF NOT EXISTS lease (
    id INTEGER PRIMARY KEY CHECK (id = 1), epoch INTEGER NOT NULL, holder TEXT NOT NULL, machine TEXT NOT NULL,
    length_s REAL NOT NULL, renewals INTEGER NOT NULL
) STRICT
"""


def find_lease(connection: sqlite3.Connection) -> Lease:
    """The folder's lease."""
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'lease'").fetchone() is None:
        return NOBODYS
    found = connection.execute("SELECT epoch, holder, machine, length_s, renewals FROM lease").fetchone()
    return NOBODYS if found is None else Lease(*found)


def look_at_lease(connection: sqlite3.Connection, renewals: Renewals) -> Lease:
    """The folder's lease with all its news. Raises `OSError` if the file of news cannot be read."""
    return replace(find_lease(connection), news=renewals.read())


def take_lease(connection: sqlite3.Connection, renewals: Renewals, found: Lease, taken: Lease) -> bool:
    """Put `taken` in the place of `found`, which has been seen. False, and nothing is done, if it has changed since.
    Raises like `look_at_lease`.
    """
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if look_at_lease(connection, renewals) != found:
            return False
        connection.execute(TABLE)
        _put(connection, taken)
    return True


def renew_lease(connection: sqlite3.Connection, mine: Lease) -> Lease | None:
    """Give the lease of `mine`'s holder news. None, and nothing is done, if another server has it."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        found = find_lease(connection)  # it may be ahead of `mine`: a write whose answer was lost
        if not found.is_of(mine):
            return None
        renewed = found.renewed()
        _put(connection, renewed)
    return renewed


def renew_in_place(connection: sqlite3.Connection, renewals: Renewals, mine: Lease) -> Lease | None:
    """The same as `renew_lease` where the journal has no room. A transaction that writes nothing holds its lock
    meanwhile: no server takes the lease between the look and the news. Raises `OSError` if there can be no news.
    """
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if not find_lease(connection).is_of(mine):
            return None
        renewals.write()
    return mine


def release_lease(connection: sqlite3.Connection, mine: Lease) -> None:
    """Release the lease of `mine`'s holder, unless another server has it."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        found = find_lease(connection)
        if found.is_of(mine):
            _put(connection, found.released())


def _put(connection: sqlite3.Connection, lease: Lease) -> None:
    fields = (lease.epoch, lease.holder, lease.machine, lease.length_s, lease.renewals)
    connection.execute("REPLACE INTO lease VALUES (1, ?, ?, ?, ?, ?)", fields)
