"""Files that clients keep here: written in pieces, listed, read, deleted. They are on disk, never in memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, Field, ValidationError

from app.domain.breakpoints import Bytes
from app.domain.errors import DiskShort, FieldOutOfRange, FilesFull, NotFound, TooLarge, WrongState
from app.machine.budget import DiskRoom, Share, leaves_as_much
from app.machine.files import make_writable, size, sync
from app.wire.base import QueryModel, deleted_shape, page_shape
from app.wire.calls import OpenBody

PART, ABOUT = ".part", ".json"
"""How the names end of a file that is not whole yet, and of what is known of a file."""
PIECE_BYTES = 1 << 20
"""Gathered in memory before they are written."""
DAY_S = 24 * 3600
MAX_FILES = 10_000
"""Of one owner."""

FilePurpose = Literal["batch", "user_data", "assistants", "evals", "fine-tune", "vision"]
AnyPurpose = FilePurpose | Literal["batch_output"]


class ExpiresAfter(OpenBody):
    """When a file goes by itself."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * DAY_S, description="after that moment")


class FileFields(OpenBody):
    """The fields of the form beside the file."""

    purpose: FilePurpose = Field(
        description="batch: it has the requests of a batch, one a line. Files of other purposes are only kept"
    )
    expires_after: ExpiresAfter | None = Field(None, description="as expires_after[anchor], expires_after[seconds]")


class FileObject(BaseModel):
    """A kept file. Times are in Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: AnyPurpose
    status: Literal["processed"] = "processed"


FileList = page_shape("FileList", "Files of the caller, and whether there are more.", FileObject)


DeletedFile = deleted_shape("DeletedFile", "That a file is gone.", "file")


class FilesQuery(QueryModel):
    """Which files to list."""

    purpose: str | None = Field(None, max_length=64, description="only those of it; no file has an unknown one")
    limit: int = Field(10_000, ge=0, le=10_000)
    order: Literal["asc", "desc"] = Field("desc", description="desc: the newest comes first")
    after: str = Field("", max_length=256, description="id of the file after which the page begins")


class _Kept(BaseModel):
    """A file, and the tenant that it belongs to."""

    owner: str | None
    file: FileObject


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(12)}"


def _close(opened: BinaryIO, unwanted: Path | None) -> None:
    with contextlib.suppress(OSError):  # it writes once more what the disk had no room for
        opened.close()
    if unwanted is not None:
        unwanted.unlink(missing_ok=True)


class FileStore:
    """The files of all owners in one folder. Together they have at most `max_bytes`, and owners share these: one with
    several files leaves as much to others as it takes. Used on the event loop. Other threads read and write contents.
    """

    def __init__(self, folder: Path, room: DiskRoom, max_bytes: int) -> None:
        """Load the files in `folder`. `room` is that on its disk. Raises `FieldOutOfRange` unless it can be written."""
        self.folder = folder
        self._room = room
        self._max_bytes = max_bytes
        self._kept: dict[str, _Kept] = {}
        """By id, the oldest first."""
        self._bytes = Counter[str | None]()
        """By owner, those of files that are being written too."""
        self.in_use = Counter[str]()
        """By id, how many read it: it must stay."""
        try:
            make_writable(self.folder, 0o700)
            self._load()
        except OSError as error:
            raise FieldOutOfRange(f"cannot keep files in {self.folder}: {error.strerror}", param="state_dir") from error

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return self._bytes.total()

    @property
    def owners(self) -> set[str | None]:
        """Those that have files."""
        self._drop_expired()
        return {kept.owner for kept in self._kept.values()}

    def find(self, owner: str | None, file_id: str, *, param: str = "file_id") -> FileObject:
        """The owner's file. Raises `NotFound`."""
        self._drop_expired()
        kept = self._kept.get(file_id)
        if kept is None or kept.owner != owner:
            raise NotFound(f"no file {file_id[:100]!r}", param=param)
        return kept.file

    def path(self, file_id: str) -> Path:
        """Where the content of a file is that has been found, or will be."""
        return self.folder / file_id

    def has(self, file_id: str) -> bool:
        """Whether there is a whole file of that id, of any owner."""
        return file_id in self._kept

    def owned_by(self, owner: str | None) -> list[FileObject]:
        """The owner's, the newest first."""
        self._drop_expired()
        return [kept.file for kept in reversed(self._kept.values()) if kept.owner == owner]

    async def delete(self, owner: str | None, file_id: str) -> None:
        """Forget the file. Raises `NotFound`, and `WrongState` while a batch reads it."""
        self.find(owner, file_id)
        if self.in_use[file_id]:
            raise WrongState("a batch reads the file: cancel that, or wait for its end")
        self._forget(file_id)

    @asynccontextmanager
    async def writing(self, owner: str | None, file_id: str | None = None) -> AsyncIterator[FileWriter]:
        """Write a file, which is gone at the end of the block unless it has been kept. With `file_id`, go on with what
        there is of it, and leave it there.

        Raises `FilesFull` if the owner has as many as may be, and `DiskShort`.
        """
        if file_id is None and sum(kept.owner == owner for kept in self._kept.values()) >= MAX_FILES:
            raise FilesFull(f"there are {MAX_FILES} files, the most allowed: delete some")
        part = self.path(file_id or new_id("file-")).with_suffix(PART)
        try:
            opened = part.open("ab")
        except OSError as error:
            raise DiskShort(f"the file was not stored: {error.strerror}") from error
        with self._room.claiming() as claim:
            writer = FileWriter(self, owner, part, opened, claim)
            self._bytes[owner] += writer.bytes
            try:
                yield writer
            finally:
                if not writer.is_kept:
                    self._bytes[owner] -= writer.bytes
                unwanted = part if file_id is None and not writer.is_kept else None
                await asyncio.shield(asyncio.to_thread(_close, opened, unwanted))  # of a client that has left too

    def take(self, owner: str | None, more: int, held: int) -> None:
        """Count bytes for a file that has `held` so far. Raises `TooLarge`, `FilesFull`."""
        whole, besides = held + more, self._bytes[owner] - held
        if whole > self._max_bytes:
            raise TooLarge(f"a file has at most {size(self._max_bytes)}, max_files_bytes")
        shared = 0 if owner is None else besides
        if not leaves_as_much(self._max_bytes, taken=self.total_bytes, more=more, besides=shared, whole=whole):
            raise FilesFull(
                f"files take {size(self.total_bytes)} of the {size(self._max_bytes)} of max_files_bytes, "
                f"{size(besides)} of it those of this tenant: delete some"
            )
        self._bytes[owner] += more

    async def keep(self, owner: str | None, file: FileObject) -> None:
        """Have a file whose part is whole. A crash in between leaves it whole, or as a part. Raises `DiskShort`."""
        kept = _Kept(owner=owner, file=file)
        try:
            await asyncio.to_thread(self._store, kept)
        except OSError as error:
            raise DiskShort(f"the file was not stored: {error.strerror}") from error
        self._kept[file.id] = kept

    def _store(self, kept: _Kept) -> None:
        path = self.path(kept.file.id)
        sync(path.with_suffix(PART))
        write_whole(path.with_suffix(ABOUT), kept.model_dump_json())
        path.with_suffix(PART).replace(path)
        sync(self.folder)

    def remove_parts(self, but: Iterable[str]) -> None:
        """Delete what uploads have left that a crash has cut off, but not the parts of these ids."""
        known = set(but)
        for part in self.folder.glob(f"*{PART}"):
            if part.stem not in known:
                part.unlink()

    def _load(self) -> None:
        found = []
        for about in self.folder.glob(f"*{ABOUT}"):
            with contextlib.suppress(ValidationError):
                found.append((about.stat().st_mtime_ns, _Kept.model_validate_json(about.read_bytes())))
        for _, kept in sorted(found, key=itemgetter(0)):
            path = self.path(kept.file.id)
            if not path.exists() and path.with_suffix(PART).exists():
                path.with_suffix(PART).replace(path)  # the crash came in the middle of `keep`
            if path.exists():
                self._kept[kept.file.id] = kept
                self._bytes[kept.owner] += kept.file.bytes
            else:
                path.with_suffix(ABOUT).unlink()

    def _drop_expired(self) -> None:
        now = time.time()
        for kept in list(self._kept.values()):
            if kept.file.expires_at is not None and kept.file.expires_at <= now and not self.in_use[kept.file.id]:
                self._forget(kept.file.id)

    def _forget(self, file_id: str) -> None:
        kept = self._kept.pop(file_id)
        self._bytes[kept.owner] -= kept.file.bytes
        self.path(file_id).with_suffix(ABOUT).unlink(missing_ok=True)  # first: without it, the content is nothing
        self.path(file_id).unlink(missing_ok=True)


class FileWriter:
    """A file that is being written."""

    def __init__(self, store: FileStore, owner: str | None, part: Path, opened: BinaryIO, claim: Share) -> None:
        self._store = store
        self._owner = owner
        self._opened = opened
        self._claim = claim
        self._pending = bytearray()
        self._lock = asyncio.Lock()
        self.id = part.stem
        self.is_kept = False
        self.bytes = part.stat().st_size
        """Those that it has, or will have in a moment."""

    async def write(self, *data: Bytes, at_once: bool = False) -> None:
        """Append `data`, `at_once` or with what follows. Raises `TooLarge`, `FilesFull`, `DiskShort`."""
        count = sum(map(len, data))
        self._store.take(self._owner, count, self.bytes)
        self.bytes += count
        is_large = count >= PIECE_BYTES  # to copy it here would hold up the event loop
        if not is_large:
            self._pending += b"".join(data)
        if at_once or is_large or len(self._pending) >= PIECE_BYTES:
            await self._flush(*data if is_large else ())

    async def keep(self, filename: str, purpose: AnyPurpose, ttl_s: int | None) -> FileObject:
        """The file is whole: it is found from now on. Raises `DiskShort`."""
        await self._flush()
        now = int(time.time())
        file = FileObject(
            id=self.id,
            bytes=self.bytes,
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
            filename=filename,
            purpose=purpose,
        )
        await self._store.keep(self._owner, file)
        self.is_kept = True
        return file

    async def _flush(self, *more: Bytes) -> None:
        async with self._lock:
            data, self._pending = self._pending, bytearray()
            try:
                self._claim.grow(len(data) + sum(map(len, more)))
                await asyncio.to_thread(self._append, data, *more)
            except OSError as error:  # `DiskFull` too
                raise DiskShort(f"the file was not stored: {error.strerror}") from error
            finally:
                self._claim.shrink()

    def _append(self, *data: bytearray | Bytes) -> None:
        self._opened.writelines(data)
        self._opened.flush()


def write_whole(path: Path, text: str) -> None:
    """Write a small file that is there whole, or as it was before. Waits for the disk; raises `OSError`."""
    unnamed = path.with_suffix(".new")
    with unnamed.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    unnamed.replace(path)
