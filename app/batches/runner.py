"""Batches at work: each line is a call of the application's own routes, behind everybody else's turns.

Its results are appended to two files, a line for each request that is done. So a server that starts again goes on with
the first request that has no line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import orjson
from pydantic import AliasChoices, Field
from starlette.types import ASGIApp, Message

from app.batches.files import PART, FileStore, FileWriter, new_id
from app.batches.jobs import AGAIN, AT_ONCE, LONGEST_WAIT_S, LOOK_S, Jobs, Kept, Places
from app.batches.requests import (
    WINDOW_S,
    Batch,
    BatchBody,
    BatchCounts,
    BatchProblem,
    BatchProblems,
    LineProblem,
    check_file,
    digest_of,
    next_request,
    take_up_results,
)
from app.domain.errors import DiskShort, DjinnError, FieldOutOfRange, Unauthenticated
from app.journal.lease import FolderLease
from app.logs import REQUEST
from app.sessions.registry import SessionRegistry
from app.sessions.side_work import Lane
from app.tenants.tenancy import Tenancy
from app.web.middleware import new_request_id

logger = logging.getLogger(__name__)

FULL = frozenset({"session_limit", "tenant_limit"})
"""Codes of refusals that end as soon as there is room, whenever that is."""
Ending = Literal["completed", "expired", "cancelled", "failed"]


class _Kept(Kept[Batch]):
    """A batch, and the ids of its files of results, which are kept once they are whole."""

    job: Batch = Field(validation_alias=AliasChoices("job", "batch"))
    output_id: str
    error_id: str
    results_ttl_s: int | None = None
    ending: Ending | None = None
    """How it ends, once nothing is left to do but to keep the results."""


class Batches(Jobs[Batch, _Kept]):
    """The batches of all owners. Used on the event loop. Other threads read lines and write results."""

    noun = "batch"

    def __init__(
        self,
        files: FileStore,
        registry: SessionRegistry,
        tenancy: Tenancy,
        lease: FolderLease | None,
        places: Places,
        *,
        max_line_bytes: int,
    ) -> None:
        """Load the batches of an earlier run, from `batches` in the folder of `files`. Raises `FieldOutOfRange`."""
        super().__init__(files.folder / "batches", _Kept, files, lease)
        self._registry = registry
        self._tenancy = tenancy
        self._max_line_bytes = max_line_bytes
        self._places = places
        self._app: ASGIApp

    def start(self, app: ASGIApp) -> None:
        """Continue open batches. `app` answers requests without asking for a key."""
        self._app = app
        self._files.remove_parts(but=[each for kept in self.going_on for each in (kept.output_id, kept.error_id)])
        self.resume()

    async def create(self, owner: str | None, body: BatchBody) -> Batch:
        """Begin a batch. Raises `NotFound` and `FieldOutOfRange` for its file, and `Busy` if too many are not over."""
        file = self._files.find(owner, body.input_file_id, param="input_file_id")
        if file.purpose != "batch":
            raise FieldOutOfRange(f"input_file_id: its purpose is {file.purpose}, not batch", param="input_file_id")
        self._check_room(owner)
        now, ttl = int(time.time()), body.output_expires_after
        batch = Batch(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            model=self._registry.adapters.names[0],
            input_file_id=file.id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=body.metadata,
        )
        kept = _Kept(
            owner=owner,
            job=batch,
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            results_ttl_s=None if ttl is None else ttl.seconds,
        )
        return await self._add(kept)

    async def _run(self, kept: _Kept) -> None:
        """From wherever the batch is to its end."""
        try:
            if kept.job.status == "validating" and not await self._check(kept):
                return
            if kept.ending is None:
                await self._work(kept)
        except (OSError, DjinnError, LineProblem) as error:  # the disk is full, or the file is not what it was
            logger.warning("batch %s ends early: %s", kept.job.id, error)
            code, message = "input_file_lost", "The input file cannot be read."  # an `OSError` would say where it is
            if not isinstance(error, OSError):
                code, message = error.code, error.message
            problems = BatchProblems(data=[BatchProblem(code=code, message=message)])
            kept.job, kept.ending = kept.job.model_copy(update={"errors": problems}), "failed"
        while True:
            try:
                await self._finish(kept)
                return
            except (OSError, DiskShort) as error:
                logger.warning("batch %s waits for the disk: %s", kept.job.id, error)
                await asyncio.sleep(LONGEST_WAIT_S)

    async def _check(self, kept: _Kept) -> bool:
        """Whether the file of the batch has nothing but its requests; else the batch fails."""
        began, batch = time.perf_counter(), kept.job
        path = self._files.path(batch.input_file_id)
        async with self._registry.side_work.turn(kept.owner, Lane.FILE) as piece:
            count, problems = await asyncio.to_thread(
                check_file, path, batch.endpoint, self._registry.adapters.all_names, self._max_line_bytes
            )
            piece.seconds = time.perf_counter() - began
        if problems:
            now = int(time.time())
            await self._change(kept, status="failed", failed_at=now, errors=BatchProblems(data=problems))
            return False
        is_cancelled = kept.job.status == "cancelling"
        counts, status = BatchCounts(total=count), "cancelling" if is_cancelled else "in_progress"
        await self._change(kept, status=status, in_progress_at=int(time.time()), request_counts=counts)
        return True

    async def _work(self, kept: _Kept) -> None:
        """Make every request that has no result yet, until the batch is cancelled or expires."""
        parts = [self._files.path(each).with_suffix(PART) for each in (kept.output_id, kept.error_id)]
        completed, failed = [await asyncio.to_thread(take_up_results, part) for part in parts]
        self._count(kept, completed=len(completed), failed=sum(failed.values()))
        done = completed.keys() | failed.keys()
        async with (
            self._files.writing(kept.owner, kept.output_id) as output,
            self._files.writing(kept.owner, kept.error_id) as errors,
        ):
            left_s = max(0.0, kept.job.expires_at - time.time())
            if await self._until_cancelled(kept, self._make_all(kept, done, output, errors), left_s):
                kept.ending = "completed"
                return
            kept.ending = "cancelled" if self._cancels[kept.job.id].is_set() else "expired"
            why = "the batch was cancelled" if kept.ending == "cancelled" else "the completion window expired"
            error = {"code": f"batch_{kept.ending}", "message": f"This request could not be executed before {why}."}
            async with aclosing(self._left(kept, done)) as left:
                async for custom_id, _ in left:
                    await self._write(errors, custom_id, response=None, error=error)

    def _count(self, kept: _Kept, **counts: int) -> None:
        new = kept.job.request_counts.model_copy(update=counts)
        kept.job = kept.job.model_copy(update={"request_counts": new})

    async def _make_all(self, kept: _Kept, done: set[bytes], output: FileWriter, errors: FileWriter) -> None:
        """Raises why it ends early: a result could not be written, or the file cannot be read or is another."""
        slots = asyncio.Semaphore(self._at_once(kept.owner))
        try:
            async with aclosing(self._left(kept, done)) as left, asyncio.TaskGroup() as group:
                async for custom_id, content in left:
                    if kept.owner is not None and self._tenancy.directory.named(kept.owner) is None:
                        raise Unauthenticated("the tenant of the batch is no more")
                    await slots.acquire()
                    making = group.create_task(self._make_one(kept, custom_id, content, done, output, errors))
                    making.add_done_callback(lambda _: slots.release())
        except BaseExceptionGroup as group_error:
            known = group_error.subgroup((DjinnError, LineProblem, OSError))
            raise (group_error if known is None else _first(known)) from None

    async def _left(self, kept: _Kept, done: set[bytes]) -> AsyncGenerator[tuple[str, bytes], None]:
        """The `custom_id` and body of each request of the file that is not `done`. Raises `OSError`, `LineProblem`."""
        batch, side_work = kept.job, self._registry.side_work
        # Not opened in a thread: a task that is cancelled meanwhile would not get the open file from there.
        with self._files.path(batch.input_file_id).open("rb") as opened:
            names = self._registry.adapters
            while found := await side_work.run(kept.owner, next_request, opened, batch.endpoint, names.all_names):
                if digest_of(found[0]) not in done:
                    yield found

    async def _make_one(
        self,
        kept: _Kept,
        custom_id: str,
        content: bytes,
        done: set[bytes],
        output: FileWriter,
        errors: FileWriter,
    ) -> None:
        """Make a request, again if the server could not do it now, and write down its answer."""
        wait_s = 0.0
        while True:
            await asyncio.sleep(wait_s)
            wait_s = 1.0
            if not self._is_here:
                continue
            request_id = new_request_id()
            async with self._places.place():
                status, headers, answer = await self._call(kept, request_id, content)
            if status not in AGAIN and self._is_here:
                break
            wait_s = min(LONGEST_WAIT_S, float(headers.get(b"retry-after", b"1")))
            if status == 429 and orjson.loads(answer)["error"]["code"] in FULL:
                await self._room_for(kept.owner, wait_s)
                wait_s = 0.0
        response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(answer)}
        writing = asyncio.create_task(
            self._write(output if status < 400 else errors, custom_id, response=response, error=None)
        )
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # a written result counts, even if this task is cancelled
            raise
        finally:
            if writing.done() and writing.exception() is None:
                done.add(digest_of(custom_id))
                outcome = "completed" if status < 400 else "failed"
                self._count(kept, **{outcome: getattr(kept.job.request_counts, outcome) + 1})
                self._registry.metrics.batch_requests.labels(outcome).inc()

    def _at_once(self, owner: str | None) -> int:
        """Requests of a batch that are under way: one session and one turn less than the tenant may have."""
        limits = self._tenancy.quotas.limits(owner)
        return min(
            [AT_ONCE, *(max(1, most - 1) for most in (limits.sessions, limits.turns_at_once) if most is not None)]
        )

    async def _room_for(self, owner: str | None, longest_s: float) -> None:
        """Wait until the tenant may have one more session, and a moment, in which a client of its may take it."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            if self._registry.table.may_open(owner) or time.monotonic() - began > longest_s:
                return

    async def _call(self, kept: _Kept, request_id: str, content: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        """Have the application answer the request of the batch's tenant; returns status, headers and body."""
        tenant = self._tenancy.directory.named(kept.owner)
        state = {"owner": kept.owner, "tenant": tenant, "request_id": request_id, "is_background": True}
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": kept.job.endpoint,
            "raw_path": kept.job.endpoint.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())],
            "client": None,
            "server": None,
            "state": state,
        }
        status, headers, body, is_read = 503, dict[bytes, bytes](), bytearray(), False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()  # this client does not leave
            is_read = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            else:
                body.extend(message.get("body", b""))

        REQUEST.set(scope)  # the task is this request's alone
        try:
            await self._app(scope, receive, send)
        except Exception:  # a bug, for which the application has answered 500
            logger.exception("a request of batch %s failed", kept.job.id)
        return status, headers, bytes(body)

    async def _write(self, writer: FileWriter, custom_id: str, **fields: Any) -> None:
        line = {"id": new_id("batch_req_"), "custom_id": custom_id, **fields}
        await writer.write(orjson.dumps(line) + b"\n", at_once=True)

    async def _finish(self, kept: _Kept) -> None:
        """Keep the files of results, and note how the batch has ended."""
        if kept.job.status == "in_progress":
            await self._change(kept, status="finalizing", finalizing_at=int(time.time()))
        else:
            await self._save(kept)
        results = {}
        for field, file_id, name in (
            ("output_file_id", kept.output_id, "output"),
            ("error_file_id", kept.error_id, "error"),
        ):
            part = self._files.path(file_id).with_suffix(PART)
            if part.exists() and part.stat().st_size:
                async with self._files.writing(kept.owner, file_id) as writer:
                    await writer.keep(f"{kept.job.id}_{name}.jsonl", "batch_output", kept.results_ttl_s)
            part.unlink(missing_ok=True)
            results[field] = file_id if self._files.has(file_id) else None
        ended = {f"{kept.ending}_at": int(time.time())}
        await self._change(kept, status=kept.ending, **ended, **results)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
