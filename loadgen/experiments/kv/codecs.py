"""Making the KV of an exported session smaller, how long that takes, and what it loses. The file is safetensors with
the tensors `token_ids`, `about`, `kv` and `sha256`.

fp8 is E4M3: sign, four bits of exponent, three of mantissa, no infinities, at most 448. The format is that of "FP8
Formats for Deep Learning" (Micikevicius et al., 2022), PyTorch's `float8_e4m3fn`. There is no scale, as with vLLM's
`--kv-cache-dtype fp8` without calibration; values beyond 448 become 448.
"""

import hashlib
import json
import math
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lz4.frame
import ml_dtypes
import numpy as np
import numpy.typing as npt
import zstandard

from loadgen.errors import LoadgenError

ELEMENTS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""What NumPy calls the element types that KV comes in; bfloat16 is not one of NumPy's own."""

AXES = 6
DIGEST_BYTES = 32

KVArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SessionFile:
    """What the file holds, `content` being all of it.

    `kv` starts at byte `kv_start`: [blocks, layers, 2 (keys, values), kv_heads, block_tokens, head_dim], with the KV of
    the first `computed_tokens` tokens; what follows them in the last block is zero.
    """

    content: bytes
    computed_tokens: int
    dtype: str
    kv: KVArray
    kv_start: int

    @property
    def full_blocks(self) -> KVArray:
        """The blocks without zeros at their end."""
        return self.kv[: self.computed_tokens // self.kv.shape[4]]

    def with_blocks(self, blocks: KVArray) -> bytes:
        """The file with these as its full blocks, and a checksum that fits: the last tensor, over all bytes before."""
        changed = bytearray(self.content[:-DIGEST_BYTES])
        content = np.ascontiguousarray(blocks).tobytes()
        changed[self.kv_start : self.kv_start + len(content)] = content
        return bytes(changed) + hashlib.sha256(changed).digest()


def read_session_file(path: Path) -> SessionFile:
    """Raises `LoadgenError` if it is no such file, or has no KV."""
    content = path.read_bytes()
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        header: dict[str, Any] = json.loads(content[8:start])
        found, computed = header["kv"], int(header["__metadata__"]["computed_tokens"])
        first, end = (start + offset for offset in found["data_offsets"])
        kv = np.frombuffer(content[first:end], ELEMENTS[found["dtype"]]).reshape(found["shape"])
    except (ValueError, LookupError, TypeError) as error:
        raise LoadgenError(f"reading the exported session failed: {error!r}") from error
    if kv.ndim != AXES or not kv.size:
        raise LoadgenError(f"the exported session has KV of shape {list(kv.shape)}: nothing to measure")
    return SessionFile(content, computed, found["dtype"], kv, first)


T = TypeVar("T")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
MAX_E4M3 = 448.0

KEYS, VALUES = 0, 1


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the cast does to keys, or to values.

    `relative` is the length of the error over the length of the vector of all numbers (L2 norms), `layers` the same for
    each layer. `clipped` and `zeroed` are the shares of numbers that were too large, and too small to stay above 0.
    """

    relative: float
    layers: tuple[float, ...]
    clipped: float
    zeroed: float


def to_fp8(kv: KVArray) -> npt.NDArray[np.uint8]:
    """The nearest E4M3 number to each, ties to even, as a byte; same shape. Larger numbers become the largest."""
    wide = kv.astype(np.float32, copy=False)
    return np.clip(wide, -MAX_E4M3, MAX_E4M3).astype(E4M3).view(np.uint8)


def from_fp8(packed: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> KVArray:
    """The numbers again, in `dtype`."""
    numbers: KVArray = packed.view(E4M3).astype(dtype)
    return numbers


def measure_error(kv: KVArray) -> dict[str, Rounding]:
    """What the cast there and back does to keys and values of blocks [blocks, layers, 2, kv_heads, block_tokens,
    head_dim].
    """
    return {"keys": _rounding(kv[:, :, KEYS]), "values": _rounding(kv[:, :, VALUES])}


def _rounding(half: KVArray) -> Rounding:
    """Of [blocks, layers, kv_heads, block_tokens, head_dim]."""
    original = half.astype(np.float32)
    cast = from_fp8(to_fp8(original), original.dtype)
    axes = (0, 2, 3, 4)
    wrong = np.sum((cast - original) ** 2, axis=axes, dtype=np.float64)
    right = np.sum(original**2, axis=axes, dtype=np.float64)
    return Rounding(
        relative=math.sqrt(wrong.sum() / right.sum()),
        layers=tuple(np.sqrt(wrong / right).tolist()),
        clipped=float(np.mean(np.abs(original) > MAX_E4M3)),
        zeroed=float(np.mean((cast == 0) & (original != 0))),
    )


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
