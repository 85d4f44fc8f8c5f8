"""The journal: what must survive the process is written on a thread of its own, many changes to a commit."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from app.domain.breakpoints import Breakpoint, Edit, TensorData
from app.domain.errors import Fenced, FieldOutOfRange, NotDurable
from app.domain.values import JournalState
from app.journal.lease import FolderLease, FolderLock, Lease, Watch
from app.journal.records import (
    TOKEN_BYTES,
    Change,
    Departed,
    Entry,
    Identity,
    Key,
    ResponseRecord,
    WriteBatch,
    add_to,
    describe,
)
from app.journal.store import SMALL_BYTES, JournalStore
from app.journal.tables import load_identity
from app.machine.files import free_bytes, is_over_network
from app.machine.memory import boot_time, machine_id

logger = logging.getLogger(__name__)

COPIES = 2
"""A change is written to the log first, and then to the file, while it is still in the log."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attempt has left unwritten, and why."""

    refused: Mapping[Key, str] = field(default_factory=dict)
    """Changes that cannot be written as they are: to try again does not help."""
    delayed: Mapping[Key, str] = field(default_factory=dict)
    """Changes that the file could not take."""
    failure: str | None = None
    """Why the file takes nothing; None: it takes what is not too large."""
    is_full: bool = False
    """Whether it takes nothing because there is no room."""


def attempt(
    store: JournalStore, batch: WriteBatch, free_bytes: Callable[[], int], *, has_failed: bool = False
) -> Outcome:
    """Write all of `batch` that can be written. `free_bytes` tells what is free on the disk.

    A journal that `has_failed` has to prove that it can be written again: what is left of a change that was taken back
    may need no room at all.
    """
    try:
        _require_room(sum(map(bytes_of, batch.values())), free_bytes())
        outcome = Outcome(refused=store.apply(batch))
    except Exception as error:  # whatever it is, those who wait must hear of it
        if not _is_full(error):
            return Outcome(delayed=dict.fromkeys(batch, str(error)), failure=str(error))
        outcome = _one_by_one(store, batch, free_bytes)
    if has_failed and outcome.failure is None:
        try:
            _require_room(SMALL_BYTES, free_bytes())
            store.prove_writable()
        except Exception as error:
            return replace(outcome, failure=str(error), is_full=_is_full(error))
    return outcome


def _one_by_one(store: JournalStore, batch: WriteBatch, free_bytes: Callable[[], int]) -> Outcome:
    """Write changes while they fit, the smallest first. Closed sessions make room."""
    refused: dict[Key, str] = {}
    delayed: dict[Key, str] = {}
    reason = failure = None
    is_full = False
    for key, entry in sorted(batch.items(), key=lambda item: bytes_of(item[1])):
        if reason is None:
            try:
                _require_room(bytes_of(entry), free_bytes())
                refused |= store.apply({key: entry})
                continue
            except Exception as error:
                reason = str(error)
                is_full = _is_full(error)
                failure = None if is_full and bytes_of(entry) > SMALL_BYTES else reason
        delayed[key] = reason
    return Outcome(refused, delayed, failure, is_full)


def bytes_of(entry: Entry) -> int:
    """About how many bytes the change has to write, vectors that the journal has already included."""
    match entry:
        case Change():
            edits: list[Edit | Breakpoint] = [*(entry.breakpoints or ())]
            edits += [made.edit for made in entry.interventions.rows.values()] if entry.interventions else []
            responses = sum(len(each.body) for each in entry.responses)
            keyed = sum(TOKEN_BYTES * len(each.turn.token_ids) for each in entry.keyed if each.turn is not None)
            own = len(entry.token_ids) + len(entry.record.metadata)
            tensors = {id(tensor.data): len(tensor.data) for each in edits for tensor in each.tensors}
            return own + sum(tensors.values()) + responses + keyed  # many edits may share a tensor
        case TensorData():
            return len(entry.data)
        case ResponseRecord():
            return len(entry.body)
        case Departed() | None:
            return 0
        case _:  # what is said of an upload that has a file
            return 1 << 10


def _require_room(count: int, free: int) -> None:
    """Raise what SQLite raises, before it tries: its log would keep the last of the disk after a failure."""
    if COPIES * count > free:
        error = sqlite3.OperationalError(f"the disk is full: {COPIES * count} bytes are needed, {free} are free")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error


def _is_full(error: Exception) -> bool:
    """Whether the disk, or what SQLite may have of it, has no room for what was written."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


FILE_NAME = "journal.sqlite3"
RETRY_S = 1.0
"""Between two attempts to write what the file could not take. A disk gets room again when a file is deleted."""
CLOSE_S = 5.0
"""What the last commit may take of the time that a server has to end. Nothing cuts it short: a disk that has stalled is
what an orchestrator's kill is for, and it harms no journal.
"""


LOOK_S = 0.5
"""Between two looks at another's lease."""
SAY_S = 60.0
"""Between two lines of the log about a holder that goes on."""


def take_folder(store: JournalStore, lock: FolderLock, length_s: float, *, shared: bool) -> tuple[Lease, float]:
    """Take the folder's lease, once no other server can hold it; returns it, and a time before it was written. A length
    of 0 takes the folder from all former holders, and needs no renewal. A folder that is `shared` is on a file system
    of a network.

    A former holder on this machine that has let go of the lock is dead, so its lease is no more, unless the folder is
    shared: a machine may have mounted it twice, and each mount has its own locks. Raises
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
    return taken, began


class Journal:
    """The journal in `folder`, which no other server may use meanwhile.

    `append` and `settled` are for the event loop. What could not be written stays: a full disk loses nothing once there
    is room again. Changes of one session merge, which bounds what can wait. A change that cannot be written holds up no
    other.
    """

    def __init__(self, folder: Path, lease_s: float | None = None) -> None:
        """Hold the folder with a lease of `lease_s` seconds, or by its lock alone. Waits while a server on another
        machine has a lease of it.

        Raises `FieldOutOfRange` if another server holds the folder, or if the journal in it is damaged.
        """
        self._lock = FolderLock(folder)
        self.lease: FolderLease | None = None
        """None: the lock alone says whose the folder is."""
        self._counted: Identity | None = None
        """That of this start, in a cluster."""
        self.ended_at: int | None = None
        """The number of the orderly end, once it has come."""
        path = self.path = folder / FILE_NAME
        try:
            if not self._lock.is_held and not path.exists():
                raise self._lock.refusal()
            shared = is_over_network(folder)
            hold = partial(self._hold, path, lease_s, shared)
            self.store = JournalStore(path, shared=lease_s is not None and shared, hold=hold)
            """What is in it is loaded and read before `start`; afterwards it is the thread's alone."""
        except BaseException:
            self._let_go()
            raise
        self._free_bytes = partial(free_bytes, folder)
        self._wake = threading.Condition()
        self._pending: WriteBatch = {}
        """What is not being written, with all that could not be."""
        self._writing: WriteBatch = {}
        self._aside: dict[Key, str] = {}
        """Why the last attempt to write these failed."""
        self._refused: set[Key] = set()
        """Those that are not retried before they change or a caller waits for them."""
        self._commit: Future[Mapping[Key, str]] = Future()
        """What could not be written, and why, once what is pending now has been tried."""
        self._failure: str | None = None
        self._is_full = False
        self._retry_s: float | None = None
        self._wanted = self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def identity(self) -> Identity | None:
        """Which journal it is; None: it has been written by an earlier version, and is not loaded yet. Call before
        `start`.
        """
        return self.store.read(load_identity)

    def begin_start(self) -> Identity:
        """The identity of the next start in a cluster. Its word is on the disk, but it counts only from `count_start`
        on: who is refused stays what it was. Call between `load` and `start`. Raises `FieldOutOfRange`.
        """
        found = self.identity
        assert found is not None, "the journal has been loaded"
        if not found.attempt:
            found = replace(found, attempt=secrets.token_hex(8))
            self._write_identity(found)
        return replace(found, starts=found.starts + 1)

    def count_start(self) -> None:
        """That start has begun. The orderly end counts too: a copy that is made meanwhile is older. Raises
        `FieldOutOfRange`.
        """
        self._counted = replace(self.begin_start(), attempt="")
        self._write_identity(self._counted)

    def _write_identity(self, identity: Identity) -> None:
        try:
            self.store.write_identity(identity)
        except (sqlite3.Error, Fenced) as error:
            raise FieldOutOfRange(f"the journal {self.path} cannot be written: {error}", param="state_dir") from error

    def start(self) -> None:
        """Start to write."""
        self._thread = threading.Thread(target=self._run, name="djinn-journal", daemon=True)
        self._thread.start()

    @property
    def state(self) -> JournalState:
        """Whether it can be written, and how much waits for that."""
        lease = self.lease
        epoch, is_fenced = (None, False) if lease is None else (lease.lease.epoch, not lease.holds)
        with self._wake:
            waiting = len(self._pending.keys() | self._writing.keys())
            return JournalState(self._failure, self._is_full, waiting, epoch, is_fenced)

    def append(self, key: Key, entry: Entry) -> None:
        """Take what happened to a session, an upload or a response (None: it is gone). Never waits for the disk."""
        with self._wake:
            add_to(self._pending, key, entry)
            self._try_soon([key])

    async def settled(self, *keys: Key) -> None:
        """Return when all that was appended so far for `keys` is durable; without keys, for all. Raises `NotDurable` if
        it could not be written.
        """
        with self._wake:
            unwritten = self._pending.keys() | self._writing.keys()
            waited_for = unwritten.intersection(keys) if keys else unwritten
            if not waited_for:
                return
            self._try_soon(waited_for)
            commit = self._commit
        failed = await asyncio.shield(asyncio.wrap_future(commit))
        for key in waited_for:
            if key in failed:
                raise NotDurable(f"the journal says {failed[key]}")

    def close(self) -> None:
        """Write what is left, and let go of the folder."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        if self._counted is not None:
            ended = replace(self._counted, starts=self._counted.starts + 1)
            try:
                self._write_identity(ended)
                self.ended_at = ended.starts
            except FieldOutOfRange as error:
                logger.warning("%s; its next start needs the same file", error.message)
        self.store.close()
        self._let_go()

    def _let_go(self) -> None:
        if self.lease is not None:
            self.lease.close()
        self._lock.close()

    def _hold(self, path: Path, lease_s: float | None, shared: bool, store: JournalStore) -> None:
        taken, began = take_folder(store, self._lock, lease_s or 0.0, shared=shared)
        store.set_modes()  # before the lease has the file open too
        if lease_s is not None:
            self.lease = FolderLease(path, taken, began, self._lock)
            store.fence = self.lease.check

    def _try_soon(self, keys: Iterable[Key]) -> None:
        self._refused.difference_update(keys)
        self._wanted = True
        self._wake.notify()

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._wake:
                self._wake.wait_for(lambda: self._wanted or self._closing, self._retry_s)
                closing, self._wanted = self._closing, False
                self._writing = {key: entry for key, entry in self._pending.items() if key not in self._refused}
                self._pending = {key: entry for key, entry in self._pending.items() if key in self._refused}
                commit, self._commit = self._commit, Future()
            outcome = Outcome()
            if self.lease is not None:
                self.lease.let_renew()
            if self._writing or self._failure is not None:
                has_failed = self._failure is not None
                outcome = attempt(self.store, self._writing, self._free_bytes, has_failed=has_failed)
            with self._wake:
                self._take(outcome)
                failed = dict(self._aside)
            commit.set_result(failed)

    def _take(self, outcome: Outcome) -> None:
        """Follow an attempt: what could not be written goes back, before what has happened meanwhile."""
        failed = {**outcome.refused, **outcome.delayed}
        self._log(outcome, failed)
        news = self._pending.keys() - self._refused
        put_back = {key: entry for key, entry in self._writing.items() if key in failed}
        for key, entry in self._pending.items():
            add_to(put_back, key, entry)
        self._aside = {key: why for key, why in self._aside.items() if key not in self._writing} | failed
        self._refused = (self._refused | outcome.refused.keys()) - news
        if self._writing or self._failure is not None:
            self._failure, self._is_full = outcome.failure, outcome.failure is not None and outcome.is_full
            self._retry_s = RETRY_S if outcome.delayed or outcome.failure is not None else None
        self._pending, self._writing = put_back, {}

    def _log(self, outcome: Outcome, failed: Mapping[Key, str]) -> None:
        """One line where the journal begins to fail, one where that ends, and one for each change that it refuses."""
        if outcome.failure is not None:
            if self._failure is None:
                logger.error(
                    "the journal cannot be written: %s; the changes of %d sessions, uploads and responses wait, and "
                    "are tried again every %g s",
                    outcome.failure,
                    len(failed),
                    RETRY_S,
                )
            return
        if self._failure is not None:
            logger.warning("the journal is written again")
        for key, reason in failed.items():
            if key not in self._aside:
                what = describe(key)
                logger.error("the journal cannot take the changes of %s: %s; others are written", what, reason)
