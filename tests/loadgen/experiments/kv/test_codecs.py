"""Codecs on known bytes, read back by the libraries themselves."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lz4.frame
import ml_dtypes
import numpy as np
import pytest
import zstandard

from loadgen.errors import LoadgenError
from loadgen.experiments.kv.codecs import CODECS, Codec, measure_codec
from tests.loadgen.experiments.kv.building import random_kv

BY_NAME = {codec.name: codec for codec in CODECS}
READERS: dict[str, Callable[[bytes], bytes]] = {
    "zlib -1": zlib.decompress,
    "zlib -6": zlib.decompress,
    "zstd -3": lambda packed: zstandard.ZstdDecompressor().decompress(packed),
    "lz4": lz4.frame.decompress,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_lossless_codecs_keep_every_byte(name: str, dtype: Any) -> None:
    kv = random_kv(dtype)
    packed = BY_NAME[name].pack(kv)
    assert READERS[name](packed) == kv.tobytes()
    assert BY_NAME[name].unpack(packed, kv.dtype) == kv.tobytes()


@pytest.mark.parametrize("name", READERS)
def test_zeros_nearly_vanish(name: str) -> None:
    kv = np.zeros_like(random_kv())
    found = measure_codec(BY_NAME[name], kv, 2)
    assert found.raw_bytes == kv.nbytes
    assert found.packed_bytes == len(BY_NAME[name].pack(kv))
    assert found.ratio > 50
    assert found.lossless


@pytest.mark.parametrize(("dtype", "ratio"), [(np.float32, 4), (np.float16, 2), (ml_dtypes.bfloat16, 2)])
def test_fp8_is_a_byte_a_number(dtype: Any, ratio: int) -> None:
    found = measure_codec(BY_NAME["fp8 e4m3"], random_kv(dtype), 1)
    assert found.ratio == ratio
    assert not found.lossless


def test_a_codec_that_loses_bytes_is_found_out() -> None:
    lossy = replace(BY_NAME["lz4"], unpack=lambda packed, _dtype: lz4.frame.decompress(packed)[:-1])
    with pytest.raises(LoadgenError, match="lz4 did not give back"):
        measure_codec(lossy, random_kv(), 1)


def test_times_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, taken = [0.0], iter((0.25, 0.5, 8.0))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def pack(_kv: Any) -> bytes:
        clock[0] += next(taken)
        return b"x"

    found = measure_codec(Codec("slow", False, pack, lambda _packed, _dtype: None), random_kv(), 3)
    monkeypatch.undo()
    assert found.pack_s == 0.5
    assert found.pack_bytes_per_s == 2 * found.raw_bytes
