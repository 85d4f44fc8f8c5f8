"""A Numba kernel that writes keys and values to a pool of float8: see `store`, and `float8` for the rule.

It looks at bits and adds powers of two, so fast mathematics change nothing.
"""

import functools
from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray

from app.gpu.kernels.cpu.compile import ELEMENTS, c_function, inlined
from app.gpu.kernels.cpu.intrinsics import fetch_add, pointer, widen
from app.gpu.kernels.linear.float8 import (
    ABOVE_448,
    EXPONENT,
    INFINITE,
    LEAST_NORMAL,
    LEAST_PEAK,
    MAGNITUDE,
    MAX_CODE,
    NOT_A_NUMBER,
    ROUNDER,
    ROUNDER_BITS,
    SHIFT,
    TWO_POWERS,
)

_UNBOUNDED = 1 << 60
_ROUNDER = np.float32(ROUNDER)


@functools.cache
def rounding_kernel(dtype: torch.dtype, layout: Any) -> Any:
    """The kernel for keys and values of `dtype`, as a C function of the address of a structure `layout`."""
    element: Any = ELEMENTS[dtype]

    def kernel(address: int) -> None:
        a = carray(pointer(address), 1, layout)[0]
        keys = carray(pointer(a.key), _UNBOUNDED, element)
        values = carray(pointer(a.value), _UNBOUNDED, element)
        pool = carray(pointer(a.pool), _UNBOUNDED, np.uint8)
        blocks = carray(pointer(a.blocks), _UNBOUNDED, np.int64)
        offsets = carray(pointer(a.offsets), _UNBOUNDED, np.int64)
        while True:
            first = fetch_add(address) * a.chunk
            if first >= a.tokens:
                return
            for token in range(first, min(first + a.chunk, a.tokens)):
                slot = blocks[token] * a.block_stride + offsets[token] * a.columns
                for head in range(a.kv_heads):
                    to, at = slot + head * a.head_stride, head * a.head_dim
                    _round(keys[token * a.key_stride + at :], pool[to:], a.head_dim)
                    _round(values[token * a.value_stride + at :], pool[to + a.value_offset :], a.head_dim)

    return c_function(kernel)


@inlined
def _round(states: Any, row: Any, count: int) -> None:
    """Write `count` numbers and their scale to `row`."""
    peak: Any = np.int32(0)
    for i in range(count):
        peak = max(peak, np.float32(widen(states[i])).view(np.int32) & np.int32(MAGNITUDE))
    bits = max((peak + ABOVE_448) & EXPONENT, LEAST_PEAK) - SHIFT if peak < INFINITE else NOT_A_NUMBER
    inverse = np.int32(TWO_POWERS - bits).view(np.float32)
    for i in range(count):
        row[i] = _encode(widen(states[i]) * inverse)
    for i in range(4):
        row[count + i] = (bits >> 8 * i) & 0xFF


@inlined
def _encode(scaled: Any) -> Any:
    """The code of a float32 between -448 and 448, to nearest even: see `triton_rounding.encode`."""
    bits = np.float32(scaled).view(np.int32)
    size = bits & np.int32(MAGNITUDE)
    small = np.float32(abs(scaled) + _ROUNDER).view(np.int32) - ROUNDER_BITS
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    code: Any = small if size < LEAST_NORMAL else normal
    return np.uint8(min(code, MAX_CODE) | ((bits >> 24) & 0x80))
