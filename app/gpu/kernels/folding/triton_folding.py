"""Layers that fold tokens into a state, on a GPU. See `kernels.folding`.

A program has one part of a row to itself, and goes from token to token: the state of a head stays in registers. A long
prompt takes as many turns as it has tokens. What a row keeps beside is stored on the way.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.folding import NORM_EPS, Convolution, Recurrence, Weights

CHANNELS = 256
"""That one program convolves."""
LARGE, MORE_WARPS, WARPS = 8192, 8, 4
"""Matrices of that many numbers have more warps."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, batch: Batch, shape: Convolution) -> Tensor:
    """`folding.convolve`, some channels of a row in each program."""
    out = torch.empty(len(x), shape.channels, dtype=torch.float32, device=x.device)
    words, rows, most_kept, *where = _places(batch, x.dtype)
    with torch.cuda.device_of(x):
        _convolve[(rows, triton.cdiv(shape.channels, CHANNELS))](
            *(x, weight, bias, words, *where, out, batch.decodes),
            *(x.stride(0), words.stride(0), shape.first // x.element_size()),
            most_kept=most_kept,
            channels=shape.channels,
            taps=shape.taps,
            silu=shape.silu,
            tile=CHANNELS,
        )
    return out


def recur(mixed: Tensor, gates: Tensor, weights: Weights, batch: Batch, shape: Recurrence, z: Tensor) -> Tensor:
    """`folding.recur`, a head of a row in each program."""
    dtype = z.dtype if shape.delta else torch.float32
    out = torch.empty(len(mixed), shape.heads * shape.values, dtype=dtype, device=z.device)
    words, rows, most_kept, *where = _places(batch, torch.float32)
    with torch.cuda.device_of(mixed):
        _recur[(rows, shape.heads)](
            *(mixed, gates, *weights, words, *where, z, out, batch.decodes),
            *(gates.stride(0), words.stride(0), z.stride(0), shape.first // 4),
            *(shape.eps, NORM_EPS, shape.keys**-0.5),
            delta=shape.delta,
            most_kept=most_kept,
            heads=shape.heads,
            group=shape.heads // shape.key_heads,
            keys=shape.keys,
            values=shape.values,
            tile_keys=triton.next_power_of_2(shape.keys),
            tile_values=triton.next_power_of_2(shape.values),
            num_warps=MORE_WARPS if shape.keys * shape.values >= LARGE else WARPS,
        )
    return out


def _places(batch: Batch, dtype: torch.dtype) -> tuple[Any, ...]:
    """The states as numbers of that type, of how many rows they are, how many each row keeps at most, and where its
    tokens and its states are.
    """
    assert batch.states is not None
    words, kept = batch.states.view(dtype), batch.state_blocks
    starts = batch.contexts if batch.prompt_starts is None else batch.prompt_starts
    return (words, len(words), 1, starts, starts) if kept is None else (words, len(kept), kept.shape[1], starts, kept)


@triton.jit
def _begin(row: tl.tensor, decodes: tl.tensor, starts: tl.tensor) -> tl.tensor:
    """The first token of a row."""
    return tl.where(row <= decodes, row, decodes + tl.load(starts + row - decodes, mask=row > decodes, other=0))


@triton.jit
def _place(row: tl.tensor, kept: tl.tensor, number: tl.tensor, most_kept: tl.constexpr) -> tl.tensor:
    """Where the state of that number is which a row keeps; negative: it keeps fewer."""
    # One branch is compiled. With a `return` in each both were, and they have other types.
    return row.to(tl.int64) if most_kept == 1 else tl.load(kept + row * most_kept + number)


@triton.jit
def _count_kept(row: tl.tensor, kept: tl.tensor, most_kept: tl.constexpr) -> tl.tensor:
    """How many states a row keeps."""
    count = row - row + 1
    for number in tl.static_range(1, most_kept):
        count += (_place(row, kept, number, most_kept) >= 0).to(tl.int32)
    return count


@triton.jit(do_not_specialize=["decodes"])
def _convolve(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    starts: tl.tensor,
    kept: tl.tensor,
    out: tl.tensor,
    decodes: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    first: tl.tensor,
    most_kept: tl.constexpr,
    channels: tl.constexpr,
    taps: tl.constexpr,
    silu: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """One program has `tile` channels of one row."""
    row = tl.program_id(0)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    real = at < channels
    begin, end = _begin(row, decodes, starts), _begin(row + 1, decodes, starts)
    state = states + _place(row, kept, 0, most_kept) * state_stride + first + at
    inputs = x + begin.to(tl.int64) * x_stride + at
    outputs = out + begin.to(tl.int64) * channels + at
    for token in range(end - begin):
        total = tl.zeros([tile], tl.float32)
        if bias is not None:
            total = tl.load(bias + at, mask=real, other=0.0).to(tl.float32)
        for tap in tl.static_range(taps):
            before = token - taps + 1 + tap  # from the row's first token on; of what is loaded one part is 0
            old = tl.load(state + (before + taps - 1) * channels, mask=real & (before < 0), other=0.0)
            new = tl.load(inputs + before * x_stride, mask=real & (before >= 0), other=0.0)
            factor = tl.load(weight + tap * channels + at, mask=real, other=0.0).to(tl.float32)
            total += (old + new).to(tl.float32) * factor
        if silu:
            total = total / (1 + tl.exp(-total))
        tl.store(outputs + token * channels, total, mask=real)
    count = _count_kept(row, kept, most_kept)
    for later in range(count):  # the newest first: the row began where the oldest is
        target = states + _place(row, kept, count - 1 - later, most_kept) * state_stride + first + at
        for place in tl.static_range(taps - 1):
            last = end - begin - later - taps + 1 + place
            old = tl.load(state + (last + taps - 1) * channels, mask=real & (last < 0), other=0.0)
            new = tl.load(inputs + last * x_stride, mask=real & (last >= 0), other=0.0)
            tl.store(target + place * channels, old + new, mask=real)


@triton.jit(do_not_specialize=["decodes"])
def _recur(
    mixed: tl.tensor,
    gates: tl.tensor,
    rates: tl.tensor,
    time_bias: tl.tensor,
    factors: tl.tensor,
    states: tl.tensor,
    starts: tl.tensor,
    kept: tl.tensor,
    z: tl.tensor,
    out: tl.tensor,
    decodes: tl.tensor,
    gate_stride: tl.tensor,
    state_stride: tl.tensor,
    z_stride: tl.tensor,
    first: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    scale: tl.tensor,
    delta: tl.constexpr,
    most_kept: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_values: tl.constexpr,
) -> None:
    """One program has one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    key_at, value_at = tl.arange(0, tile_keys), tl.arange(0, tile_values)
    key_real, value_real = key_at < keys, value_at < values
    states += first + head * keys * values + key_at[:, None] * values + value_at[None, :]
    real = key_real[:, None] & value_real[None, :]
    here = states + _place(row, kept, 0, most_kept) * state_stride
    state = tl.load(here, mask=real, other=0.0)
    rate, later = tl.load(rates + head), tl.load(time_bias + head).to(tl.float32)
    if delta:
        factor = tl.load(factors + value_at, mask=value_real, other=0.0).to(tl.float32)
    else:
        factor = tl.load(factors + head).to(tl.float32)
    of_keys: tl.constexpr = heads // group * keys
    of_values: tl.constexpr = heads * values
    first_query: tl.constexpr = 0 if delta else of_values + of_keys
    first_key: tl.constexpr = of_keys if delta else of_values
    first_value: tl.constexpr = 2 * of_keys if delta else 0
    begin, end = _begin(row, decodes, starts), _begin(row + 1, decodes, starts)
    oldest = end - begin - _count_kept(row, kept, most_kept)
    mixed += begin.to(tl.int64) * (2 * of_keys + of_values)
    gates += begin.to(tl.int64) * gate_stride + head
    z += begin.to(tl.int64) * z_stride + head * values + value_at
    out += (begin.to(tl.int64) * heads + head) * values + value_at
    for token in range(end - begin):
        given = mixed + token * (2 * of_keys + of_values)
        query = tl.load(given + first_query + head // group * keys + key_at, mask=key_real, other=0.0)
        key = tl.load(given + first_key + head // group * keys + key_at, mask=key_real, other=0.0)
        value = tl.load(given + first_value + head * values + value_at, mask=value_real, other=0.0)
        gate = gates + token * gate_stride
        if delta:
            query = query / tl.sqrt(tl.sum(query * query, 0) + norm_eps) * scale
            key = key / tl.sqrt(tl.sum(key * key, 0) + norm_eps)
            beta = 1 / (1 + tl.exp(-tl.load(gate).to(tl.float32)))
        time = tl.load(gate + heads if delta else gate).to(tl.float32) + later
        step = tl.maximum(time, 0.0) + tl.log(1 + tl.exp(-tl.abs(time)))
        state = state * tl.exp(-rate * step)
        if delta:
            state += key[:, None] * ((value - tl.sum(state * key[:, None], 0)) * beta)[None, :]
            found = tl.sum(state * query[:, None], 0)
            found = found / tl.sqrt(tl.sum(found * found, 0) / values + eps) * factor
        else:
            state += key[:, None] * (value * step)[None, :]
            found = tl.sum(state * query[:, None], 0) + factor * value
        opened = tl.load(z + token * z_stride, mask=value_real, other=0.0).to(tl.float32)
        found = found * opened / (1 + tl.exp(-opened))
        tl.store(out + token * of_values, found.to(out.dtype.element_ty), mask=value_real)
        if most_kept > 1:
            place = _place(row, kept, tl.maximum(token - oldest, 0), most_kept)
            tl.store(states + place * state_stride, state, mask=real & (token >= oldest))
    if most_kept == 1:
        tl.store(here, state, mask=real)
