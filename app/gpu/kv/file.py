"""One session's tokens and KV in one file: safetensors, so that any tool reads it, with a checksum as its last tensor.

    8 bytes    length of the header, little-endian
    header     JSON: each tensor's dtype, shape and place; `__metadata__` says what they belong to
    token_ids  I32 [tokens]
    about      U8, what the exporter says of the session
    kv         [blocks, layers, 2, kv_heads, block_size, columns], block after block as the pool holds them: those of
               the first tokens of all groups of layers, then of the next tokens; in `__metadata__` `groups` says how
               many have no window and how many have one, and `first_block` from which block on those with one are
               there; the last are bytes of the state of layers that fold, if there are such
    sha256     U8 [32], or crc32, U8 [4], little-endian: over all bytes before it

The checksum finds accidents; an attacker who changes a file can compute a new one, so every length is checked first. A
file that goes to a client or comes from one has the SHA-256. A server's own file has the CRC: a turn waits while it is
read, and 2.7 times as long for a SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

from app.domain.errors import FieldOutOfRange
from app.domain.values import SessionId
from app.gpu.state.kv_header import (
    LENGTH_BYTES,
    MAX_TOKENS,
    TOKEN_BYTES,
    Checksum,
    KVFileDamaged,
    KVFileError,
    KVFileHeader,
    KVIdentity,
    check_tokens,
    encode_header,
    file_bytes,
    read_header,
)
from app.machine.budget import DiskRoom
from app.machine.files import make_writable

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is being written. A start finds some that a crash has left."""

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 1 << 20
SCRATCH_BYTES = 1 << 20


class _Sum:
    """The checksum of all bytes that it has been given."""

    def __init__(self, kind: Checksum) -> None:
        self._sha256 = hashlib.sha256() if kind is Checksum.SHA256 else None
        self._crc32 = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Go on with these bytes. Long ones are summed without the GIL."""
        if self._sha256 is None:
            self._crc32 = zlib.crc32(data, self._crc32)
        else:
            self._sha256.update(data)

    def digest(self) -> bytes:
        """As a file ends with it."""
        return self._crc32.to_bytes(4, "little") if self._sha256 is None else self._sha256.digest()


def write_kv_file(path: Path, header: KVFileHeader, blocks: Iterable[memoryview], about: bytes = b"") -> int:
    """Write the file under a temporary name in the same folder, rename it to `path`, and return its size.

    `blocks` are contiguous, `block_bytes` each, `header.blocks` of them. What is in them beyond the computed tokens is
    written as zeros: it can hold KV of another session. The file is not synced to the disk. A file that a
    power failure tears fails its checksum. Raises `OSError` if there is no room, `ValueError` if the blocks or `about`
    are not what the header says; then nothing is left behind, and a file that was at `path` before stays.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=TEMPORARY_SUFFIX)
    try:
        with open(descriptor, "wb") as file:
            size = _write(file, header, blocks, about)
        if size != file_bytes(header):
            raise ValueError(f"the file has {size} bytes instead of the {file_bytes(header)} that its header says")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return size


def _write(file: io.BufferedWriter, header: KVFileHeader, blocks: Iterable[memoryview], about: bytes) -> int:
    digest, size = _Sum(header.checksum), 0
    for part in (encode_header(header), array("i", header.token_ids).tobytes(), about):
        size += file.write(part)
        digest.update(part)
    partial = header.partial
    for index, block in enumerate(blocks):
        content = without_rest(block, header) if index in partial else block
        size += file.write(content)
        digest.update(content)
    return size + file.write(digest.digest())


def without_rest(block: memoryview, header: KVFileHeader) -> bytearray:
    """A copy of one of the `partial` blocks with the KV of computed tokens only."""
    content, layout = bytearray(block), header.identity.layout
    used = header.computed_tokens % layout.block_size
    head_bytes = layout.block_bytes // (layout.layers * 2 * layout.kv_heads)
    kept = head_bytes // layout.block_size * used
    for start in range(0, len(content), head_bytes):
        content[start + kept : start + head_bytes] = bytes(head_bytes - kept)
    return content


def read_kv_header(path: Path, expected: KVIdentity) -> KVFileHeader:
    """The file's header and tokens. The checksum is not looked at, but the size is.

    Raises `KVFileDamaged`, `KVFileMismatch` if the file is not of the `expected` model and layout, `OSError`.
    """
    with open(path, "rb") as file:
        return read_lead(file.read, expected, MAX_TOKENS, os.fstat(file.fileno()).st_size)[0]


def read_kv_file(
    path: Path, expected: KVIdentity, into: Sequence[memoryview] = (), *, max_tokens: int = MAX_TOKENS
) -> KVFileHeader:
    """Read the file's first `len(into)` blocks into the given buffers, and check the whole file.

    Each buffer is contiguous, writable and `block_bytes` long; there are at most as many as the file has blocks. When
    this raises (any `KVFileError`, `OSError`), what the buffers hold is worth nothing. Beside them this takes memory
    for the tokens only, of which there may be `max_tokens`.
    """
    with open(path, "rb") as file:
        header, lead = read_lead(file.read, expected, max_tokens, os.fstat(file.fileno()).st_size)
        digest = _Sum(header.checksum)
        digest.update(lead)
        _pass_over(file, header.about_bytes, digest)
        for block in into:
            _fill(file, block)
            digest.update(block)
        _pass_over(file, (header.blocks - len(into)) * expected.layout.block_bytes, digest)
        if file.read() != digest.digest():
            raise KVFileDamaged("its checksum does not match its content")
    return header


def read_export(path: Path, expected: KVIdentity, *, max_tokens: int) -> KVFileHeader:
    """Check a file from outside whole. Raises what `read_kv_file` does.

    An export has a SHA-256 and no namespace: it must never pass for KV that was computed here, and be shared.
    """
    header = read_kv_file(path, expected, max_tokens=max_tokens)
    if header.namespace:
        raise KVFileDamaged("it is not an export: it belongs to a namespace")
    if header.checksum is not Checksum.SHA256:
        raise KVFileDamaged("it is not an export: it has no SHA-256")
    return header


def read_lead(
    read: Callable[[int], bytes], expected: KVIdentity, max_tokens: int, size: int | None = None
) -> tuple[KVFileHeader, bytes]:
    """The header with tokens, of which there may be `max_tokens`, and the bytes that they came from. `read` gives the
    next so many, and then stands at `about`.

    All that the header claims is compared with what may be, and with the `size` of a file, before more of it is read.
    Raises any `KVFileError` if it is not of the `expected` model and layout, and what `read` raises.
    """
    start = read(LENGTH_BYTES)
    header_bytes = int.from_bytes(start, "little")
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, MAX_HEADER_BYTES if size is None else size - LENGTH_BYTES):
        raise KVFileDamaged("it is no session, which begins with the length of its header")
    lead = start + read(header_bytes)
    header = read_header(lead, expected, max_tokens)
    if size not in (None, file_bytes(header)):
        raise KVFileDamaged(f"it has {size} bytes, its header says {file_bytes(header)}")
    token_bytes = read(len(header.token_ids) * TOKEN_BYTES)
    token_ids = array("i", token_bytes)
    check_tokens(token_ids, expected)
    return replace(header, token_ids=token_ids), lead + token_bytes


def _pass_over(file: io.BufferedReader, count: int, digest: _Sum) -> None:
    """Hash the next `count` bytes."""
    scratch = memoryview(bytearray(min(SCRATCH_BYTES, count)))
    while count:
        part = scratch[:count]
        _fill(file, part)
        digest.update(part)
        count -= len(part)


def _fill(file: io.BufferedReader, buffer: memoryview) -> None:
    if file.readinto(buffer) != buffer.nbytes:
        raise KVFileDamaged("it ends too early")


class DiskStore:
    """Reads and writes the files. Who is written and who is deleted is decided elsewhere.

    Every method blocks on the disk. The folder is the only state. Any thread may call a method, but for one session
    only one at a time: the copy worker's order is the order in which things happen to a file. Sums and file access
    release the GIL.
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

    def index(self) -> tuple[dict[SessionId, KVFileHeader], list[SessionId]]:
        """What a server finds at its start: the header of each session's file, and whose are damaged or of another
        model. Checksums are compared when a file is read, not here.
        """
        headers: dict[SessionId, KVFileHeader] = {}
        refused: list[SessionId] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            session = SessionId(unquote(path.name.removesuffix(SUFFIX)))
            try:
                headers[session] = read_kv_header(path, self._identity)
            except KVFileError:
                refused.append(session)
        if refused:
            logger.warning("KV files that are damaged or of another model or layout: %d", len(refused))
        if headers:
            logger.info("sessions with KV on disk from an earlier server: %d", len(headers))
        return headers, refused

    def write(self, session: SessionId, header: KVFileHeader, blocks: Iterable[memoryview]) -> int:
        """Write or replace the session's file; returns its size. See `write_kv_file` for the errors, and `DiskFull`."""
        own = replace(header, checksum=Checksum.CRC32)
        with self._room.claiming(file_bytes(own)):
            return write_kv_file(self.path(session), own, blocks)

    def read(self, session: SessionId, into: Sequence[memoryview]) -> KVFileHeader:
        """Read the first `len(into)` blocks of the session's file. See `read_kv_file` for the errors."""
        return read_kv_file(self.path(session), self._identity, into)

    def delete(self, session: SessionId) -> None:
        """Delete the session's file, if there is one."""
        self.path(session).unlink(missing_ok=True)

    def adopt(self, path: Path, session: SessionId, *, max_tokens: int) -> KVFileHeader:
        """Check an exported file whole and make it the session's, by renaming it where that is possible. A copy from
        another disk has a temporary name until it is whole.

        It has `max_tokens` at most. Raises what `read_export` raises, and `OSError` if there is no room; then the file
        stays where it is.
        """
        header = read_export(path, self._identity, max_tokens=max_tokens)
        own = self.path(session)
        moved = own.with_name(f"{own.name}{TEMPORARY_SUFFIX}")
        try:
            shutil.move(path, moved)
        except BaseException:
            moved.unlink(missing_ok=True)
            raise
        moved.replace(own)
        return header
