"""KV as eight-bit floats, E4M3: sign, four bits of exponent, three of mantissa, no infinities, at most 448.

The format is that of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), PyTorch's `float8_e4m3fn`. There is
no scale, as with vLLM's `--kv-cache-dtype fp8` without calibration; values beyond 448 become 448.
"""

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loadgen.experiments.kv.session_file import KVArray

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


@dataclass(frozen=True, slots=True)
class Fp8Error:
    """Both halves of the KV."""

    keys: Rounding
    values: Rounding


def to_fp8(kv: KVArray) -> npt.NDArray[np.uint8]:
    """The nearest E4M3 number to each, ties to even, as a byte; same shape. Larger numbers become the largest."""
    wide = kv.astype(np.float32, copy=False)
    return np.clip(wide, -MAX_E4M3, MAX_E4M3).astype(E4M3).view(np.uint8)


def from_fp8(packed: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> KVArray:
    """The numbers again, in `dtype`."""
    numbers: KVArray = packed.view(E4M3).astype(dtype)
    return numbers


def measure_error(kv: KVArray) -> Fp8Error:
    """What the cast there and back does to blocks [blocks, layers, 2, kv_heads, block_tokens, head_dim]."""
    return Fp8Error(keys=_rounding(kv[:, :, KEYS]), values=_rounding(kv[:, :, VALUES]))


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
