"""The cluster's store: keys and values that all replicas see alike, in etcd or in a SQLite file of one machine.

It has three kinds of keys:

- `fleet/member/NAME` is what a replica says of itself. It goes when the replica says nothing for some seconds.
- `fleet/journal/NAME` says which journal the name belongs to, and how often that was started; `fleet/tombstone/UUID`
  is a journal that has been given up.
- `place/KEY` is the replica that has a session, a response or a name. The first one to write it wins.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from app.domain.errors import DirectoryAway, FieldOutOfRange
from app.machine.files import is_over_network, make_private, make_private_folder
from app.machine.memory import boot_time, machine_id

FLEET, PLACE = "fleet/", "place/"
MEMBER, JOURNAL, TOMB = f"{FLEET}member/", f"{FLEET}journal/", f"{FLEET}tombstone/"


def refusal(problem: str, param: str = "cluster") -> FieldOutOfRange:
    """The error for a setting with which a replica cannot take part."""
    return FieldOutOfRange(f"{param}: {problem}", param=param)


class Store(ABC):
    """One replica's view of the store. Every method raises `DirectoryAway` if the store does not answer."""

    shown: str
    """Its address, without a password."""

    async def read(self, key: str) -> str | None:
        """The value; None: there is none."""
        return (await self.read_all(key, most=1)).get(key)  # no other key with that prefix comes before it

    @abstractmethod
    async def read_all(self, prefix: str, after: str = "", most: int = 0) -> dict[str, str]:
        """The values of all keys with that prefix, at one moment, by key: at most `most` (0: all) after that key."""

    async def write(self, key: str, value: str) -> None:
        """Set the value."""
        while not await self.swap(key, await self.read(key), value):
            pass  # another replica has changed it meanwhile

    @abstractmethod
    async def swap(self, key: str, before: str | None, after: str | None) -> bool:
        """Replace the value `before` by `after`; None stands for no value. Returns whether it was `before`."""

    @abstractmethod
    async def lend(self, key: str, value: str, seconds: float) -> bool:
        """Set the value for that many seconds. Returns whether this view has lent one all the time since its first."""

    @abstractmethod
    async def take_back(self, key: str) -> None:
        """Remove the lent value."""

    @abstractmethod
    def watch(self, prefix: str, within_s: float) -> AsyncGenerator[None, None]:
        """Yields at once, whenever a key with that prefix may have changed, and at least every `within_s` seconds."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close connections."""


FILE = "cluster.sqlite3"
BUSY_S, POLL_S = 2.0, 0.2
"""How long another replica may have the file, as each transaction takes milliseconds; and the time between two reads of
it, because SQLite does not tell when another process has written.
"""
TABLE = """
CREATE TABLE IF NOT EXISTS entry (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, lender TEXT, ends_at REAL, machine TEXT
) STRICT, WITHOUT ROWID
"""
"""Lent values end by the boot clock: all processes of a machine share it, and it runs while the machine sleeps."""
LIVES = "(lender IS NULL OR (ends_at > boot_time() AND machine = machine_id()))"
READ, LASTING = "READ", "FULL"
"""Special kinds of transactions: without a lock, and flushed to the disk."""
LAST = chr(sys.maxunicode)

T = TypeVar("T")


class FolderStore(Store):
    """The store for replicas of one machine. Everything but lent values is flushed to the disk."""

    def __init__(self, path: str) -> None:
        """The store in that folder, which the first use makes. Raises `FieldOutOfRange` for a network file system."""
        self._folder = Path(path).expanduser()
        self.shown = f"folder:{self._folder}"
        self._opened: tuple[sqlite3.Connection, os.stat_result] | None = None
        """The open file, and its `stat`, which shows when another file has replaced it."""
        self._lender = secrets.token_hex(8)
        # A commit waits for the disk and for other replicas: the event loop must not.
        self._thread = ThreadPoolExecutor(1, "djinn-cluster")

    async def read_all(self, prefix: str, after: str = "", most: int = 0) -> dict[str, str]:
        found = f"SELECT key, value FROM entry WHERE key > ? AND key >= ? AND key < ? AND {LIVES} ORDER BY key LIMIT ?"
        values = (after, prefix, f"{prefix}{LAST}", most or -1)
        return await self._do(lambda file: dict(file.execute(found, values)), READ)

    async def swap(self, key: str, before: str | None, after: str | None) -> bool:
        def swapped(file: sqlite3.Connection) -> bool:
            found = file.execute(f"SELECT value FROM entry WHERE key = ? AND {LIVES}", (key,)).fetchone()
            is_same = (None if found is None else found[0]) == before
            if is_same and after is None:
                file.execute("DELETE FROM entry WHERE key = ?", (key,))
            elif is_same:
                file.execute("REPLACE INTO entry (key, value) VALUES (?, ?)", (key, after))
            return is_same

        return await self._do(swapped, LASTING)

    async def lend(self, key: str, value: str, seconds: float) -> bool:
        def lent(file: sqlite3.Connection) -> bool:
            had = f"SELECT 1 FROM entry WHERE key = ? AND lender = ? AND {LIVES}"
            is_on = file.execute(had, (key, self._lender)).fetchone() is not None
            values = (key, value, self._lender, boot_time() + seconds, machine_id())
            file.execute("REPLACE INTO entry VALUES (?, ?, ?, ?, ?)", values)
            return is_on

        return await self._do(lent)

    async def take_back(self, key: str) -> None:
        mine = (key, self._lender)
        await self._do(lambda file: file.execute("DELETE FROM entry WHERE key = ? AND lender = ?", mine))

    async def watch(self, prefix: str, within_s: float) -> AsyncGenerator[None, None]:
        while True:
            yield
            await asyncio.sleep(POLL_S)

    async def aclose(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, opened[0].close)
        self._thread.shutdown(wait=False)

    async def _do(self, what: Callable[[sqlite3.Connection], T], how: str = "NORMAL") -> T:
        """Do it in one transaction. Raises `DirectoryAway`."""

        def transact() -> T:
            try:
                file = self._open()
                if how == READ:
                    return what(file)
                file.execute(f"PRAGMA synchronous = {how}")
                with file:
                    file.execute("BEGIN IMMEDIATE")
                    return what(file)
            except (sqlite3.Error, OSError) as error:
                raise DirectoryAway(f"the cluster's store {self.shown} cannot be used: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, transact)

    def _open(self) -> sqlite3.Connection:
        """The file, opened again if it was replaced. Raises `sqlite3.Error`, `OSError` and `FieldOutOfRange`."""
        path = self._folder / FILE
        if self._opened is not None:
            file, seen = self._opened
            with suppress(FileNotFoundError):
                if os.path.samestat(seen, path.stat()):
                    return file
            self._opened = None
            file.close()
        make_private_folder(self._folder)
        if is_over_network(self._folder):  # the machines' clocks differ
            raise refusal(
                f"{self._folder} is on a file system of several machines: folder: is for the replicas of one. Several "
                "machines need etcd"
            )
        make_private(path)
        seen = path.stat()
        file = sqlite3.connect(path, BUSY_S, isolation_level=None, check_same_thread=False)
        for function in (boot_time, machine_id):
            file.create_function(function.__name__, 0, function)
        try:
            file.executescript(f"PRAGMA journal_mode = WAL; {TABLE}")
        except BaseException:
            file.close()
            raise
        self._opened = file, seen
        return file
