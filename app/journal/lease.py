"""The lease of a state folder: who may answer for the sessions in it, where two machines can reach the folder.

The folder has one lease, which names its holder. A holder's right ends a lease's length after it began to write its
last renewal, by its own clock. Whoever wants the folder watches the lease. It takes it when the lease has not changed
for longer than any clock of the holder can have needed. So no two clocks have to agree, and a holder that was frozen
finds that its time is over. `docs/design/moves.md` has the protocol.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from app.domain.errors import Fenced, FieldOutOfRange
from app.machine.files import explain, make_private, make_writable, sync
from app.machine.memory import boot_time

logger = logging.getLogger(__name__)

PATIENCE = 1.1
"""How many lengths of a lease without news are its end: of two clocks, neither may go a tenth faster than the other."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What the folder says."""

    epoch: int
    """One more each time that the folder gets another holder."""
    holder: str
    """A word that one process alone has: epochs of a folder that was put back may come twice."""
    machine: str
    """The holder's, since it was started; empty if the system does not tell."""
    length_s: float
    """0: free, as the last holder has released it."""
    renewals: int = 0
    news: str = ""
    """What a file beside the journal says: the holder changes it where it cannot write to the journal."""

    @property
    def is_free(self) -> bool:
        """Whether it is free."""
        return self.length_s == 0

    def next(self, holder: str, machine: str, length_s: float) -> Lease:
        """That of the next holder."""
        return Lease(self.epoch + 1, holder, machine, length_s)

    def renewed(self) -> Lease:
        """The same, with news."""
        return replace(self, renewals=self.renewals + 1)

    def released(self) -> Lease:
        """The same, free."""
        return replace(self, length_s=0.0)

    def is_of(self, other: Lease) -> bool:
        """Whether both have the same holder."""
        return (self.epoch, self.holder) == (other.epoch, other.holder)


NOBODYS = Lease(0, "", "", 0.0)
"""That of a folder that has never had one."""


class Watch:
    """Follows another's lease, by the watcher's own clock."""

    def __init__(self) -> None:
        self._seen: Lease | None = None
        self._since = 0.0

    def left_s(self, found: Lease, now: float) -> float:
        """How long it may still hold. `now` is a time after `found` was read: a watcher may be frozen in between."""
        if found != self._seen:
            self._seen, self._since = found, now
        return max(0.0, self._since + PATIENCE * found.length_s - now)


class Tenure:
    """The holder's own view. Any thread may ask; one renews."""

    def __init__(self, lease: Lease, began: float) -> None:
        """`began` is a time before the lease was written."""
        self.lease = lease
        self.is_lost = False
        """Whether the folder has another holder: for good."""
        self.ends_at = began + lease.length_s

    def renewed(self, lease: Lease, began: float) -> None:
        """The folder has `lease` now; `began` is a time before it was written."""
        self.lease, self.ends_at = lease, began + lease.length_s
        if self.is_lost:
            self.lose()

    def lose(self) -> None:
        """It holds no more, and never will."""
        self.is_lost = True
        self.ends_at = -math.inf


NEWS_NAME = "renewals"
WORD_BYTES = 16
NEWS_BYTES = 2 * WORD_BYTES
"""Of the file: one word that never comes twice, in hexadecimal."""


class Renewals:
    """The file at `path`, beside the journal. Who renews or takes a lease holds the journal's write lock meanwhile. Who
    only watches needs no lock, as the take looks again. `make` needs none either: its word is news too, and only makes
    others wait longer.
    """

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_name(NEWS_NAME)

    def make(self) -> None:
        """Have the file, with its room on the disk. Raises `OSError`."""
        make_private(self.path)
        if self.path.stat().st_size != NEWS_BYTES:
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


LEASE_TABLE = """
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


def put_lease(connection: sqlite3.Connection, lease: Lease) -> None:
    """Write it into the row, in a transaction that has seen who holds the folder."""
    fields = (lease.epoch, lease.holder, lease.machine, lease.length_s, lease.renewals)
    connection.execute("REPLACE INTO lease VALUES (1, ?, ?, ?, ?, ?)", fields)


OUT_OF_REACH = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""The disk has failed, or a quota is used up: the file may be as whole as ever."""


class FolderLock:
    """Holds `folder`, which is made if need be, until `close` or the end of the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        """Try to get hold of it. Raises `FieldOutOfRange` if it cannot be used."""
        self._folder = folder
        self._path = folder / "lock"
        self._file: IO[str] | None = None
        try:
            make_writable(folder, 0o700)
            self.try_again()
        except OSError as error:
            raise FieldOutOfRange(
                f"cannot keep sessions in {folder}: {explain(error)}; name another folder with --state-dir",
                param="state_dir",
            ) from error

    @property
    def is_held(self) -> bool:
        """Whether no other server has it. One that waited for the lease too may have put a file of its own in place of
        the one that is locked here.
        """
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def try_again(self) -> None:
        """Get hold of it, unless another server has it. Raises `OSError` if there can be no such file."""
        self.close()
        file = self._path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return
        self._file = file
        if not self.is_held:
            self.close()

    def replace(self) -> None:
        """Take the place of a holder that is out of reach, and whose lease is over: its lock may never end."""
        self._path.unlink(missing_ok=True)
        self.try_again()

    def refusal(self) -> FieldOutOfRange:
        """What to say if another server has it."""
        return FieldOutOfRange(
            f"another server keeps its sessions in {self._folder}, on this machine, though it may be frozen: end it, "
            "or give this one another folder with --state-dir, or none to keep nothing",
            param="state_dir",
        )

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None


RENEWALS = 3
"""In one length of a lease."""
MOST_BUSY_S = 5.0
"""How long a renewal waits for the file at most: longer would hold up the end of the server too."""
CLOCK_LOOK_S = 1.0
"""Between two looks at the clock, which goes on while the machine sleeps. A wait does not."""
RETRY_S = 1.0
"""Before another attempt at a renewal that has failed, at most."""
TAKES_NOTHING = (sqlite3.SQLITE_FULL, *OUT_OF_REACH)
"""Codes of SQLite for a disk without room. `SQLITE_READONLY` is none: it may mean that the file has been replaced."""


class FolderLease(Tenure):
    """A lease that is held, and renewed until `close`. Any thread may ask."""

    def __init__(self, path: Path, lease: Lease, began: float, lock: FolderLock) -> None:
        """`path` is the journal's, `began` is a time before its lease was written, `lock` is that of its folder."""
        super().__init__(lease, began)
        self._renewals = Renewals(path)
        self._lock = lock
        self._length_s = lease.length_s
        self._path = path
        self._opened = path.stat()  # before it is opened: a file that comes in between counts as another
        # Its own: a large commit of the journal must not hold up a renewal for longer than it has the file.
        busy_s = min(self._length_s / RENEWALS, MOST_BUSY_S)
        self._connection = sqlite3.connect(path, busy_s, isolation_level="IMMEDIATE", check_same_thread=False)
        # Flushed: a disk that has been taken away holds what is only written for some seconds more.
        self._connection.execute("PRAGMA synchronous = FULL")
        self._renewing = threading.Lock()
        self._has_lapsed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="djinn-lease", daemon=True)
        self._thread.start()

    @property
    def holds(self) -> bool:
        """Whether the server may answer for the sessions in the folder now."""
        return boot_time() < self.ends_at

    def require(self) -> None:
        """Raise `Fenced` unless the server may answer for the sessions in the folder now."""
        if not self.holds:
            why = "another server has taken it" if self.is_lost else "it could not be renewed"
            raise Fenced(f"this server has no lease of its state folder, so its sessions may be elsewhere: {why}")

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise `Fenced` unless the lease is held. In a transaction it holds until the end of that."""
        if not find_lease(connection).is_of(self.lease):
            self.lose()
        self.require()

    def let_renew(self) -> None:
        """Wait for a renewal that is under way. For who writes the file, before each transaction: SQLite lets those who
        come again and again go before one that waits.
        """
        with self._renewing:
            pass

    def close(self) -> None:
        """Give the lease back: the next server need not wait."""
        self._closing.set()
        self._thread.join()
        self.ends_at = 0.0
        try:
            if not self.is_lost:
                with self._mine() as found:
                    if found is not None:
                        put_lease(self._connection, found.released())
        except sqlite3.Error as error:
            logger.warning("the lease of the state folder could not be given back: %s", error)
        finally:
            self._connection.close()

    def _run(self) -> None:
        pause_s = self._length_s / RENEWALS
        due = boot_time() + pause_s
        while not self._closing.wait(min(CLOCK_LOOK_S, max(0.0, due - boot_time()))) and not self.is_lost:
            if boot_time() < due:
                continue
            began = boot_time()  # the right is counted from there too, and a renewal may wait long for the file
            with self._renewing:
                is_renewed = self._renew()
            due = began + (pause_s if is_renewed else min(pause_s, RETRY_S))

    def _renew(self) -> bool:
        """Whether it could be renewed."""
        began = boot_time()
        try:
            renewed = self._write_news()
        except (sqlite3.Error, OSError) as error:
            if not self.holds and not self._has_lapsed:
                self._has_lapsed = True
                logger.error("the lease of the state folder has run out, and no session is served: %s", error)
            return False
        if renewed is None:
            self.lose()
            return False
        self.renewed(renewed, began)
        if self.holds and not self._lock.is_held:  # a former holder that woke up late has replaced it
            self._lock.replace()
        if self._has_lapsed and self.holds:
            self._has_lapsed = False
            logger.warning("the lease of the state folder is held again: sessions are served")
        return True

    def _write_news(self) -> Lease | None:
        """Renew it in the journal, or beside that if it takes nothing: a full disk must not end what needs no room."""
        if not os.path.samestat(self._opened, self._path.stat()):  # the folder was moved, or an older file put back
            raise OSError(f"another file is in the place of {self._path}")
        try:
            with self._mine() as found:
                renewed = None if found is None else found.renewed()
                if renewed is not None:
                    put_lease(self._connection, renewed)
            return renewed
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in TAKES_NOTHING:  # its extended codes have more bits
                raise
        with self._mine() as found:  # no server takes the lease between this look and the news
            if found is None:
                return None
            self._renewals.write()
        return self.lease

    @contextmanager
    def _mine(self) -> Iterator[Lease | None]:
        """The folder's lease in a transaction, which may write nothing; None: another server has it. It may be ahead of
        what this one knows: a write whose answer was lost.
        """
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            found = find_lease(self._connection)
            yield found if found.is_of(self.lease) else None

    def lose(self) -> None:
        """Note it, and say so once: this server must end."""
        was_lost = self.is_lost
        super().lose()
        if not was_lost:
            logger.critical("another server has taken the state folder; this one had epoch %d", self.lease.epoch)
