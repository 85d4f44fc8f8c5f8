"""KV files: what is read is what was written, and what is not whole is refused."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from app.gpu.kv.file import read_kv_file, read_kv_header, write_kv_file
from app.gpu.kv.header import (
    KVFileDamaged,
    KVFileError,
    KVFileHeader,
    KVFileMismatch,
    KVIdentity,
    KVLayout,
)
from tests.file_sizes import largest_file
from tests.gpu.kv.kv_files import ABOUT, DIGEST, HEADER, IDENTITY, LAYOUT, blocks_of, buffers_for, damage, same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file with `HEADER`."""
    write_kv_file(tmp_path / "session", HEADER, blocks_of(HEADER), ABOUT)
    return tmp_path / "session"


@st.composite
def headers(draw: st.DrawFn) -> KVFileHeader:
    few = st.integers(1, 3)
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", "float8"]))
    layout = KVLayout(draw(few), draw(few), draw(few), draw(few), dtype)
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    return KVFileHeader(
        KVIdentity(draw(st.text(max_size=9)), 2**31, layout),
        tuple(tokens),
        draw(st.integers(0, len(tokens))),
        draw(st.binary(max_size=16)),
        draw(st.integers(0, 40)),
    )


@given(header=headers(), seed=st.integers(0, 99))
@settings(max_examples=60)
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
        (replace(IDENTITY, fingerprint="model-b"), "another model.* model-a.* model-b"),
        (replace(IDENTITY, layout=replace(LAYOUT, dtype="float16")), "its KV is float32.*as float16.*--kv-dtype"),
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
