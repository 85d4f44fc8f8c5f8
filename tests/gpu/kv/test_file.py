"""KV files: what was written can be read, and damaged or forged files are refused. Their folder: what a start finds in
it, and what it adopts.
"""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from app.domain.errors import FieldOutOfRange
from app.domain.values import MAX_LABEL_BYTES, SessionId
from app.gpu.kv.file import DiskStore, read_kv_file, read_kv_header, write_kv_file
from app.gpu.state.kv_header import (
    MAX_TOKENS,
    Checksum,
    KVFileDamaged,
    KVFileError,
    KVFileHeader,
    KVFileMismatch,
    KVIdentity,
    KVLayout,
    encode_header,
    file_bytes,
)
from app.gpu.state.layer_state import ONE_GROUP, Groups
from tests.file_sizes import largest_file
from tests.privileges import unprivileged_folder

LAYOUT = KVLayout(layers=2, kv_heads=1, block_size=4, head_dim=2, dtype="float32")
IDENTITY = KVIdentity("model-a", vocab_size=100, layout=LAYOUT)
ABOUT = '{"a": "é"}'.encode()
HEADER = KVFileHeader(IDENTITY, (5, 99, 0, 7, 8, 9), computed_tokens=5, namespace=b"\x01\xff", about_bytes=len(ABOUT))
DIGEST = 32
"""Bytes of the checksum that ends a file."""


def blocks_of(header: KVFileHeader, seed: int = 0) -> list[memoryview]:
    """Random blocks, zero after the last computed token."""
    layout = header.identity.layout
    element_bytes = {"float32": 4, "float8": 1}.get(layout.dtype, 2)
    shape = (header.blocks, *layout.block_shape[:-1], layout.block_shape[-1] * element_bytes)
    content = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    if rest := header.computed_tokens % layout.block_size:
        content[-layout.groups.size :, :, :, :, rest:] = 0
    return [memoryview(block.tobytes()) for block in content]


def buffers_for(header: KVFileHeader, count: int | None = None) -> list[memoryview]:
    count = header.blocks if count is None else count
    return [memoryview(bytearray(header.identity.layout.block_bytes)) for _ in range(count)]


def same(one: KVFileHeader, other: KVFileHeader) -> bool:
    return replace(one, token_ids=tuple(one.token_ids)) == replace(other, token_ids=tuple(other.token_ids))


def damage(path: Path, position: int, bits: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_kv_file(tmp_path / "session", HEADER, blocks_of(HEADER), ABOUT)
    return tmp_path / "session"


@pytest.fixture(params=Checksum)
def either(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file with each checksum."""
    write_kv_file(tmp_path / "either", replace(HEADER, checksum=request.param), blocks_of(HEADER), ABOUT)
    return tmp_path / "either"


@st.composite
def headers(draw: st.DrawFn) -> KVFileHeader:
    few = st.integers(1, 3)
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", "float8"]))
    groups = draw(st.sampled_from([ONE_GROUP, Groups(0, 1), Groups(1, 1), Groups(2, 3)]))
    layout = KVLayout(draw(few), draw(few), draw(few), draw(few), dtype, groups=groups)
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    computed = draw(st.integers(0, len(tokens)))
    return KVFileHeader(
        KVIdentity(draw(st.text(max_size=9)), 2**31, layout),
        tuple(tokens),
        computed,
        draw(st.binary(max_size=16)),
        draw(st.integers(0, 40)),
        draw(st.sampled_from(Checksum)),
        draw(st.integers(0, computed // layout.block_size if groups.windowed else 0)) * groups.size,
    )


@given(header=headers(), seed=st.integers(0, 99))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, header: KVFileHeader, seed: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip"
    blocks, into = blocks_of(header, seed), buffers_for(header)
    about = np.random.default_rng(seed).bytes(header.about_bytes)
    size = write_kv_file(path, header, blocks, about)
    assert path.stat().st_size == size
    assert path.read_bytes()[header.about_at :][: header.about_bytes] == about
    assert same(read_kv_header(path, header.identity), header)
    assert same(read_kv_file(path, header.identity, into), header)
    assert into == blocks


def test_any_safetensors_reader_finds_the_pool_layout(tmp_path: Path) -> None:
    path = tmp_path / "session.safetensors"
    kv = np.random.default_rng(0).standard_normal((2, *LAYOUT.block_shape), dtype=np.float32)
    write_kv_file(
        path,
        replace(HEADER, computed_tokens=8, token_ids=range(8)),
        [memoryview(block.tobytes()) for block in kv],
        ABOUT,
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
    write_kv_file(path, HEADER, [full, memoryview(kv.tobytes())], ABOUT)
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


def test_every_flipped_bit_is_found(either: Path) -> None:
    whole = either.read_bytes()
    for position in range(len(whole)):
        for bits in (0x01, 0x80):
            damage(either, position, bits)
            with pytest.raises(KVFileError):
                read_kv_file(either, IDENTITY, buffers_for(HEADER))
            either.write_bytes(whole)


def test_every_cut_is_found_without_reading_the_blocks(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(KVFileDamaged):
            read_kv_header(path, IDENTITY)
    path.write_bytes(whole + b"\0")
    with pytest.raises(KVFileDamaged, match="bytes"):
        read_kv_header(path, IDENTITY)


def test_a_write_that_fails_leaves_the_file_that_was_there(path: Path) -> None:
    whole = path.read_bytes()
    for size in (0, 8, len(whole) // 2, len(whole) - 1):
        with largest_file(size), pytest.raises(OSError, match="too large"):
            write_kv_file(path, HEADER, blocks_of(HEADER, seed=1), ABOUT)
    for wrong in (blocks_of(HEADER)[:1], blocks_of(HEADER) * 2):
        with pytest.raises(ValueError, match="header says"):
            write_kv_file(path, HEADER, wrong, ABOUT)
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == whole


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


@pytest.mark.parametrize(
    "change",
    [
        setter("token_ids", "shape", value=[-1]),
        setter("token_ids", "shape", value=[2**62]),
        setter("token_ids", "shape", value=[True]),
        setter("token_ids", "dtype", value="I64"),
        setter("kv", "shape", value=[2**40, *LAYOUT.block_shape]),
        setter("kv", "data_offsets", value=[0, 0]),
        setter("sha256", "shape", value=[0]),
        setter("extra", value={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        setter("__metadata__", value=[]),
        setter("__metadata__", "format", value="pt"),
        setter("__metadata__", "fingerprint", value=None),
        setter("__metadata__", "computed_tokens", value="7"),
        setter("__metadata__", "computed_tokens", value="9" * 5000),
        setter("__metadata__", "namespace", value="01FF"),
        setter("about", value=None),
        setter("__metadata__", "more", value="x"),
    ],
)
def test_a_forged_header_is_refused(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    forge(path, lambda fields: None)
    assert same(read_kv_file(path, IDENTITY), HEADER), "it is the change that is refused"
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
        with pytest.raises(KVFileError, match=says):
            read_kv_file(path, IDENTITY, max_tokens=100)

    assert peak_of(read) < 1 << 20


def peak_of(act: Callable[[], object]) -> int:
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
        struct.pack("<Q", 2**64 - 1) + b"{}" * 100,
        struct.pack("<Q", 1 << 19) + b"[" * (1 << 19),
        struct.pack("<Q", 8) + b"\xff" * 8,
        struct.pack("<Q", 8) + b"null    ",
    ],
    ids=["empty", "zeros", "2^64 header", "deep", "not UTF-8", "null"],
)
def test_what_is_no_kv_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "session").write_bytes(content)
    with pytest.raises(KVFileDamaged):
        read_kv_header(tmp_path / "session", IDENTITY)


# The folder of a server's files.

PLAIN = replace(HEADER, about_bytes=0)
"""Of a session's file, about which nothing is said."""
OWN = replace(PLAIN, checksum=Checksum.CRC32)
"""As the store writes it."""
ONE, TWO = SessionId("ses_1"), SessionId("ses_2")


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "state" / "kv", IDENTITY)


def test_a_folder_that_cannot_be_written_is_refused_at_start() -> None:
    with unprivileged_folder() as state:
        folder = state / "kv"
        folder.mkdir(mode=0o500)
        with pytest.raises(FieldOutOfRange, match=rf"cannot keep KV in {folder}: Permission denied.*--state-dir"):
            DiskStore(folder, IDENTITY)


def test_a_session_is_there_until_it_is_deleted(store: DiskStore) -> None:
    size = store.write(ONE, PLAIN, blocks_of(PLAIN))
    assert size == file_bytes(OWN) == store.path(ONE).stat().st_size
    for private in (store.path(ONE), store.path(ONE).parent):
        assert private.stat().st_mode & 0o077 == 0
    into = buffers_for(PLAIN)
    assert same(store.read(ONE, into), OWN)
    assert into == blocks_of(PLAIN)
    store.delete(ONE)
    store.delete(ONE)
    with pytest.raises(FileNotFoundError):
        store.read(ONE, into)


def test_what_cannot_be_used_is_named_and_left_until_its_session_has_had_its_say(store: DiskStore) -> None:
    foreign = replace(PLAIN, identity=replace(IDENTITY, fingerprint="model-b"))
    store.write(ONE, PLAIN, blocks_of(PLAIN))
    store.write(TWO, foreign, blocks_of(foreign))
    cut = store.path(SessionId("ses_3"))
    cut.write_bytes(store.path(ONE).read_bytes()[:-1])
    half_written = cut.with_suffix(".tmp")
    half_written.write_bytes(b"half")
    headers, refused = DiskStore(store.path(ONE).parent, IDENTITY).index()
    assert (list(headers), refused) == ([ONE], [TWO, SessionId("ses_3")])
    assert same(headers[ONE], OWN)
    assert sorted(cut.parent.iterdir()) == [store.path(ONE), store.path(TWO), cut]


@given(session=st.text(st.characters(codec="utf-8"), max_size=12).map(SessionId))
def test_no_id_leads_out_of_the_folder_or_to_another_session(
    tmp_path_factory: pytest.TempPathFactory, session: SessionId
) -> None:
    folder = tmp_path_factory.getbasetemp() / "ids"
    store = DiskStore(folder, IDENTITY)
    path = store.path(session)
    assert os.path.normpath(path) == str(folder / path.name)
    store.write(session, PLAIN, blocks_of(PLAIN))
    assert list(store.index()[0]) == [session]
    store.delete(session)


EXPORT = replace(PLAIN, namespace=b"")


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    write_kv_file(tmp_path / "upload", EXPORT, blocks_of(PLAIN))
    return tmp_path / "upload"


def test_an_adopted_file_has_moved_also_from_another_file_system(store: DiskStore, upload: Path) -> None:
    memory, uploads, into = Path("/dev/shm"), [upload], buffers_for(PLAIN)
    if memory.is_dir():
        uploads.append(memory / f"djinn-test-{os.getpid()}")
        shutil.copyfile(upload, uploads[1])
    for each in uploads:
        assert same(store.adopt(each, TWO, max_tokens=6), EXPORT)
        assert not each.exists()
        store.read(TWO, into)
        assert into == blocks_of(PLAIN)
        store.delete(TWO)


def test_a_bad_file_is_not_adopted(store: DiskStore, upload: Path) -> None:
    foreign = replace(EXPORT, identity=replace(IDENTITY, fingerprint="model-b"))
    for header, damaged, max_tokens, error, says in (
        (PLAIN, False, 6, KVFileDamaged, "namespace"),
        (replace(EXPORT, checksum=Checksum.CRC32), False, 6, KVFileDamaged, "SHA-256"),
        (EXPORT, True, 6, KVFileDamaged, "checksum"),
        (foreign, False, 6, KVFileMismatch, "another model"),
        (EXPORT, False, 5, KVFileError, r"token_ids .* from 0 to 5$"),
    ):
        write_kv_file(upload, header, blocks_of(header))
        if damaged:
            damage(upload, -40)
        with pytest.raises(error, match=says):
            store.adopt(upload, TWO, max_tokens=max_tokens)
    assert upload.exists()
    assert store.index()[0] == {}
