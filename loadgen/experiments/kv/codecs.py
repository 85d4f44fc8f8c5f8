"""Making KV smaller, and how long that takes."""

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lz4.frame
import numpy as np
import zstandard

from loadgen.errors import LoadgenError
from loadgen.experiments.kv.fp8 import from_fp8, to_fp8
from loadgen.experiments.kv.session_file import KVArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Codec:
    """`pack` makes the KV smaller; `unpack` gives what was packed back as bytes, or as an array of the given dtype."""

    name: str
    lossless: bool
    pack: Callable[[KVArray], Any]
    unpack: Callable[[Any, np.dtype[Any]], Any]


def _of_bytes(name: str, compress: Callable[[Any], bytes], decompress: Callable[[bytes], bytes]) -> Codec:
    return Codec(name, True, lambda kv: compress(as_bytes(kv)), lambda packed, _dtype: decompress(packed))


def as_bytes(kv: KVArray) -> memoryview:
    """The bytes of contiguous KV, not copied; bfloat16 is no type that a buffer can have."""
    return kv.reshape(-1).view(np.uint8).data


_ZSTD_LEVEL = 3

CODECS: Sequence[Codec] = (
    _of_bytes("zlib -1", lambda data: zlib.compress(data, 1), zlib.decompress),
    _of_bytes("zlib -6", lambda data: zlib.compress(data, 6), zlib.decompress),
    _of_bytes(
        f"zstd -{_ZSTD_LEVEL}",
        lambda data: zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(data),
        lambda packed: zstandard.ZstdDecompressor().decompress(packed),
    ),
    _of_bytes("lz4", lz4.frame.compress, lz4.frame.decompress),
    Codec("fp8 e4m3", False, to_fp8, from_fp8),
)
"""Each with one thread, at its own default level; zlib also at its fastest."""


@dataclass(frozen=True, slots=True)
class Compression:
    """One codec on one session's KV: sizes in bytes, median times in seconds."""

    codec: str
    lossless: bool
    raw_bytes: int
    packed_bytes: int
    pack_s: float
    unpack_s: float

    @property
    def ratio(self) -> float:
        """How many times smaller."""
        return self.raw_bytes / self.packed_bytes

    @property
    def pack_bytes_per_s(self) -> float:
        """Raw bytes that are made smaller in a second."""
        return self.raw_bytes / self.pack_s

    @property
    def unpack_bytes_per_s(self) -> float:
        """Raw bytes that are there again in a second."""
        return self.raw_bytes / self.unpack_s


def measure_codec(codec: Codec, kv: KVArray, repeats: int) -> Compression:
    """Pack and unpack `repeats` times. Raises `LoadgenError` if a lossless codec does not give back what it was."""
    pack_s, packed = _timed(lambda: codec.pack(kv), repeats)
    unpack_s, unpacked = _timed(lambda: codec.unpack(packed, kv.dtype), repeats)
    if codec.lossless and unpacked != kv.tobytes():
        raise LoadgenError(f"{codec.name} did not give back what it was given")
    return Compression(codec.name, codec.lossless, kv.nbytes, memoryview(packed).nbytes, pack_s, unpack_s)


def _timed(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """The median of the seconds that it takes, and its result."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), result
