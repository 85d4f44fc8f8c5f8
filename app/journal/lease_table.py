"""The journal's row of who holds the folder. Any version reads a journal without it: it is made when it is needed."""

from __future__ import annotations

import os
import secrets
import sqlite3
from pathlib import Path

from app.domain.leases import NOBODYS, Lease
from app.machine.files import make_private, sync

NAME = "renewals"
WORD_BYTES = 16
SIZE = 2 * WORD_BYTES
"""Of the file: one word that never comes twice, in hexadecimal."""


class Renewals:
    """The file at `path`, beside the journal. Who renews or takes a lease holds the journal's write lock meanwhile. Who
    only watches needs no lock, as the take looks again. `make` needs none either: its word is news too, and only makes
    others wait longer.
    """

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_name(NAME)

    def make(self) -> None:
        """Have the file, with its room on the disk. Raises `OSError`."""
        make_private(self.path)
        if self.path.stat().st_size != SIZE:
            self.path.write_text(secrets.token_hex(WORD_BYTES))
        sync(self.path)
        sync(self.path.parent)

    def read(self) -> str:
        """What is in the file; empty without a file. Raises `OSError`."""
        try:
            return self.path.read_bytes().hex()
        except FileNotFoundError:
            return ""

    def write(self) -> None:
        """Overwrite the file with another word, and flush it. Raises `OSError`, also if there is no such file."""
        descriptor = os.open(self.path, os.O_WRONLY)  # never a new one: that needs room, and others may look at it
        try:
            os.pwrite(descriptor, secrets.token_hex(WORD_BYTES).encode(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


def renew_lease(connection: sqlite3.Connection, mine: Lease) -> Lease | None:
    """Give the lease of `mine`'s holder news. None, and nothing is done, if another server has it."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        found = find_lease(connection)  # it may be ahead of `mine`: a write whose answer was lost
        if not found.is_of(mine):
            return None
        renewed = found.renewed()
        put_lease(connection, renewed)
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
            put_lease(connection, found.released())


def put_lease(connection: sqlite3.Connection, lease: Lease) -> None:
    """Write it into the row, in a transaction that has seen who holds the folder."""
    fields = (lease.epoch, lease.holder, lease.machine, lease.length_s, lease.renewals)
    connection.execute("REPLACE INTO lease VALUES (1, ?, ?, ?, ?, ?)", fields)
