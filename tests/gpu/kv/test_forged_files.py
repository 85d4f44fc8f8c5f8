"""KV files that somebody has changed who knows the format, and files that are something else."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.limits import MAX_LABEL_BYTES
from app.gpu.kv.file import read_kv_file, read_kv_header, write_kv_file
from app.gpu.kv.header import (
    MAX_TOKENS,
    KVFileDamaged,
    KVFileError,
    KVFileHeader,
    KVFileTooLarge,
    encode_header,
    file_bytes,
)
from tests.gpu.kv.kv_files import ABOUT, DIGEST, HEADER, IDENTITY, LAYOUT, blocks_of, same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file with `HEADER`."""
    write_kv_file(tmp_path / "session", HEADER, blocks_of(HEADER), ABOUT)
    return tmp_path / "session"


def forge(path: Path, change: Callable[[dict[str, Any]], None], body: bytes | None = None) -> None:
    """Rewrite the header as someone would who knows the format, checksum included."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    fields = json.loads(content[8:end])
    change(fields)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    lead = struct.pack("<Q", len(text)) + text + (content[end:-DIGEST] if body is None else body)
    path.write_bytes(lead + hashlib.sha256(lead).digest())


def setter(*keys: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        fields[keys[-1]] = value

    return change


def test_a_forged_file_without_a_change_is_a_valid_file(path: Path) -> None:
    forge(path, lambda fields: None)
    assert same(read_kv_file(path, IDENTITY), HEADER)


@pytest.mark.parametrize(
    "change",
    [
        setter("token_ids", "shape", value=[-1]),
        setter("token_ids", "shape", value=[2**62]),
        setter("token_ids", "shape", value=[MAX_TOKENS]),
        setter("token_ids", "shape", value=[True]),
        setter("token_ids", "shape", value=[6.0]),
        setter("token_ids", "shape", value=[]),
        setter("token_ids", "shape", value=6),
        setter("token_ids", value=None),
        setter("token_ids", "data_offsets", value=[0, 2**63]),
        setter("token_ids", "dtype", value="I64"),
        setter("kv", "shape", value=[2**40, *LAYOUT.block_shape]),
        setter("kv", "shape", value=[-2, *LAYOUT.block_shape]),
        setter("kv", "shape", value=[2, True, 2, 1, 4, 2]),
        setter("kv", "shape", value=[]),
        setter("kv", "data_offsets", value=[0, 0]),
        setter("sha256", "shape", value=[0]),
        setter("extra", value={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        setter("__metadata__", value=[]),
        setter("__metadata__", "format", value="pt"),
        setter("__metadata__", "version", value="1"),
        setter("__metadata__", "version", value=1),
        setter("__metadata__", "fingerprint", value=None),
        setter("__metadata__", "computed_tokens", value="-1"),
        setter("__metadata__", "computed_tokens", value="7"),
        setter("__metadata__", "computed_tokens", value="4"),
        setter("__metadata__", "computed_tokens", value=" 5"),
        setter("__metadata__", "computed_tokens", value="9" * 5000),
        setter("__metadata__", "computed_tokens", value=5),
        setter("__metadata__", "namespace", value="0"),
        setter("__metadata__", "namespace", value="01FF"),
        setter("__metadata__", "namespace", value=None),
        setter("about", "shape", value=[-1]),
        setter("about", "shape", value=[2**62]),
        setter("about", "shape", value=[True]),
        setter("about", value=None),
        setter("__metadata__", "more", value="x"),
    ],
)
def test_a_forged_header_is_refused(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    forge(path, change)
    with pytest.raises(KVFileError):
        read_kv_header(path, IDENTITY)


CLAIM = replace(HEADER, computed_tokens=0)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (replace(CLAIM, about_bytes=MAX_LABEL_BYTES + 1), rf"about .* from 0 to {MAX_LABEL_BYTES}$"),
        (replace(CLAIM, token_ids=range(MAX_TOKENS)), r"token_ids .* from 0 to 100$"),
    ],
    ids=["about", "tokens"],
)
def test_what_is_too_large_is_refused_before_it_is_read(path: Path, header: KVFileHeader, says: str) -> None:
    """The file is as large as it says, of zeros."""
    path.write_bytes(encode_header(header))
    os.truncate(path, file_bytes(header))

    def read() -> None:
        with pytest.raises(KVFileTooLarge, match=says):
            read_kv_file(path, IDENTITY, max_tokens=100)

    assert peak_of(read) < 1 << 20


def test_what_is_said_about_a_session_takes_no_memory(path: Path) -> None:
    header, about = replace(HEADER, about_bytes=32 << 20), b"a" * (32 << 20)
    write_kv_file(path, header, blocks_of(header), about)
    taken = peak_of(lambda: read_kv_file(path, IDENTITY, max_tokens=6))
    assert taken < 4 << 20


def peak_of(act: Callable[[], object]) -> int:
    """Most bytes that Python takes meanwhile."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("token_id", [-1, 100, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_refused(path: Path, token_id: int) -> None:
    tokens = array("i", [5, 99, token_id, 7, 8, 9]).tobytes()
    body = tokens + ABOUT + b"".join(blocks_of(HEADER))
    forge(path, lambda fields: None, body)
    with pytest.raises(KVFileDamaged, match="vocabulary, 0 to 99"):
        read_kv_header(path, IDENTITY)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        struct.pack("<Q", 1 << 32) + b"{}" * 100,
        struct.pack("<Q", 2**64 - 1) + b"{}" * 100,
        struct.pack("<Q", 1 << 19) + b"[" * (1 << 19),
        struct.pack("<Q", 8) + b"\xff" * 8,
        struct.pack("<Q", 8) + b"{}      ",
        struct.pack("<Q", 8) + b"null    ",
    ],
    ids=["empty", "zeros", "4 GiB header", "2^64 header", "deep", "not UTF-8", "no fields", "null"],
)
def test_what_is_no_kv_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "session").write_bytes(content)
    with pytest.raises(KVFileDamaged):
        read_kv_header(tmp_path / "session", IDENTITY)
