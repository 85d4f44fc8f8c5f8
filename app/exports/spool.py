"""Files on their way through the server: an export before it is sent, an import before the engine takes it over."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from pathlib import Path
from typing import BinaryIO

from app.domain.errors import DiskShort, FieldOutOfRange, SpoolFull, TooLarge
from app.domain.values import leaves_as_much
from app.machine.files import Claim, DiskFull, DiskRoom, make_writable, size

CHUNK_BYTES = 1 << 20
MAX_FILES = 32
"""Exports and imports that may be under way at once: each has a file open, and a client that may be slow."""
PREFIX = "djinn-"
"""Begins the names of what is ours in a folder that may hold other things."""


class SpoolFile:
    """A file on its way, which takes part of the spool's budget and of the disk's room."""

    def __init__(self, path: Path, owner: str | None, spool: Spool, claim: Claim) -> None:
        self.path = path
        self.owner = owner
        self.claimed = 0
        """Bytes that it may have."""
        self._spool = spool
        self._claim = claim

    def claim(self, total: int) -> None:
        """Make sure that the file may have `total` bytes. Raises `TooLarge`, `SpoolFull`, `DiskShort`."""
        more = total - self.claimed
        if more <= 0:
            return
        self._spool.check(self, more, total)
        try:
            self._claim.grow(more)
        except DiskFull as error:
            raise DiskShort(f"the session's file was not stored: {error.strerror}") from error
        self.claimed = total

    def wrote(self, count: int) -> None:
        """So many bytes of it are on the disk."""
        self._claim.wrote(count)


class Spool:
    """A folder for them. Used on the event loop; the disk is waited for on other threads.

    All files together have at most `max_bytes` bytes; `room` is that on their disk. Tenants share the files and the
    bytes as `leaves_as_much` says.
    """

    def __init__(self, folder: Path | None, room: DiskRoom, max_bytes: int) -> None:
        """None: wherever the system keeps temporary files. Removes what a crash left in `folder`.

        Raises `FieldOutOfRange` if the folder cannot be written to.
        """
        if folder is not None:
            _clear(folder)
        self._folder = folder
        self._room = room
        self._max_bytes = max_bytes
        self._files: set[SpoolFile] = set()

    @contextlib.asynccontextmanager
    async def file(self, owner: str | None) -> AsyncIterator[SpoolFile]:
        """A file in a folder of its own, which is deleted with all that is in it at the end of the block. None: there
        are no tenants.

        Raises `SpoolFull` if too many are under way, `DiskShort`.
        """
        taken, own = len(self._files), len(self._of(owner))
        if not leaves_as_much(MAX_FILES, taken=taken, more=1, besides=own, whole=1):
            is_full = taken >= MAX_FILES
            count, whose = (MAX_FILES, "") if is_full else (own, " of this tenant")
            raise SpoolFull(f"{count} exports and imports{whose} are under way, the most allowed now", retry_after_s=1)
        with self._room.claiming() as claim:
            try:
                inside = tempfile.TemporaryDirectory(dir=self._folder, prefix=PREFIX)
            except OSError as error:
                raise DiskShort(f"the session's file was not stored: {error.strerror}") from error
            file = SpoolFile(Path(inside.name) / "session.safetensors", owner, self, claim)
            self._files.add(file)
            try:
                yield file
            finally:
                await asyncio.to_thread(inside.cleanup)
                self._files.discard(file)

    def check(self, file: SpoolFile, more: int, total: int) -> None:
        """Raise `TooLarge` if a file of `total` bytes never fits, `SpoolFull` if there is no room for `more` now."""
        if total > self._max_bytes:
            raise TooLarge(f"the session's file needs {size(total)}; max_spool_bytes allows {size(self._max_bytes)}")
        taken = sum(each.claimed for each in self._files)
        own = sum(each.claimed for each in self._of(file.owner) if each is not file)
        if not leaves_as_much(self._max_bytes, taken=taken, more=more, besides=own, whole=total):
            whose = f", {size(own)} of it by this tenant, who leaves others as much" if own else ""
            raise SpoolFull(
                f"exports and imports under way take {size(taken)} of the {size(self._max_bytes)} that they may have"
                f"{whose}; this one needs {size(total)}",
                retry_after_s=1,
            )

    def _of(self, owner: str | None) -> list[SpoolFile]:
        """The tenant's files. Without tenants there are no others to leave room to."""
        return [] if owner is None else [each for each in self._files if each.owner == owner]


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
