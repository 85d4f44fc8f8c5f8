"""The lease of a state folder: waited for, taken, renewed on a thread of its own, and given back."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from app.domain.errors import Fenced, FieldOutOfRange
from app.domain.leases import Lease, Tenure, Watch
from app.journal.store import OUT_OF_REACH, JournalStore, Renewals, find_lease, put_lease
from app.machine.files import explain, make_writable
from app.machine.memory import boot_time, machine_id

logger = logging.getLogger(__name__)


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
LOOK_S = 0.5
"""Between two looks at another's lease."""
MOST_BUSY_S = 5.0
"""How long a renewal waits for the file at most: longer would hold up the end of the server too."""
CLOCK_LOOK_S = 1.0
"""Between two looks at the clock, which goes on while the machine sleeps. A wait does not."""
RETRY_S = 1.0
"""Before another attempt at a renewal that has failed, at most."""
TAKES_NOTHING = (sqlite3.SQLITE_FULL, *OUT_OF_REACH)
"""Codes of SQLite for a disk without room. `SQLITE_READONLY` is none: it may mean that the file has been replaced."""
SAY_S = 60.0
"""Between two lines of the log about a holder that goes on."""


def take(store: JournalStore, lock: FolderLock, length_s: float, *, shared: bool) -> Tenure:
    """Take the folder's lease, once no other server can hold it. A length of 0 takes the folder from all former
    holders, and needs no renewal. A folder that is `shared` is on a file system of a network.

    A former holder on this machine that has let go of the lock is dead, so its lease is no more, unless the folder is
    shared: one machine may have it twice, and each time with locks of its own. Raises
    `FieldOutOfRange` if another server has the lock, and is on this machine or has no lease. Raises it too if there is
    no room for what a lease needs: then none is taken.
    """
    if length_s:
        store.make_news()
    watch, here = Watch(), machine_id()
    waits_since: float | None = None
    said_at = 0.0
    while True:
        found = store.lease()
        now = boot_time()  # after the look: see `Watch`
        if found is None:
            time.sleep(LOOK_S)
            continue
        is_here = bool(here) and found.machine == here and not shared
        if not lock.is_held and (found.is_free or is_here):
            raise lock.refusal()
        left_s = 0.0 if found.is_free or is_here else watch.left_s(found, now)
        if not left_s:
            began, taken = boot_time(), found.next(secrets.token_hex(8), here, length_s)
            if (found.is_free and not length_s) or store.take_lease(found, taken):
                break
            continue
        if waits_since is None:
            waits_since = said_at = now
            logger.warning(
                "a server on another machine has the lease of the state folder (epoch %d): the start waits %.1f s, or "
                "for as long as that one renews it",
                found.epoch,
                left_s,
            )
        elif now - said_at > SAY_S:
            said_at = now
            logger.warning("the other server renews its lease: the start has waited %.0f s", now - waits_since)
        time.sleep(min(left_s, LOOK_S))
        if not lock.is_held:
            lock.try_again()
    if not lock.is_held:
        lock.replace()
    if not lock.is_held:
        raise lock.refusal()
    if waits_since is not None:
        waited_s = boot_time() - waits_since
        logger.warning("the state folder is taken over after %.1f s: epoch %d", waited_s, taken.epoch)
    return Tenure(taken, began)


class FolderLease:
    """A lease that is held, and renewed until `close`. Any thread may ask."""

    def __init__(self, path: Path, tenure: Tenure, lock: FolderLock) -> None:
        """`path` is the journal's, and `lock` is that of its folder."""
        self._renewals = Renewals(path)
        self._tenure = tenure
        self._lock = lock
        self._length_s = tenure.lease.length_s
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
        return boot_time() < self._tenure.ends_at

    @property
    def is_lost(self) -> bool:
        """Whether another server has taken the folder: this one must end."""
        return self._tenure.is_lost

    @property
    def epoch(self) -> int:
        """Its number."""
        return self._tenure.lease.epoch

    def require(self) -> None:
        """Raise `Fenced` unless the server may answer for the sessions in the folder now."""
        if not self.holds:
            why = "another server has taken it" if self.is_lost else "it could not be renewed"
            raise Fenced(f"this server has no lease of its state folder, so its sessions may be elsewhere: {why}")

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise `Fenced` unless the lease is held. In a transaction it holds until the end of that."""
        if not find_lease(connection).is_of(self._tenure.lease):
            self._lose()
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
        self._tenure.ends_at = 0.0
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
            self._lose()
            return False
        self._tenure.renewed(renewed, began)
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
        return self._tenure.lease

    @contextmanager
    def _mine(self) -> Iterator[Lease | None]:
        """The folder's lease in a transaction, which may write nothing; None: another server has it. It may be ahead of
        what this one knows: a write whose answer was lost.
        """
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            found = find_lease(self._connection)
            yield found if found.is_of(self._tenure.lease) else None

    def _lose(self) -> None:
        if not self._tenure.is_lost:
            self._tenure.lose()
            logger.critical("another server has taken the state folder; this one had epoch %d", self.epoch)
