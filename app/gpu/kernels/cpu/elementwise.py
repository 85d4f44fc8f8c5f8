"""What lies between a layer's matrix products on CPU, and what forbids tokens: one pass over memory for each.

PyTorch runs each as several operators there, with a float32 copy for half types. Measured for a step of 32 rows of a
135M Llama in bfloat16: norms 3.5 ms with PyTorch and 1.6 ms here, rotations 1.9 and 0.9 ms. Each kernel computes a row
by itself, in float32, so that its bits do not depend on others. It rounds once, to nearest even, when it stores.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.intrinsics import LEAST_EXPONENT, LOG2_E, convert, exp2, widen
from app.gpu.kernels.cpu.launch import draw, parallel

_CHUNK_ELEMENTS = 8192
_WORD = 32
"""Tokens in one int32."""
_MINUS_INFINITY = np.int32(np.float32(-np.inf).view(np.int32))
"""As an integer: kernels are compiled for numbers that are finite."""
_ONE, _TWO = np.float32(1), np.float32(2)
_TWO_ROOT = np.float32(1.5957691216057308)
"""Twice the root of 2 / pi: with it, half of 1 + tanh is a logistic function."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of rows `[tokens, width]`, or of heads `[tokens, heads, width]` that lie dense."""
    return _run(_rms_norm_row, x, weight=weight, eps=eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of rows `[tokens, width]`."""
    return _run(_layer_norm_row, x, weight=weight, bias=bias, eps=eps)


def gelu_(x: Tensor) -> Tensor:
    """GELU with a tanh, in place, of `[tokens, width]`."""
    return _run(_gelu_row, x, x)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[tokens, 2 * inner]` or dense `[tokens, visits, 2 * inner]`, the gate first."""
    return _run_pairs(_silu_mul_row, gate_up)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """`models.elementwise.clamped_swiglu`, of the same."""
    return _run_pairs(_clamped_swiglu_row, gate_up, factor=alpha, limit=limit)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of the same."""
    return _run_pairs(_gelu_mul_row, gate_up)


def add_(x: Tensor, other: Tensor) -> Tensor:
    """Add one row for each token to `x` `[tokens, width]`, or one for all."""
    return _run(_add_row, x, x, weight=other if other.dim() == x.dim() else other.expand_as(x))


def gate_(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply `x` `[tokens, width]` by a logistic function of `gates`."""
    return _run(_gate_row, x, x, weight=gates)


def multiply(x: Tensor, other: Tensor) -> Tensor:
    """`x` times `other`, `[tokens, width]` each or `[width]`, as the type of `other`."""
    out = torch.empty(x.shape, dtype=other.dtype)
    return _run(_multiply_row, x, out, weight=other if other.dim() == x.dim() else other.expand_as(x))


def scale_(x: Tensor, factor: float) -> Tensor:
    """Multiply `x` `[tokens, width]` by `factor`."""
    return _run(_scale_row, x, x, factor=factor)


def softcap_(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, in place, of `[tokens, width]`."""
    return _run(_softcap_row, x, x, factor=cap)


def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotate the first values of heads `[tokens, heads, head_dim]` as `table` `[positions, rotated]` says, cosines
    first.
    """
    return _run(_rotate_row, x, weight=table, positions=positions, rotated=table.shape[1])


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` `[tokens, ...]` as `dtype`, to nearest even, in a new dense tensor."""
    flat = x.flatten(1)
    return _run(_round_row, flat, torch.empty(flat.shape, dtype=dtype)).view(x.shape)


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Give tokens whose bit is 0 minus infinity: in `rows` `[n]` int64 of `logits` `[all rows, vocab_size]`, by `bits`
    `[n, words]` int32. For 32 rows of 49,152 tokens PyTorch's `masked_fill_` takes 3.6 to 9.6 ms, and this 0.8 ms.
    """
    # The kernel trusts the addresses: other strides would mask other tokens.
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    assert bits.shape[1] * _WORD >= logits.shape[1]
    _run(_forbid_row, bits, logits.view(torch.int32), positions=rows)


def _run_pairs(row: Any, gate_up: Tensor, **more: Any) -> Tensor:
    return _run(row, gate_up, gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2), **more)


def _run(row: Any, x: Tensor, out: Tensor | None = None, *, weight: Tensor | None = None, **more: Any) -> Tensor:
    """Returns `out`, `[tokens, width]` or `[tokens, heads, width]`, a new tensor like `x` if there is none."""
    out, weight = torch.empty(x.shape, dtype=x.dtype) if out is None else out, x if weight is None else weight
    heads, width = x.shape[1] if x.dim() == 3 else 1, out.shape[-1]
    chunk = max(1, _CHUNK_ELEMENTS // max(1, width, math.prod(x.shape[1:])))
    _each_row(tokens=x.shape[0], chunk=chunk, width=width, heads=heads, x=x, out=out, weight=weight, row=row, **more)
    return out


@parallel
def _each_row(
    a: Any,
    tokens: int,
    chunk: int,
    width: int,
    heads: int,
    x: Tensor,
    out: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    rotated: int = 0,
    eps: float = 0.0,
    factor: float = 1.0,
    limit: float = 0.0,
    *,
    row: Any,
) -> None:
    """Draw chunks of tokens until none is left. Rows of `x` `[tokens, width]`, or `[tokens, heads, width]`, are
    `x_stride` elements apart, those of `weight` `weight_stride`; `out` is dense. The rest is as `row` takes it.
    """
    while True:
        first = draw(a) * chunk
        if first >= tokens:
            return
        for index in range(first, min(first + chunk, tokens)):
            row(a, index, x[index * a.x_stride :], out, weight, bias, positions)


@inlined
def _rms_norm_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    for head in range(a.heads):
        own, scaled = x[head * a.width :], weight[head * a.width :]
        squares = np.float32(0)
        for i in range(a.width):
            squares += widen(own[i]) * widen(own[i])
        scale = _ONE / np.sqrt(squares / np.float32(a.width) + a.eps)
        target = out[(index * a.heads + head) * a.width :]
        for i in range(a.width):
            target[i] = convert(widen(own[i]) * scale * widen(scaled[i]), target[i])


@inlined
def _layer_norm_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    total, squares = np.float32(0), np.float32(0)
    for i in range(a.width):
        total += widen(x[i])
    mean = total / np.float32(a.width)
    for i in range(a.width):
        squares += (widen(x[i]) - mean) * (widen(x[i]) - mean)
    scale = _ONE / np.sqrt(squares / np.float32(a.width) + a.eps)
    own = out[index * a.width :]
    for i in range(a.width):
        own[i] = convert((widen(x[i]) - mean) * scale * widen(weight[i]) + widen(bias[i]), own[i])


@inlined
def exponential(x: Any) -> Any:
    """e to the `x`, from the least normal number to one over it."""
    return exp2(min(max(x * LOG2_E, LEAST_EXPONENT), -LEAST_EXPONENT))


@inlined
def logistic(value: Any, inner: Any) -> Any:
    """`value` times the logistic function of `inner`."""
    return value / (_ONE + exponential(-inner))


@inlined
def _gelu(value: Any) -> Any:
    return logistic(value, _TWO_ROOT * (value + np.float32(0.044715) * value * value * value))


def _of_each(number: Any) -> Any:
    """A row of `number(a, x, other, i)`, with the row's `other` in `weight`."""
    number = inlined(number)

    @inlined
    def row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
        own, other = out[index * a.width :], weight[index * a.weight_stride :]
        for i in range(a.width):
            own[i] = convert(number(a, x, other, i), own[i])

    return row


def _of_pairs(number: Any) -> Any:
    """Heads of `number(a, gate, up)`."""
    number = inlined(number)

    @inlined
    def row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
        for head in range(a.heads):
            own, gates = out[(index * a.heads + head) * a.width :], x[2 * head * a.width :]
            ups = gates[a.width :]
            for i in range(a.width):
                own[i] = convert(number(a, widen(gates[i]), widen(ups[i])), own[i])

    return row


def _clamped(a: Any, gate: Any, up: Any) -> Any:
    gate, up = min(gate, a.limit), min(max(up, -a.limit), a.limit)
    return logistic(gate, gate * a.factor) * (up + _ONE)


def _capped(a: Any, x: Any, other: Any, i: int) -> Any:
    return a.factor * (logistic(_TWO, _TWO * (widen(x[i]) / a.factor)) - _ONE)


_silu_mul_row = _of_pairs(lambda a, gate, up: logistic(gate, gate) * up)
_gelu_mul_row = _of_pairs(lambda a, gate, up: _gelu(gate) * up)
_clamped_swiglu_row = _of_pairs(_clamped)
_gelu_row = _of_each(lambda a, x, other, i: _gelu(widen(x[i])))
_add_row = _of_each(lambda a, x, other, i: widen(x[i]) + widen(other[i]))
_gate_row = _of_each(lambda a, x, other, i: logistic(widen(x[i]), widen(other[i])))
_multiply_row = _of_each(lambda a, x, other, i: widen(x[i]) * widen(other[i]))
_scale_row = _of_each(lambda a, x, other, i: widen(x[i]) * a.factor)
_softcap_row = _of_each(_capped)
_round_row = _of_each(lambda a, x, other, i: x[i])


@inlined
def _rotate_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    half = a.rotated // 2
    cos = weight[positions[index] * a.rotated :]
    sin = cos[half:]
    for head in range(a.heads):
        low = x[head * a.width :]
        high = low[half:]
        own = out[(index * a.heads + head) * a.width :]
        for i in range(half):
            left, right = widen(low[i]), widen(high[i])
            own[i] = convert(left * widen(cos[i]) - right * widen(sin[i]), own[i])
            own[half + i] = convert(right * widen(cos[i]) + left * widen(sin[i]), own[half + i])
        for i in range(a.rotated, a.width):
            own[i] = low[i]


@inlined
def _forbid_row(a: Any, index: int, x: Any, out: Any, weight: Any, bias: Any, positions: Any) -> None:
    width = a.width  # what is written might change the record, for all that LLVM knows
    own = out[positions[index] * width :]
    for word in range(-(-width // _WORD)):
        allowed, first = x[word], word * _WORD
        if allowed == -1:
            continue
        for bit in range(min(_WORD, width - first)):
            own[first + bit] = own[first + bit] if (allowed >> bit) & 1 else _MINUS_INFINITY
