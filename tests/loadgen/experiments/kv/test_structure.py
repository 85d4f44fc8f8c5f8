"""What is read from a session file, and what follows from a structure."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from loadgen.errors import LoadgenError
from loadgen.experiments.kv.session_file import read_session_file
from loadgen.experiments.kv.structure import Structure, grow
from tests.loadgen.experiments.kv.building import BLOCK_TOKENS, random_kv, save_session

LLAMA_3_8B = Structure(
    model="Llama-3-8B",
    max_model_len=8192,
    layers=32,
    kv_heads=8,
    head_dim=128,
    dtype="BF16",
    element_bytes=2,
    block_tokens=16,
    block_bytes=16 * 131072,
    file_shape=(63, 32, 2, 8, 16, 128),
    computed_tokens=1000,
    file_bytes=0,
    device_bytes=10 << 30,
    host_bytes=0,
    disk_bytes=0,
)


def test_a_token_of_llama_3_8b_takes_128_kib() -> None:
    """The figure that is known for this model: 32 layers, 8 KV heads of 128, two bytes."""
    assert LLAMA_3_8B.bytes_per_token == 131072
    assert LLAMA_3_8B.agrees


@pytest.mark.parametrize("changed", [{"block_bytes": 16 * 131072 - 1}, {"file_shape": (62, 32, 2, 8, 16, 128)}])
def test_a_server_that_accounts_for_something_else(changed: dict[str, Any]) -> None:
    assert not replace(LLAMA_3_8B, **changed).agrees


def test_sessions_grow_in_whole_blocks() -> None:
    assert LLAMA_3_8B.session_bytes(16) == LLAMA_3_8B.block_bytes
    assert LLAMA_3_8B.session_bytes(17) == 2 * LLAMA_3_8B.block_bytes


def test_how_many_fit() -> None:
    growth = grow(LLAMA_3_8B)
    assert [row.tokens for row in growth] == [128 * 2**power for power in range(11)]
    (longest,) = (row for row in growth if row.tokens == 131072)
    assert (longest.bytes, longest.on_device, longest.on_host) == (16 << 30, 0, 0)
    (middle,) = (row for row in growth if row.tokens == 8192)
    assert (middle.bytes, middle.on_device) == (1 << 30, 10)


def test_a_file_is_read_as_it_was_saved(tmp_path: Path) -> None:
    kv = random_kv()
    file = read_session_file(save_session(tmp_path / "session", kv, 2 * BLOCK_TOKENS + 3))
    np.testing.assert_array_equal(file.kv, kv)
    assert (file.dtype, file.computed_tokens) == ("F32", 2 * BLOCK_TOKENS + 3)
    np.testing.assert_array_equal(file.full_blocks, kv[:2])


def test_other_blocks_in_the_same_file(tmp_path: Path) -> None:
    kv = random_kv()
    file = read_session_file(save_session(tmp_path / "session", kv, 2 * BLOCK_TOKENS))
    found = load(file.with_blocks(2 * kv[:2]))
    np.testing.assert_array_equal(found["kv"], np.concatenate([2 * kv[:2], kv[2:]]))
    assert list(found["token_ids"]) == list(range(2 * BLOCK_TOKENS + 1))


def test_the_checksum_fits_other_blocks(tmp_path: Path) -> None:
    content = read_session_file(save_session(tmp_path / "session", random_kv(), 16)).with_blocks(random_kv()[:1])
    assert content[-32:] == hashlib.sha256(content[:-32]).digest()


def test_a_session_without_kv(tmp_path: Path) -> None:
    with pytest.raises(LoadgenError, match="nothing to measure"):
        read_session_file(save_session(tmp_path / "session", random_kv()[:0], 0))


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}"])
def test_what_is_no_session(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "session"
    path.write_bytes(content)
    with pytest.raises(LoadgenError, match="reading the exported session failed"):
        read_session_file(path)


def test_a_type_of_numbers_that_kv_does_not_come_in(tmp_path: Path) -> None:
    path = tmp_path / "session"
    save_file({"kv": np.zeros((1, 1, 2, 1, 1, 1), np.int8)}, path, {"computed_tokens": "1"})
    with pytest.raises(LoadgenError, match="reading the exported session failed"):
        read_session_file(path)
