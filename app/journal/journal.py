"""The journal: what must survive the process is written on a thread of its own, many changes to a commit."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from concurrent.futures import Future
from pathlib import Path

from app.domain.breakpoints import TensorData
from app.domain.errors import NotDurable
from app.domain.values import ModelInfo, SessionId
from app.journal.lock import FolderLock
from app.journal.records import Entry, Key, ResponseRecord, SessionRecord, VectorKey, WriteBatch, add_to
from app.journal.steering import Steering
from app.journal.store import JournalStore

logger = logging.getLogger(__name__)

FILE_NAME = "journal.sqlite3"


class Journal:
    """The journal in `folder`, which no other server may use meanwhile.

    `append` and `settled` are for the event loop. What could not be written is tried again with the next change, so
    that a full disk loses nothing once there is room again; changes of one session merge, which bounds what can wait.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `FieldOutOfRange` if another server holds the folder, or if the journal in it is damaged."""
        self._lock = FolderLock(folder)
        try:
            self._store = JournalStore(folder / FILE_NAME)
        except BaseException:
            self._lock.close()
            raise
        self._wake = threading.Condition()
        self._pending: WriteBatch = {}
        self._commit: Future[None] = Future()
        """Done when what is pending now has been written, or could not be."""
        self._appended = self._written = 0
        self._wanted = self._closing = False
        self._thread: threading.Thread | None = None

    def load(self, model: ModelInfo) -> list[tuple[SessionRecord, array[int]]]:
        """Every session and its history, by id. Call before `start`. Raises what `JournalStore.load` raises."""
        return self._store.load(model)

    def load_steering(self) -> dict[SessionId, Steering]:
        """That of every session that has some. Call after `load`, before `start`. Raises like `load`."""
        return self._store.load_steering()

    def load_vectors(self) -> dict[VectorKey, TensorData]:
        """Every owner's vectors. Call after `load`, before `start`. Raises like `load`."""
        return self._store.load_vectors()

    def load_responses(self) -> list[ResponseRecord]:
        """Every response. Call after `load`, before `start`. Raises like `load`."""
        return self._store.load_responses()

    def start(self) -> None:
        """Start to write."""
        self._thread = threading.Thread(target=self._run, name="djinn-journal", daemon=True)
        self._thread.start()

    def append(self, key: Key, entry: Entry) -> None:
        """Take what happened to a session, a vector or a response (None: it is gone). Never waits for the disk."""
        with self._wake:
            add_to(self._pending, key, entry)
            self._appended += 1
            self._wanted = True
            self._wake.notify()

    async def settled(self) -> None:
        """Return when all that was appended so far is durable. Raises `NotDurable` if it could not be written."""
        with self._wake:
            if self._written == self._appended:
                return
            self._wanted = True
            self._wake.notify()
            commit = self._commit
        await asyncio.shield(asyncio.wrap_future(commit))

    def close(self) -> None:
        """Write what is left, and let go of the folder."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._store.close()
        self._lock.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._wake:
                self._wake.wait_for(lambda: self._wanted or self._closing)
                batch, self._pending = self._pending, {}
                commit, self._commit = self._commit, Future()
                appended, self._wanted, closing = self._appended, False, self._closing
            self._write(batch, appended, commit)

    def _write(self, batch: WriteBatch, appended: int, commit: Future[None]) -> None:
        try:
            if batch:
                self._store.apply(batch)
        except Exception as error:  # whatever it is, those who wait must hear of it
            logger.exception("the journal could not be written; %d sessions, vectors and responses wait", len(batch))
            self._put_back(batch)
            commit.set_exception(NotDurable(f"done, but it would not survive a restart: the journal says {error}"))
        else:
            self._written = appended
            commit.set_result(None)

    def _put_back(self, batch: WriteBatch) -> None:
        with self._wake:
            for key, entry in self._pending.items():
                add_to(batch, key, entry)
            self._pending = batch
