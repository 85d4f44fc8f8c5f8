"""Jobs: work on a kept file that outlives its request, and the server too; and how much goes on behind everybody else's
turns.

What is known of a job is a small file, which is written whole at each change. So a server that starts again, even after
`kill -9`, goes on with those that are not over. How far a job has come is told by its results, which are files too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from app.batches.files import FileStore, write_whole
from app.domain.errors import Busy, DiskShort, FieldOutOfRange, NotFound, WrongState
from app.journal.lease import FolderLease
from app.machine.files import make_writable

logger = logging.getLogger(__name__)

OPEN = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""States of a job that is not over."""
MAX_OPEN, MAX_KEPT = 100, 1000
"""Open jobs of one kind and owner, and all of them: the oldest finished ones are forgotten."""
AGAIN = frozenset({408, 429, 502, 503})
"""Statuses that say nothing about what was asked for: it is asked for again."""
LONGEST_WAIT_S = 30.0
ABOUT = ".json"

J = TypeVar("J", bound=BaseModel)


class Kept(BaseModel, Generic[J]):
    """A job as its client sees it, which has `id`, `status`, `created_at` and `input_file_id`, and its tenant."""

    owner: str | None
    job: Any = Field(validation_alias=AliasChoices("job", "batch"))


K = TypeVar("K", bound=Kept[Any])


class Jobs(ABC, Generic[J, K]):
    """The jobs of one kind, of all owners. Used on the event loop. Other threads read and write files."""

    noun: str
    """What a job is called."""

    def __init__(self, folder: Path, kind: type[K], files: FileStore, lease: FolderLease | None) -> None:
        """Load the jobs of an earlier run from `folder`. Raises `FieldOutOfRange`."""
        self._folder, self._files, self._lease = folder, files, lease
        self._kept: dict[str, K] = {}
        """By id, the oldest first."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Of jobs that are not over."""
        self._cancels: dict[str, asyncio.Event] = {}
        self._saving = asyncio.Lock()
        try:
            make_writable(folder, 0o700)
            found = list(self._read(kind))
        except OSError as error:
            raise FieldOutOfRange(f"cannot keep jobs in {folder}: {error.strerror}", param="state_dir") from error
        for kept in sorted(found, key=lambda each: each.job.created_at):
            self._kept[kept.job.id] = kept

    @property
    def going_on(self) -> list[K]:
        """Those that are not over."""
        return [kept for kept in self._kept.values() if kept.job.status in OPEN]

    def resume(self) -> None:
        """Continue those that are not over."""
        for kept in self.going_on:
            self._files.in_use[kept.job.input_file_id] += 1
            self._begin(kept)

    async def close(self) -> None:
        """Stop. What is under way is done again after the next start."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def find(self, owner: str | None, job_id: str) -> J:
        """The owner's job. Raises `NotFound`."""
        found: J = self._find(owner, job_id).job
        return found

    def owned_by(self, owner: str | None) -> list[J]:
        """The owner's, the newest first."""
        return [kept.job for kept in reversed(self._kept.values()) if kept.owner == owner]

    async def cancel(self, owner: str | None, job_id: str) -> J:
        """End a job early. What is done stays; what is under way is dropped. Raises `NotFound`, `WrongState`."""
        kept = self._find(owner, job_id)
        if kept.job.status not in OPEN:
            raise WrongState(f"the {self.noun} is {kept.job.status}: only an open one can be cancelled")
        if kept.job.status != "cancelling":
            await self._change(kept, status="cancelling", cancelling_at=int(time.time()))
        if job_id in self._cancels:
            self._cancels[job_id].set()
        job: J = kept.job
        return job

    def _check_room(self, owner: str | None) -> None:
        """Raise `Busy` if the owner has as many open jobs as may be; forget its oldest that are over."""
        mine: list[Any] = list(self.owned_by(owner))
        if sum(each.status in OPEN for each in mine) >= MAX_OPEN:
            what = f"{self.noun}es" if self.noun.endswith("h") else f"{self.noun}s"
            raise Busy(f"{MAX_OPEN} {what} are not over, the most allowed", retry_after_s=int(LONGEST_WAIT_S))
        over = [each.id for each in mine if each.status not in OPEN]
        for gone in over[MAX_KEPT - MAX_OPEN :]:
            del self._kept[gone]
            self._path(gone).unlink(missing_ok=True)

    async def _add(self, kept: K) -> J:
        """Begin a job. Raises `DiskShort`."""
        job: Any = kept.job
        self._kept[job.id] = kept  # before anything waits: it counts, and its file stays
        self._files.in_use[job.input_file_id] += 1
        try:
            await self._save(kept)
        except BaseException:
            del self._kept[job.id]
            self._files.in_use -= Counter([job.input_file_id])
            raise
        self._begin(kept)
        found: J = job
        return found

    def _find(self, owner: str | None, job_id: str) -> K:
        kept = self._kept.get(job_id)
        if kept is None or kept.owner != owner:
            raise NotFound(f"no {self.noun} {job_id[:100]!r}", param=f"{self.noun}_id")
        return kept

    def _path(self, job_id: str) -> Path:
        return (self._folder / job_id).with_suffix(ABOUT)

    def _read(self, kind: type[K]) -> Iterator[K]:
        for about in self._folder.glob(f"*{ABOUT}"):
            with contextlib.suppress(ValidationError):
                yield kind.model_validate_json(about.read_bytes())

    async def _save(self, kept: K) -> None:
        """Raises `DiskShort`."""
        try:
            async with self._saving:
                await asyncio.to_thread(write_whole, self._path(kept.job.id), kept.model_dump_json())
        except OSError as error:
            raise DiskShort(f"the {self.noun} was not stored: {error.strerror}") from error

    async def _change(self, kept: K, **fields: Any) -> None:
        was_open = kept.job.status in OPEN
        kept.job = kept.job.model_copy(update=fields)
        if was_open and kept.job.status not in OPEN:
            self._files.in_use -= Counter([kept.job.input_file_id])
        await self._save(kept)

    def _begin(self, kept: K) -> None:
        job_id = kept.job.id
        self._cancels[job_id] = asyncio.Event()
        if kept.job.status == "cancelling":
            self._cancels[job_id].set()
        task = self._tasks[job_id] = asyncio.create_task(self._run(kept))
        task.add_done_callback(partial(self._over, kept))

    def _over(self, kept: K, task: asyncio.Task[None]) -> None:
        del self._tasks[kept.job.id], self._cancels[kept.job.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s %s stands until the next start", self.noun, kept.job.id, exc_info=error)

    async def _until_cancelled(self, kept: K, work: Coroutine[Any, Any, None], timeout_s: float | None = None) -> bool:
        """Do the work until the job is cancelled, or so long; returns whether it ended by itself. Raises its error."""
        working = asyncio.create_task(work)
        cancelled = asyncio.create_task(self._cancels[kept.job.id].wait())
        try:
            await asyncio.wait((working, cancelled), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, cancelled):
                task.cancel()
            await asyncio.wait((working, cancelled))
        if working.cancelled():
            return False
        working.result()
        return True

    @property
    def _is_here(self) -> bool:
        """Whether the folder is this server's, and no other one does the same."""
        return self._lease is None or self._lease.holds

    @abstractmethod
    async def _run(self, kept: K) -> None:
        """From wherever the job is to its end."""


AT_ONCE = 8
"""Requests of all batches that are under way while there is no other turn; beside others, one is."""
LOOK_S = 0.05
"""How often a request that waits for its place looks whether the others are gone."""


class Places:
    """Which requests of batches and experiments are under way: few, and one while clients wait for their own turns."""

    def __init__(self, others_run: Callable[[], bool]) -> None:
        """`others_run` says whether clients wait for turns of their own."""
        self.others_run = others_run
        self._taken = 0
        self._asking = asyncio.Lock()
        """Those that ask take turns."""
        self._left = asyncio.Event()

    @asynccontextmanager
    async def place(self, at_once: int = AT_ONCE) -> AsyncIterator[None]:
        """Wait for a place, one of `at_once` while there is no other turn, and have it for the block."""
        async with self._asking:
            while self._taken >= (1 if self.others_run() else at_once):
                self._left.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._left.wait()
            self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._left.set()

    async def rest(self, seconds: float) -> None:
        """Wait that many seconds, but no longer than clients have turns of their own under way."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.others_run():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(min(left, LOOK_S))
