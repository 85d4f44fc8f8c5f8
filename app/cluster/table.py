"""The directory's table: in memory, and in a journal that survives `kill -9`."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from app.domain.errors import DirectoryAway
from app.machine.files import make_private, make_private_folder

FILE = "directory.sqlite3"
FORGET_S = 31 * 24 * 3600
"""An entry without requests for as long is dropped: a session closes after 30 days without a turn."""
MOST = 500_000
"""Entries. Clients make up names; one more, and the entry whose use was noted first is dropped. What is lost with it is
only a way: a session that moved is found by its home, and a name is bound anew.
"""
NOTE_S = 24 * 3600
"""How old the note of an entry's last use may become: not every use is written."""


class Table:
    """Keys and the replicas that have them. Every change is in the file before its call returns.

    The file is for one process. A change costs a transaction: sessions that move and names that are new are few.
    """

    def __init__(self, folder: Path | None) -> None:
        """Open the table in `folder`, which is made; None: it lives as long as the process. Raises `DirectoryAway`."""
        try:
            if folder is not None:
                make_private_folder(folder)
                make_private(folder / FILE)
            path = ":memory:" if folder is None else folder / FILE
            # A thread makes it, and that of the event loop uses it: never both at once.
            self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._file.execute("CREATE TABLE IF NOT EXISTS places (key TEXT PRIMARY KEY, replica TEXT, used_at REAL)")
            self._file.execute("DELETE FROM places WHERE used_at < ?", (time.time() - FORGET_S,))
            self._places: dict[str, tuple[str, float]] = {
                key: (replica, used_at)
                for key, replica, used_at in self._file.execute("SELECT * FROM places ORDER BY used_at")
            }
            """By key, that whose use was noted last at the end."""
        except (sqlite3.Error, OSError) as error:
            raise DirectoryAway(f"the directory's table cannot be used: {error}") from error

    def __len__(self) -> int:
        return len(self._places)

    async def find(self, key: str) -> str | None:
        """See `Directory.find`."""
        found = self._places.get(key)
        if found is None:
            return None
        replica, used_at = found
        if used_at + NOTE_S < time.time():
            self._write(key, replica)
        return replica

    async def bind(self, key: str, replica: str) -> str:
        """See `Directory.bind`."""
        found = await self.find(key)
        if found is None:
            self._write(key, replica)
        return found or replica

    async def put(self, key: str, replica: str) -> None:
        """See `Directory.put`."""
        if self._places.get(key, ("",))[0] != replica:
            self._write(key, replica)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, key: str, replica: str) -> None:
        used_at = time.time()
        try:
            self._file.execute("INSERT OR REPLACE INTO places VALUES (?, ?, ?)", (key, replica, used_at))
            if key not in self._places and len(self._places) >= MOST:
                oldest = next(iter(self._places))
                self._file.execute("DELETE FROM places WHERE key = ?", (oldest,))
                del self._places[oldest]
        except sqlite3.Error as error:
            raise DirectoryAway(f"the directory's table cannot be written: {error}") from error
        self._places.pop(key, None)
        self._places[key] = replica, used_at
