"""Sessions that travel between servers as files, and these files on their way: before an export is sent, and before the
engine takes an import over.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from array import array
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from app.domain.errors import BadExport, Busy, DiskShort, FieldOutOfRange, SpoolFull, TooLarge, WrongState
from app.domain.values import MAX_LABEL_BYTES, SessionState
from app.engine_process.turn import Turn
from app.exports.checks import read_snapshot
from app.exports.snapshot import SessionSnapshot, has_room, most_values, take_snapshot
from app.machine.budget import Budget, DiskFull, DiskRoom, Share, byte_budget
from app.machine.files import make_writable, size
from app.messages import Export, ExportedKV, Import, ImportedKV
from app.sessions.registry import SessionRegistry
from app.sessions.session import Pause, Session
from app.web.errors import described
from app.wire.sessions import MAX_TTL_S

CHUNK_BYTES = 1 << 20
MAX_FILES = 32
"""Exports and imports that may be under way at once: each has a file open, and a client that may be slow."""
PREFIX = "djinn-"
"""Begins the names of what is ours in a folder that may hold other things."""


class SpoolFile:
    """A file on its way, which takes part of the spool's budget and of the disk's room."""

    def __init__(self, path: Path, share: Share, max_bytes: int, claim: Share) -> None:
        self.path = path
        self._share = share
        self._max_bytes = max_bytes
        self._claim = claim

    @property
    def claimed(self) -> int:
        """Bytes that it may have."""
        return self._share.held

    def claim(self, total: int) -> None:
        """Make sure that the file may have `total` bytes. Raises `TooLarge`, `SpoolFull`, `DiskShort`."""
        had = self.claimed
        if total <= had:
            return
        if total > self._max_bytes:
            raise TooLarge(f"the session's file needs {size(total)}; max_spool_bytes allows {size(self._max_bytes)}")
        self._share.require(total)
        try:
            self._claim.grow(total - had)
        except DiskFull as error:
            self._share.shrink(had)
            raise DiskShort(f"the session's file was not stored: {error.strerror}") from error

    def wrote(self, count: int) -> None:
        """So many bytes of it are on the disk."""
        self._claim.give(count)


class Spool:
    """A folder for them. Used on the event loop; the disk is waited for on other threads.

    All files together have at most `max_bytes` bytes; `room` is that on their disk. Tenants share the files and the
    bytes.
    """

    def __init__(self, folder: Path, room: DiskRoom, max_bytes: int) -> None:
        """Removes what a crash left in `folder`. Raises `FieldOutOfRange` if the folder cannot be written to."""
        _clear(folder)
        self._folder = folder
        self._room = room
        self._files = Budget(MAX_FILES, _too_many)
        self._bytes = byte_budget(max_bytes, "exports and imports under way", partial(SpoolFull, retry_after_s=1))

    @contextlib.asynccontextmanager
    async def file(self, owner: str | None) -> AsyncIterator[SpoolFile]:
        """A file in a separate folder, which is deleted with all that is in it at the end of the block. None: there
        are no tenants.

        Raises `SpoolFull` if too many are under way, `DiskShort`.
        """
        place, share = Share(self._files, owner), Share(self._bytes, owner)
        place.require(1)
        try:
            with self._room.claiming() as claim:
                try:
                    inside = tempfile.TemporaryDirectory(dir=self._folder, prefix=PREFIX)
                except OSError as error:
                    raise DiskShort(f"the session's file was not stored: {error.strerror}") from error
                try:
                    yield SpoolFile(Path(inside.name) / "session.safetensors", share, self._bytes.limit, claim)
                finally:
                    await asyncio.to_thread(inside.cleanup)
        finally:
            share.shrink()
            place.shrink()


def _too_many(taken: int, own: int, _needed: int) -> SpoolFull:
    count, whose = (MAX_FILES, "") if taken >= MAX_FILES else (own, " of this tenant")
    return SpoolFull(f"{count} exports and imports{whose} are under way, the most allowed now", retry_after_s=1)


def _clear(folder: Path) -> None:
    try:
        make_writable(folder, 0o700)
        for leftover in folder.glob(f"{PREFIX}*"):
            shutil.rmtree(leftover)
    except OSError as error:
        raise FieldOutOfRange(
            f"cannot keep exports in {folder}: {error.strerror}; name another folder with --state-dir",
            param="state_dir",
        ) from error


async def write_chunks(file: SpoolFile, chunks: AsyncIterable[bytes]) -> None:
    """Write what comes in `chunks` to the file. Raises what `SpoolFile.claim` and `chunks` raise, and `DiskShort`."""
    try:
        with await asyncio.to_thread(file.path.open, "wb") as opened:
            written = 0
            async for pending in _in_pieces(chunks):
                file.claim(written + len(pending))
                await asyncio.to_thread(opened.write, pending)
                file.wrote(len(pending))
                written += len(pending)
    except OSError as error:
        raise DiskShort(f"the session's file was not stored: {error.strerror}") from error


async def _in_pieces(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytearray]:
    """What comes in `chunks`, `CHUNK_BYTES` or a little more at a time."""
    pending = bytearray()
    async for chunk in chunks:
        pending += chunk
        if len(pending) >= CHUNK_BYTES:
            yield pending
            pending = bytearray()
    yield pending


async def read_chunks(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    """The rest of the file."""
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk


MAX_BLOCK_SIZE = 256
"""Tokens of the largest KV block that there is."""
TOKEN_BYTES = 4
LEAD_BYTES = 64 << 10
"""Room for the header and the checksum."""


async def export_session(registry: SessionRegistry, session: Session, file: SpoolFile) -> ExportedKV:
    """Write the session to the file.

    Raises `WrongState` unless it stays idle or paused meanwhile, `TooLarge` if no server would import its edits and
    breakpoints, what `SpoolFile.claim` raises if there is no room, and `EngineError` if it cannot be written all the
    same.
    """
    session.require(SessionState.IDLE, SessionState.PAUSED, to="export")
    here = _place(session)
    snapshot, _, _ = await take_snapshot(registry, session)
    about = await asyncio.to_thread(snapshot.to_json)  # thousands of edits take long
    text, tokens = about.encode(), len(session.history)
    fits = await asyncio.to_thread(has_room, text, tokens)
    _check_place(session, here)
    if not fits:
        raise TooLarge(
            f"the session's metadata, breakpoints, edits and paused turn have {size(len(text))} as JSON; a file may "
            f"have {size(MAX_LABEL_BYTES)} and {most_values(tokens)} values: remove breakpoints, or go on from an "
            "earlier token with fewer edits"
        )
    # All of its KV, up to the end of the last block, and its state.
    info = registry.executor.engine.info
    kept_bytes = (tokens + MAX_BLOCK_SIZE) * info.kv_bytes_per_token + info.state_bytes
    file.claim(kept_bytes + tokens * TOKEN_BYTES + len(text) + LEAD_BYTES)
    path = str(file.path)
    exported: ExportedKV = await registry.executor.call(lambda ticket: Export(ticket, session.id, path, about))
    file.wrote(file.claimed)
    _check_place(session, here)
    return exported


async def import_session(registry: SessionRegistry, path: Path, owner: str | None = None) -> Session:
    """Open a session from the exported file `path`.

    Raises `BadExport`, `SessionLimit`, `TenantLimit`, `RateLimited`, `Draining`, `JournalUnavailable`.
    """
    session = Session(registry.new_id(), owner)
    session.namespace = session.id
    async with AsyncExitStack() as cleanup, registry.opening(session):
        found, file = await _import(registry, session, path, cleanup)
        try:
            await _furnish(registry, session, found, file)
        except Busy:
            registry.abandon(session)
            raise
        except (ValueError, FieldOutOfRange) as error:
            registry.abandon(session)
            raise BadExport(
                f"the file's metadata, ttl_s, model, breakpoints or paused turn are invalid: {_reason(error)}"
            ) from error
    await registry.keep(session)
    return session


async def _import(
    registry: SessionRegistry, session: Session, path: Path, cleanup: AsyncExitStack
) -> tuple[ImportedKV, BinaryIO]:
    """What the engine finds in the file, and the file, which the engine may have moved. `cleanup` closes it."""

    async def open_and_import() -> tuple[ImportedKV, BinaryIO]:
        file = cleanup.enter_context(await asyncio.to_thread(path.open, "rb"))
        make = partial(Import, session=session.id, path=str(path), namespace=session.id, tenant=session.owner or "")
        return await registry.executor.call(make), file

    importing = asyncio.ensure_future(open_and_import())
    try:
        return await asyncio.shield(importing)
    except asyncio.CancelledError:
        await asyncio.wait([importing])  # before that the engine has no session that could be closed
        raise


async def _furnish(registry: SessionRegistry, session: Session, found: ImportedKV, file: BinaryIO) -> None:
    """Give the session what the file holds. Raises `ValueError` or `FieldOutOfRange` for an invalid snapshot."""
    session.history = array("I", found.token_ids)
    session.uncounted = len(session.history)  # as far as the file has no KV of it

    def read() -> SessionSnapshot:
        file.seek(found.about_at)
        return read_snapshot(registry, file.read(found.about_bytes), session.history)

    snapshot = await asyncio.to_thread(read)
    session.metadata, session.ttl_s = snapshot.metadata, snapshot.ttl_s or MAX_TTL_S
    session.breakpoints = {each.id: each for each in snapshot.breakpoints}
    session.interventions = snapshot.interventions
    turn = snapshot.turn
    if found.adapter:
        session.adapter = registry.adapters.by_digest(found.adapter)
        if session.adapter is None:
            raise FieldOutOfRange(
                f"the session is computed with the LoRA adapter {snapshot.model!r} ({found.adapter[:12]}), which is "
                "not loaded here",
                param="model",
            )
    if turn is None:
        await registry.turns.furnish(session, None, None)
    else:
        place = turn.to_place(session.history)
        await registry.turns.furnish(session, turn.to_turn(), place, sent=place.prompt_tokens)


def _reason(error: ValueError | FieldOutOfRange) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    field, words = next(described(SessionSnapshot, error))
    return f"{field}: {words}" if field else words


def _place(session: Session) -> tuple[Pause | None, Turn | None, int]:
    """Where a session is. What the engine writes later is of the same history only there."""
    return session.pause, session.turn, len(session.history)


def _check_place(session: Session, place: tuple[Pause | None, Turn | None, int]) -> None:
    """Raise `WrongState` unless the session is still there, where its export began."""
    if place[0] is not None and session.pause is not place[0]:
        raise WrongState(f"cannot export: session {session.id} has been resumed meanwhile")
    if _place(session) != place:
        raise WrongState(f"cannot export: the history of session {session.id} has changed meanwhile; export again")
