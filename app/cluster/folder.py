"""The cluster's store for replicas of one machine: a SQLite file that all of them use."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import sys
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from app.cluster.store import Store
from app.domain.errors import DirectoryAway, FieldOutOfRange
from app.machine.files import is_over_network, make_private, make_private_folder
from app.machine.memory import boot_time, machine_id

FILE = "cluster.sqlite3"
BUSY_S = 2.0
"""How long another replica may have the file: each transaction takes milliseconds."""
POLL_S = 0.2
"""Between two looks at whether another replica has written: SQLite wakes nobody."""
TABLE = """
CREATE TABLE IF NOT EXISTS entry (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, lender TEXT, ends_at REAL, machine TEXT
) STRICT, WITHOUT ROWID
"""
"""Lent values end by the boot clock, which all processes of a machine share and which runs while it sleeps. Those from
before the machine's start have ended.
"""
LIVES = "(lender IS NULL OR (ends_at > ? AND machine = ?))"
READ, LASTING = "READ", "FULL"
"""Special kinds of transactions: without a lock, and flushed to the disk."""
LAST = chr(sys.maxunicode)

T = TypeVar("T")


class FolderStore(Store):
    """Everything but lent values is flushed to the disk."""

    def __init__(self, path: str) -> None:
        """The store in that folder, which the first use makes. Raises `FieldOutOfRange` for a network file system."""
        self._folder = Path(path).expanduser()
        self.shown = f"folder:{self._folder}"
        self._connection: sqlite3.Connection | None = None
        self._opened: os.stat_result | None = None
        self._machine, self._lender = machine_id(), secrets.token_hex(8)
        # A commit waits for the disk and for other replicas: the event loop must not.
        self._thread = ThreadPoolExecutor(1, "djinn-cluster")

    async def read(self, key: str) -> str | None:
        return await self._do(lambda file: self._find(file, key), READ)

    async def read_all(self, prefix: str, after: str = "", most: int = 0) -> dict[str, str]:
        found = f"SELECT key, value FROM entry WHERE key > ? AND key >= ? AND key < ? AND {LIVES} ORDER BY key LIMIT ?"
        values = (after, prefix, f"{prefix}{LAST}", boot_time(), self._machine, most or -1)
        return await self._do(lambda file: dict(file.execute(found, values)), READ)

    async def write(self, key: str, value: str) -> None:
        await self._do(lambda file: self._put(file, key, value), LASTING)

    async def swap(self, key: str, before: str | None, after: str | None) -> bool:
        def swapped(file: sqlite3.Connection) -> bool:
            is_same = self._find(file, key) == before
            if is_same and after is None:
                file.execute("DELETE FROM entry WHERE key = ?", (key,))
            elif is_same and after is not None:
                self._put(file, key, after)
            return is_same

        return await self._do(swapped, LASTING)

    async def lend(self, key: str, value: str, seconds: float) -> bool:
        def lent(file: sqlite3.Connection) -> bool:
            now = boot_time()
            had = f"SELECT 1 FROM entry WHERE key = ? AND lender = ? AND {LIVES}"
            is_on = file.execute(had, (key, self._lender, now, self._machine)).fetchone() is not None
            row = (key, value, self._lender, now + seconds, self._machine)
            file.execute("REPLACE INTO entry VALUES (?, ?, ?, ?, ?)", row)
            return is_on

        return await self._do(lent)

    async def take_back(self, key: str) -> None:
        mine = (key, self._lender)
        await self._do(lambda file: file.execute("DELETE FROM entry WHERE key = ? AND lender = ?", mine))

    def _find(self, file: sqlite3.Connection, key: str) -> str | None:
        living = (key, boot_time(), self._machine)
        found = file.execute(f"SELECT value FROM entry WHERE key = ? AND {LIVES}", living).fetchone()
        return None if found is None else str(found[0])

    def _put(self, file: sqlite3.Connection, key: str, value: str) -> None:
        file.execute("REPLACE INTO entry VALUES (?, ?, NULL, NULL, NULL)", (key, value))

    async def watch(self, prefix: str, within_s: float) -> AsyncGenerator[None, None]:
        # Changes elsewhere in the file count too.
        while True:
            seen, until = await self._do(self._version, READ), boot_time() + within_s
            yield
            while boot_time() < until and await self._do(self._version, READ) == seen:  # noqa: ASYNC110 (see POLL_S)
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, connection.close)
        self._thread.shutdown(wait=False)

    def _version(self, file: sqlite3.Connection) -> tuple[int, int]:
        (others,) = file.execute("PRAGMA data_version").fetchone()
        return others, file.total_changes

    async def _do(self, what: Callable[[sqlite3.Connection], T], how: str = "") -> T:
        """Do it in one transaction. Raises `DirectoryAway`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, what, how)

    def _transact(self, what: Callable[[sqlite3.Connection], T], how: str) -> T:
        try:
            file = self._open()
            if how == READ:
                return what(file)
            file.execute(f"PRAGMA synchronous = {how or 'NORMAL'}")
            with file:
                file.execute("BEGIN IMMEDIATE")
                return what(file)
        except (sqlite3.Error, OSError) as error:
            raise DirectoryAway(f"the cluster's store {self.shown} cannot be used: {error}") from error

    def _open(self) -> sqlite3.Connection:
        """The file, opened again if it was replaced. Raises `sqlite3.Error`, `OSError`, and `FieldOutOfRange` on a file
        system that several machines share, as their clocks differ.
        """
        path = self._folder / FILE
        if self._connection is not None and self._opened is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(self._opened, path.stat()):
                    return self._connection
            self._connection.close()
            self._connection = None
        make_private_folder(self._folder)
        if is_over_network(self._folder):
            raise FieldOutOfRange(
                f"cluster: {self._folder} is on a file system of several machines: folder: is for the replicas of one. "
                "Several machines need etcd",
                param="cluster",
            )
        make_private(path)
        self._opened = path.stat()
        file = sqlite3.connect(path, BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            file.execute("PRAGMA journal_mode = WAL")
            file.execute(TABLE)
        except BaseException:
            file.close()
            raise
        self._connection = file
        return file
