"""The folder of the disk tier: one file of tokens and KV for each session that is in it."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from app.domain.errors import FieldOutOfRange
from app.domain.values import SessionId
from app.gpu.kv.file import TEMPORARY_SUFFIX, read_kv_file, read_kv_header, write_kv_file
from app.gpu.state.kv_header import KVFileDamaged, KVFileError, KVFileHeader, KVIdentity, file_bytes
from app.machine.disk import DiskRoom
from app.machine.files import make_writable

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class DiskIndex:
    """What a server finds at its start: the header of each session's file, and how many files it could not use."""

    headers: dict[SessionId, KVFileHeader]
    refused: list[SessionId]


class DiskStore:
    """Reads and writes the files. Who is written and who is deleted is decided elsewhere.

    Every method blocks on the disk. They hold no state beside the folder and may be called from any thread, but for one
    session only one at a time: the copy worker's order is the order in which things happen to a file. Hashing and file
    access release the GIL.
    """

    def __init__(self, folder: Path, identity: KVIdentity, room: DiskRoom | None = None) -> None:
        """Make the folder and remove what a crash left half written. `room` is that on its disk; None: all of it.

        Raises `FieldOutOfRange` if it cannot.
        """
        try:
            make_writable(folder, 0o700)
            for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):
                leftover.unlink()
        except OSError as error:
            raise FieldOutOfRange(
                f"cannot keep KV in {folder}: {error.strerror}; name another folder with --state-dir",
                param="state_dir",
            ) from error
        self._folder = folder
        self._identity = identity
        self._room = room or DiskRoom(folder)

    def path(self, session: SessionId) -> Path:
        """Where the session's file is, or would be; an id cannot lead out of the folder."""
        return self._folder / f"{quote(session, safe='')}{SUFFIX}"

    def index(self) -> DiskIndex:
        """What the files say they are, and which are damaged or of another model.

        Checksums are compared when a file is read, not here.
        """
        headers: dict[SessionId, KVFileHeader] = {}
        refused: list[SessionId] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            session = SessionId(unquote(path.name.removesuffix(SUFFIX)))
            try:
                headers[session] = read_kv_header(path, self._identity)
            except KVFileError:
                refused.append(session)
        return DiskIndex(headers, refused)

    def write(self, session: SessionId, header: KVFileHeader, blocks: Iterable[memoryview]) -> int:
        """Write or replace the session's file; returns its size. See `write_kv_file` for the errors, and `DiskFull`."""
        with self._room.claiming(file_bytes(header)):
            return write_kv_file(self.path(session), header, blocks)

    def read(self, session: SessionId, into: Sequence[memoryview]) -> KVFileHeader:
        """Read the first `len(into)` blocks of the session's file. See `read_kv_file` for the errors."""
        return read_kv_file(self.path(session), self._identity, into)

    def delete(self, session: SessionId) -> None:
        """Delete the session's file, if there is one."""
        self.path(session).unlink(missing_ok=True)

    def adopt(self, path: Path, session: SessionId, *, max_tokens: int) -> KVFileHeader:
        """Check an exported file whole and make it the session's, by renaming it where that is possible. A copy from
        another disk has a temporary name until it is whole.

        It has `max_tokens` at most. An export has no namespace: a file from outside must never pass for KV that was
        computed here, and be shared.
        Raises what `read_kv_file` raises, and `OSError` if there is no room; then the file stays where it is.
        """
        header = read_kv_file(path, self._identity, max_tokens=max_tokens)
        if header.namespace:
            raise KVFileDamaged("it is not an export: it belongs to a namespace")
        own = self.path(session)
        moved = own.with_name(f"{own.name}{TEMPORARY_SUFFIX}")
        try:
            shutil.move(path, moved)
        except BaseException:
            moved.unlink(missing_ok=True)
            raise
        moved.replace(own)
        return header
