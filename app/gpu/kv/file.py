"""One session's tokens and KV in one file: safetensors, so that any tool reads it, with a checksum as its last tensor.

    8 bytes    length of the header, little-endian
    header     JSON: each tensor's dtype, shape and place; `__metadata__` says what they belong to
    token_ids  I32 [tokens]
    about      U8, what the exporter says of the session
    kv         [blocks, layers, 2, kv_heads, block_size, head_dim], block after block as the pool holds them
    sha256     U8 [32], over all bytes before it

The checksum finds accidents; whoever changes a file on purpose can compute a new one, so every length is checked first.
"""

import hashlib
import io
import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.gpu.kv.header import (
    TOKEN_BYTES,
    KVFileDamaged,
    KVFileHeader,
    KVIdentity,
    KVLayout,
    encode_header,
    file_bytes,
    match_header,
    parse_header,
)

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is being written; one that is found at start was left by a crash."""

MAX_HEADER_BYTES = 1 << 20
SCRATCH_BYTES = 1 << 20


def write_kv_file(path: Path, header: KVFileHeader, blocks: Iterable[memoryview]) -> int:
    """Write the file under a temporary name in the same folder, rename it to `path`, and return its size.

    `blocks` are contiguous, `block_bytes` each, `header.blocks` of them. What is in the last one beyond the computed
    tokens is written as zeros: it can be a rest of somebody else's KV. The file is not synced to the disk: one that a
    power failure tears fails its checksum. Raises `OSError` if there is no room, `ValueError` if the blocks are not
    what the header says; then nothing is left behind, and a file that was at `path` before stays.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=TEMPORARY_SUFFIX)
    try:
        with open(descriptor, "wb") as file:
            size = _write(file, header, blocks)
        if size != file_bytes(header):
            raise ValueError(f"the file has {size} bytes instead of the {file_bytes(header)} that its header says")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return size


def _write(file: io.BufferedWriter, header: KVFileHeader, blocks: Iterable[memoryview]) -> int:
    digest = hashlib.sha256()
    lead = encode_header(header) + array("i", header.token_ids).tobytes() + header.about.encode()
    size = file.write(lead)
    digest.update(lead)
    block_size = header.identity.layout.block_size
    for index, block in enumerate(blocks):
        used = max(0, header.computed_tokens - index * block_size)
        content = block if used >= block_size else _zero_after(block, used, header.identity.layout)
        size += file.write(content)
        digest.update(content)
    return size + file.write(digest.digest())


def _zero_after(block: memoryview, used: int, layout: KVLayout) -> bytearray:
    """A copy of the block with the KV of its first `used` tokens only."""
    content = bytearray(block)
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
        header, _ = _read_lead(file, expected)
    return header


def read_kv_file(path: Path, expected: KVIdentity, into: Sequence[memoryview] = ()) -> KVFileHeader:
    """Read the file's first `len(into)` blocks into the given buffers, and check the whole file.

    Each buffer is contiguous, writable and `block_bytes` long; there are at most as many as the file has blocks. When
    this raises (`KVFileDamaged`, `KVFileMismatch`, `OSError`), what the buffers hold is worth nothing.
    """
    with open(path, "rb") as file:
        header, lead = _read_lead(file, expected)
        digest = hashlib.sha256(lead)
        for block in into:
            _fill(file, block)
            digest.update(block)
        unread = (header.blocks - len(into)) * expected.layout.block_bytes
        scratch = memoryview(bytearray(min(SCRATCH_BYTES, unread)))
        while unread:
            part = scratch[:unread]
            _fill(file, part)
            digest.update(part)
            unread -= len(part)
        if file.read() != digest.digest():
            raise KVFileDamaged("its checksum does not match its content")
    return header


def _read_lead(file: io.BufferedReader, expected: KVIdentity) -> tuple[KVFileHeader, bytes]:
    """The header with tokens and `about`, and the bytes that they came from; the file stands at its first block."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    header_bytes = int.from_bytes(start, "little")
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise KVFileDamaged("it does not begin with the length of its header")
    lead = start + file.read(header_bytes)
    fields = parse_header(lead[8:])
    token_bytes = file.read(fields.tokens * TOKEN_BYTES)
    token_ids = array("i", token_bytes[: len(token_bytes) // TOKEN_BYTES * TOKEN_BYTES])
    about = file.read(min(fields.about_bytes, size))
    header = match_header(fields, token_ids, about, expected)
    if encode_header(header) != lead:
        raise KVFileDamaged("its header is not as Djinn writes it")
    if file_bytes(header) != size:
        raise KVFileDamaged(f"it has {size} bytes, its header says {file_bytes(header)}")
    return header, lead + token_bytes + about


def _fill(file: io.BufferedReader, buffer: memoryview) -> None:
    if file.readinto(buffer) != buffer.nbytes:
        raise KVFileDamaged("it ends too early")
