"""Files on their way through the server: an export before it is sent, an import before the engine takes it over."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from app.domain.errors import DiskShort, FieldOutOfRange, SpoolFull, TooLarge
from app.machine.budget import Budget, DiskFull, DiskRoom, Share, byte_budget
from app.machine.files import make_writable, size

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

    def __init__(self, folder: Path | None, room: DiskRoom, max_bytes: int) -> None:
        """None: wherever the system keeps temporary files. Removes what a crash left in `folder`.

        Raises `FieldOutOfRange` if the folder cannot be written to.
        """
        if folder is not None:
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
