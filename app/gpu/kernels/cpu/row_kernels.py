"""The rows of the elementwise kernels, compiled by Numba: what each of them does with one token, in float32.

Each kernel computes a row by itself, so that its bits do not depend on the rows beside it. It rounds once, to nearest
even, when it stores.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from numba.np.numpy_support import carray

from app.gpu.kernels.cpu.compile import ELEMENTS, c_function, exp2, inlined
from app.gpu.kernels.cpu.intrinsics import fetch_add, narrow, pointer, widen


class RowArguments(ctypes.Structure):
    """What a kernel reads. Rows of `x` `[tokens, width]` are `x_stride` elements apart, `out` is dense; addresses are
    bytes.

    `next_item` counts the chunks of `chunk` tokens that threads have drawn. `weight`, whose rows are `weight_stride`
    elements apart, `bias`, `positions` and `heads` serve the kernels that name them.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("next_item", "tokens", "chunk", "width", "x", "x_stride", "out")),
        *((name, ctypes.c_int64) for name in ("weight", "weight_stride", "bias", "positions", "heads")),
        ("eps", ctypes.c_float),
    ]


_ARGUMENTS = np.dtype(RowArguments)
_UNBOUNDED = 1 << 60
_LOG2_E = np.float32(1.4426950408889634)
_LEAST_EXPONENT = np.float32(-126)
_TWO_ROOT = np.float32(1.5957691216057308)
"""Twice the root of 2 / pi: with it, half of 1 + tanh is a logistic function."""


@functools.cache
def compiled(name: str, dtype: torch.dtype) -> Any:
    """The kernel as a C function of the address of an `RowArguments`. See `c_function`."""
    element = ELEMENTS[dtype]
    return c_function(_kernel(_ROWS[name], element, np.uint16 if name == "round" else element))


def _kernel(row: Any, element: Any, made: Any) -> Callable[[int], None]:
    def kernel(address: int) -> None:
        _each_row(address, element, made, row)

    return kernel


@inlined
def _each_row(address: int, element: Any, made: Any, row: Any) -> None:
    """Draw chunks of rows until none is left. `made` stands for the dtype of the output, `element` for all others."""
    a = carray(pointer(address), 1, _ARGUMENTS)[0]
    x = carray(pointer(a.x), _UNBOUNDED, element)
    out = carray(pointer(a.out), _UNBOUNDED, made)
    weight = carray(pointer(a.weight), _UNBOUNDED, element)
    bias = carray(pointer(a.bias), _UNBOUNDED, element)
    positions = carray(pointer(a.positions), _UNBOUNDED, np.int64)
    while True:
        first = fetch_add(address) * a.chunk
        if first >= a.tokens:
            return
        for index in range(first, min(first + a.chunk, a.tokens)):
            row(a, index, x[index * a.x_stride :], out, weight, bias, positions)


@inlined
def _rms_norm_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    for head in range(a.heads):
        own, scaled = x[head * a.width :], weight[head * a.width :]
        squares = np.float32(0)
        for i in range(a.width):
            squares += widen(own[i]) * widen(own[i])
        scale = np.float32(1) / np.sqrt(squares / np.float32(a.width) + a.eps)
        target = out[(index * a.heads + head) * a.width :]
        for i in range(a.width):
            target[i] = narrow(widen(own[i]) * scale * widen(scaled[i]), target[i])


@inlined
def _layer_norm_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    total, squares = np.float32(0), np.float32(0)
    for i in range(a.width):
        total += widen(x[i])
    mean = total / np.float32(a.width)
    for i in range(a.width):
        squares += (widen(x[i]) - mean) * (widen(x[i]) - mean)
    scale = np.float32(1) / np.sqrt(squares / np.float32(a.width) + a.eps)
    own = out[index * a.width :]
    for i in range(a.width):
        own[i] = narrow((widen(x[i]) - mean) * scale * widen(weight[i]) + widen(bias[i]), own[i])


@inlined
def _silu_mul_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    own, up = out[index * a.width :], x[a.width :]
    for i in range(a.width):
        gate = widen(x[i])
        power = min(max(-gate * _LOG2_E, _LEAST_EXPONENT), -_LEAST_EXPONENT)
        own[i] = narrow(gate / (np.float32(1) + exp2(power)) * widen(up[i]), own[i])


@inlined
def _gelu_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    own = out[index * a.width :]
    for i in range(a.width):
        value = widen(x[i])
        inner = _TWO_ROOT * (value + np.float32(0.044715) * value * value * value)
        power = min(max(-inner * _LOG2_E, _LEAST_EXPONENT), -_LEAST_EXPONENT)
        own[i] = narrow(value / (np.float32(1) + exp2(power)), own[i])


@inlined
def _add_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    own, other = out[index * a.width :], weight[index * a.weight_stride :]
    for i in range(a.width):
        own[i] = narrow(widen(x[i]) + widen(other[i]), own[i])


@inlined
def _rotate_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    half = a.width // 2
    cos = weight[positions[index] * a.width :]
    sin = cos[half:]
    for head in range(a.heads):
        low = x[head * a.width :]
        high = low[half:]
        own = out[(index * a.heads + head) * a.width :]
        for i in range(half):
            left, right = widen(low[i]), widen(high[i])
            own[i] = narrow(left * widen(cos[i]) - right * widen(sin[i]), own[i])
            own[half + i] = narrow(right * widen(cos[i]) + left * widen(sin[i]), own[half + i])


@inlined
def _round_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    own = out[index * a.width :]
    for i in range(a.width):
        own[i] = narrow(widen(x[i]), own[i])


_ROWS = {
    "rms_norm": _rms_norm_row,
    "layer_norm": _layer_norm_row,
    "silu_mul": _silu_mul_row,
    "gelu": _gelu_row,
    "add": _add_row,
    "rotate": _rotate_row,
    "round": _round_row,
}
