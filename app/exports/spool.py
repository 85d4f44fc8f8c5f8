"""Files on their way through the server: an export before it is sent, an import before the engine takes it over."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from pathlib import Path
from typing import BinaryIO

from app.domain.errors import FieldOutOfRange
from app.machine.files import make_writable

CHUNK_BYTES = 1 << 20
PREFIX = "djinn-"
"""Begins the names of what is ours in a folder that may hold other things."""


class Spool:
    """A folder for them. Used on the event loop; the disk is waited for on other threads."""

    def __init__(self, folder: Path | None) -> None:
        """None: wherever the system keeps temporary files. Removes what a crash left in `folder`.

        Raises `FieldOutOfRange` if the folder cannot be written to.
        """
        if folder is not None:
            _clear(folder)
        self._folder = folder

    @contextlib.asynccontextmanager
    async def path(self) -> AsyncIterator[Path]:
        """Name of a file, in a folder of its own, which is deleted with all that is in it at the end of the block."""
        inside = tempfile.TemporaryDirectory(dir=self._folder, prefix=PREFIX)
        try:
            yield Path(inside.name) / "session.safetensors"
        finally:
            await asyncio.to_thread(inside.cleanup)


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


async def write_chunks(path: Path, chunks: AsyncIterable[bytes]) -> None:
    """Write what comes in `chunks` to the file `path`. Raises `OSError`, and what `chunks` raises."""
    pending = bytearray()
    with await asyncio.to_thread(path.open, "wb") as file:
        async for chunk in chunks:
            pending += chunk
            if len(pending) >= CHUNK_BYTES:
                await asyncio.to_thread(file.write, pending)
                pending = bytearray()
        await asyncio.to_thread(file.write, pending)


async def read_chunks(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    """The rest of the file."""
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk
