"""One session's tokens and KV in one file: safetensors, so that any tool reads it, with a checksum as its last tensor.

    8 bytes    length of the header, little-endian
    header     JSON: each tensor's dtype, shape and place; `__metadata__` says what they belong to
    token_ids  I32 [tokens]
    about      U8, what the exporter says of the session
    kv         [blocks, layers, 2, kv_heads, block_size, columns], block after block as the pool holds them
    sha256     U8 [32], over all bytes before it

The checksum finds accidents; an attacker who changes a file can compute a new one, so every length is checked first.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from app.gpu.state.kv_header import (
    MAX_TOKENS,
    TOKEN_BYTES,
    KVFileDamaged,
    KVFileHeader,
    KVIdentity,
    KVLayout,
    check_tokens,
    encode_header,
    file_bytes,
    match_header,
    parse_header,
)

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is being written; one that is found at start was left by a crash."""

MAX_HEADER_BYTES = 1 << 20
SCRATCH_BYTES = 1 << 20


def write_kv_file(path: Path, header: KVFileHeader, blocks: Iterable[memoryview], about: bytes = b"") -> int:
    """Write the file under a temporary name in the same folder, rename it to `path`, and return its size.

    `blocks` are contiguous, `block_bytes` each, `header.blocks` of them. What is in the last one beyond the computed
    tokens is written as zeros: it can hold KV of another session. The file is not synced to the disk. A file that a
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
    digest, size = hashlib.sha256(), 0
    for part in (encode_header(header), array("i", header.token_ids).tobytes(), about):
        size += file.write(part)
        digest.update(part)
    block_size = header.identity.layout.block_size
    for index, block in enumerate(blocks):
        used = max(0, header.computed_tokens - index * block_size)
        content = block if used >= block_size else zero_after(block, used, header.identity.layout)
        size += file.write(content)
        digest.update(content)
    return size + file.write(digest.digest())


def zero_after(block: memoryview, used: int, layout: KVLayout) -> bytearray:
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
        header, _ = _read_lead(file, expected, MAX_TOKENS)
    return header


def read_kv_file(
    path: Path, expected: KVIdentity, into: Sequence[memoryview] = (), *, max_tokens: int = MAX_TOKENS
) -> KVFileHeader:
    """Read the file's first `len(into)` blocks into the given buffers, and check the whole file.

    Each buffer is contiguous, writable and `block_bytes` long; there are at most as many as the file has blocks. When
    this raises (any `KVFileError`, `OSError`), what the buffers hold is worth nothing. Beside them this takes memory
    for the tokens only, of which there may be `max_tokens`.
    """
    with open(path, "rb") as file:
        header, lead = _read_lead(file, expected, max_tokens)
        digest = hashlib.sha256(lead)
        _pass_over(file, header.about_bytes, digest)
        for block in into:
            _fill(file, block)
            digest.update(block)
        _pass_over(file, (header.blocks - len(into)) * expected.layout.block_bytes, digest)
        if file.read() != digest.digest():
            raise KVFileDamaged("its checksum does not match its content")
    return header


def _read_lead(file: io.BufferedReader, expected: KVIdentity, max_tokens: int) -> tuple[KVFileHeader, bytes]:
    """The header with tokens, and the bytes that they came from; the file stands at `about`.

    All that the header claims is compared with what may be, and with the file's size, before more of it is read.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    header_bytes = int.from_bytes(start, "little")
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise KVFileDamaged("it is no exported session, which begins with the length of its header")
    lead = start + file.read(header_bytes)
    header = match_header(parse_header(lead[8:], max_tokens), expected)
    if encode_header(header) != lead:
        raise KVFileDamaged("its header is not as Djinn writes it")
    if file_bytes(header) != size:
        raise KVFileDamaged(f"it has {size} bytes, its header says {file_bytes(header)}")
    token_bytes = file.read(len(header.token_ids) * TOKEN_BYTES)
    token_ids = array("i", token_bytes)
    check_tokens(token_ids, expected)
    return replace(header, token_ids=token_ids), lead + token_bytes


def _pass_over(file: io.BufferedReader, count: int, digest: hashlib._Hash) -> None:
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
