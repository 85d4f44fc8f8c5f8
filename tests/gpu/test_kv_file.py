"""KV files: what is read is what was written, and whatever is not whole or not ours is refused."""

from __future__ import annotations

import hashlib
import json
import resource
import struct
import subprocess
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from app.gpu.kv_file import read_kv_file, read_kv_header, write_kv_file
from app.gpu.kv_header import (
    MAX_TOKENS,
    KVFileDamaged,
    KVFileError,
    KVFileHeader,
    KVFileMismatch,
    KVIdentity,
    KVLayout,
)

LAYOUT = KVLayout(layers=2, kv_heads=1, block_size=4, head_dim=2, dtype="float32")
IDENTITY = KVIdentity("model-a", vocab_size=100, layout=LAYOUT)
HEADER = KVFileHeader(IDENTITY, (5, 99, 0, 7, 8, 9), computed_tokens=5, namespace=b"\x01\xff", about='{"a": "é"}')


def blocks_of(header: KVFileHeader, seed: int = 0) -> list[memoryview]:
    """Random blocks, zero after the last computed token."""
    layout = header.identity.layout
    element_bytes = 4 if layout.dtype == "float32" else 2
    shape = (header.blocks, *layout.block_shape[:-1], layout.head_dim * element_bytes)
    content = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    if rest := header.computed_tokens % layout.block_size:
        content[-1, :, :, :, rest:] = 0
    return [memoryview(block.tobytes()) for block in content]


def buffers_for(header: KVFileHeader, count: int | None = None) -> list[memoryview]:
    count = header.blocks if count is None else count
    return [memoryview(bytearray(header.identity.layout.block_bytes)) for _ in range(count)]


def same(one: KVFileHeader, other: KVFileHeader) -> bool:
    return replace(one, token_ids=tuple(one.token_ids)) == replace(other, token_ids=tuple(other.token_ids))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file with `HEADER`."""
    write_kv_file(tmp_path / "session", HEADER, blocks_of(HEADER))
    return tmp_path / "session"


@st.composite
def headers(draw: st.DrawFn) -> KVFileHeader:
    few = st.integers(1, 3)
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    layout = KVLayout(draw(few), draw(few), draw(few), draw(few), dtype)
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    return KVFileHeader(
        KVIdentity(draw(st.text(max_size=9)), 2**31, layout),
        tuple(tokens),
        draw(st.integers(0, len(tokens))),
        draw(st.binary(max_size=16)),
        draw(st.text(max_size=20)),
    )


@given(header=headers(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, header: KVFileHeader, seed: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip"
    blocks, into = blocks_of(header, seed), buffers_for(header)
    size = write_kv_file(path, header, blocks)
    assert path.stat().st_size == size
    assert same(read_kv_header(path, header.identity), header)
    assert same(read_kv_file(path, header.identity, into), header)
    assert into == blocks


def test_any_safetensors_reader_finds_the_pool_layout(tmp_path: Path) -> None:
    path = tmp_path / "session.safetensors"
    kv = np.random.default_rng(0).standard_normal((2, *LAYOUT.block_shape), dtype=np.float32)
    write_kv_file(
        path, replace(HEADER, computed_tokens=8, token_ids=range(8)), [memoryview(block.tobytes()) for block in kv]
    )
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["fingerprint"] == "model-a"
        np.testing.assert_array_equal(file.get_tensor("kv"), kv)
        np.testing.assert_array_equal(file.get_tensor("token_ids"), range(8))
        stored = file.get_tensor("sha256").tobytes().hex()
    computed = subprocess.run(f"head -c -32 '{path}' | sha256sum", shell=True, capture_output=True, check=True)
    assert computed.stdout.split()[0].decode() == stored


def test_a_rest_of_somebody_elses_kv_is_not_written(path: Path) -> None:
    whole = path.read_bytes()
    full, partly = blocks_of(HEADER)
    kv = np.frombuffer(partly, np.float32).reshape(LAYOUT.block_shape).copy()
    kv[:, :, :, 1:] = 7.0
    write_kv_file(path, HEADER, [full, memoryview(kv.tobytes())])
    assert path.read_bytes() == whole


def test_a_beginning_of_the_blocks_can_be_read_and_all_is_checked(path: Path) -> None:
    into = buffers_for(HEADER, 1)
    read_kv_file(path, IDENTITY, into)
    assert into == blocks_of(HEADER)[:1]
    damage(path, -DIGEST - 1)
    with pytest.raises(KVFileDamaged, match="checksum"):
        read_kv_file(path, IDENTITY, into)
    with pytest.raises(KVFileDamaged, match="checksum"):
        read_kv_file(path, IDENTITY)


DIGEST = 32


def damage(path: Path, position: int, bits: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


def test_every_flipped_bit_is_found(path: Path) -> None:
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bits in (0x01, 0x20, 0x80, 0xFF):
            damage(path, position, bits)
            with pytest.raises(KVFileError):
                read_kv_file(path, IDENTITY, buffers_for(HEADER))
            path.write_bytes(whole)


def test_every_cut_is_found_without_reading_the_blocks(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(KVFileDamaged):
            read_kv_header(path, IDENTITY)
    path.write_bytes(whole + b"\0")
    with pytest.raises(KVFileDamaged, match="bytes"):
        read_kv_header(path, IDENTITY)


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (replace(IDENTITY, fingerprint="model-b"), "'model-a'.*'model-b'"),
        (replace(IDENTITY, layout=replace(LAYOUT, dtype="float16")), "F32.*F16"),
        (replace(IDENTITY, layout=replace(LAYOUT, block_size=8)), r"\[2, 2, 1, 4, 2\].*\[2, 2, 1, 8, 2\]"),
        (replace(IDENTITY, layout=replace(LAYOUT, layers=1, head_dim=4)), r"\[2, 2, 1, 4, 2\].*\[1, 2, 1, 4, 4\]"),
    ],
)
def test_a_file_of_another_model_or_layout_is_refused_with_the_difference(
    path: Path, expected: KVIdentity, says: str
) -> None:
    for read in (read_kv_header, read_kv_file):
        with pytest.raises(KVFileMismatch, match=says):
            read(path, expected)


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


def test_what_is_said_about_the_session_must_be_text(path: Path) -> None:
    tokens = array("i", HEADER.token_ids).tobytes()
    forge(path, lambda fields: None, tokens + b"\xff" * len(HEADER.about.encode()) + b"".join(blocks_of(HEADER)))
    with pytest.raises(KVFileDamaged, match="not text"):
        read_kv_header(path, IDENTITY)


@pytest.mark.parametrize("token_id", [-1, 100, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_refused(path: Path, token_id: int) -> None:
    tokens = array("i", [5, 99, token_id, 7, 8, 9]).tobytes()
    body = tokens + HEADER.about.encode() + b"".join(blocks_of(HEADER))
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


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes past `size` bytes fail with `OSError`, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_leaves_the_file_that_was_there(path: Path) -> None:
    whole = path.read_bytes()
    for size in (0, 8, len(whole) // 2, len(whole) - 1):
        with largest_file(size), pytest.raises(OSError, match="too large"):
            write_kv_file(path, HEADER, blocks_of(HEADER, seed=1))
    for wrong in (blocks_of(HEADER)[:1], blocks_of(HEADER) * 2):
        with pytest.raises(ValueError, match="header says"):
            write_kv_file(path, HEADER, wrong)
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == whole
