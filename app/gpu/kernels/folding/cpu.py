"""Layers that fold tokens into a state, on a CPU: short convolutions, and matrices that decay and take in what is new.

A row has one token or many; it is folded token by token, from the state that it had before, which is replaced. So its
bits depend neither on its company nor on how its tokens were cut into steps. A prompt's chunks could be products of
matrices instead. But a head's columns, which do not meet, stay in the cache from token to token, and the layer's own
products take twenty times as long.
"""

import math
from typing import Annotated, Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from torch import Tensor

from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.elementwise import exponential, logistic
from app.gpu.kernels.cpu.intrinsics import FLOAT, INT64, Lanes, convert, instruction, widen
from app.gpu.kernels.cpu.launch import draw, parallel
from app.gpu.kernels.folding import NORM_EPS, Convolution, Recurrence, Weights

_CHANNELS = 256
"""That a thread convolves at a time, of all tokens of a row."""
_WIDTHS = (64, 16, 1)
"""Columns of a matrix whose sums are made at a time: as many as leave no unit for multiplication waiting."""
_ONE = np.float32(1)
StateBlocks = Annotated[Tensor, ("state_blocks_stride",), ("states_kept", "blocks_each")]
"""`Batch.state_blocks`, and its sizes."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, batch: Batch, shape: Convolution) -> Tensor:
    """`folding.convolve`."""
    out = torch.empty(len(x), shape.channels, dtype=torch.float32)
    _convolve(
        **_places(batch, x.dtype),
        channels=shape.channels,
        taps=shape.taps,
        first=shape.first // x.element_size(),
        x=x,
        weight=weight,
        bias=bias,
        out=out,
        silu=shape.silu,
    )
    return out


def recur(mixed: Tensor, gates: Tensor, weights: Weights, batch: Batch, shape: Recurrence, z: Tensor) -> Tensor:
    """`folding.recur`."""
    out = torch.empty(len(mixed), shape.heads * shape.values, dtype=z.dtype if shape.delta else torch.float32)
    rates, time_bias, factors = weights
    _recur(
        **_places(batch, torch.float32),
        heads=shape.heads,
        group=shape.heads // shape.key_heads,
        keys=shape.keys,
        values=shape.values,
        width=mixed.shape[1],
        first=shape.first // 4,
        eps=shape.eps,
        scale=shape.keys**-0.5,
        mixed=mixed,
        gates=gates,
        rates=rates,
        time_bias=time_bias,
        factors=factors,
        z=z,
        out=out,
        delta=shape.delta,
    )
    return out


def _places(batch: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """Where each row's tokens and its state of numbers of that type are, as kernels take it."""
    states, blocks = batch.states, batch.state_blocks
    assert states is not None
    blocks = torch.arange(len(states))[:, None, None] if blocks is None else blocks
    where = {"state_rows": len(blocks), "state_bytes": states.stride(0), "state_blocks": blocks}
    tokens = {"state_decodes": batch.decodes, "prompt_starts": batch.prompt_starts}
    return {**where, **tokens, "row_states": states.view(dtype)}


@inlined
def _begin(row: Any, decodes: Any, starts: Any) -> Any:
    """The first token of a row."""
    if starts is None:
        return row
    return row if row <= decodes else decodes + starts[row - decodes]


@inlined
def _count_kept(blocks: Any, kept: Any, each: Any) -> Any:
    """How many states a row keeps."""
    count = 1
    while count < kept and blocks[count * each] >= 0:
        count += 1
    return count


@inlined
def _at(blocks: Any, size: Any, place: Any) -> Any:
    """Where in memory the number is that has this place in a row's state. Its `blocks` have `size` numbers each."""
    return blocks[place // size] * size + place % size


@parallel
def _convolve(
    a: Any,
    state_decodes: int,
    state_rows: int,
    state_bytes: int,
    channels: int,
    taps: int,
    first: int,
    x: Tensor,
    weight: Tensor,
    row_states: Tensor,
    state_blocks: StateBlocks,
    out: Tensor,
    bias: Tensor | None = None,
    prompt_starts: Tensor | None = None,
    *,
    silu: bool,
) -> None:
    """Draw channels of rows until none is left, the longest rows first."""
    parts: Any = -(-channels // _CHANNELS)
    size: Any = state_bytes // row_states.itemsize
    while True:
        item = draw(a)
        if item >= state_rows * parts:
            return
        row: Any = state_rows - 1 - item // parts
        blocks: Any = state_blocks[row * a.state_blocks_stride :]
        at = item % parts * _CHANNELS
        count = min(_CHANNELS, channels - at)
        begin = _begin(row, state_decodes, prompt_starts)
        end = _begin(row + 1, state_decodes, prompt_starts)
        for token in range(begin, end):
            own: Any = out[token * channels + at :]
            for i in range(count):
                own[i] = np.float32(0) if bias is None else widen(bias[at + i])
            for tap in range(taps):
                before = token - taps + 1 + tap
                factor: Any = weight[tap * channels + at :]
                if before < begin:
                    kept: Any = first + (before - begin + taps - 1) * channels + at
                    done = 0
                    while done < count:  # where it goes on in another block
                        part = min(count - done, size - (kept + done) % size)
                        seen: Any = row_states[_at(blocks, size, kept + done) :]
                        for i in range(part):
                            own[done + i] += widen(seen[i]) * widen(factor[done + i])
                        done += part
                else:
                    given: Any = x[before * a.x_stride + at :]
                    for i in range(count):
                        own[i] += widen(given[i]) * widen(factor[i])
            if silu:
                for i in range(count):
                    own[i] = logistic(own[i], own[i])
        kept_states = _count_kept(blocks, a.states_kept, a.blocks_each)
        for later in range(kept_states):  # the newest first: the row began where the oldest is
            kept_in: Any = blocks[(kept_states - 1 - later) * a.blocks_each :]
            for place in range(taps - 1):
                last = end - later - taps + 1 + place
                to: Any = first + place * channels + at
                source: Any = first + (last - begin + taps - 1) * channels + at
                new: Any = x[max(last, begin) * a.x_stride + at :]
                done = 0
                while done < count:
                    part = min(count - done, size - (to + done) % size)
                    target: Any = row_states[_at(kept_in, size, to + done) :]
                    if last < begin:
                        part = min(part, size - (source + done) % size)
                        old: Any = row_states[_at(blocks, size, source + done) :]
                        for i in range(part):
                            target[i] = old[i]
                    else:
                        for i in range(part):
                            target[i] = new[done + i]
                    done += part


def _line(builder: Any, key: Any, values: Any, column: Any, cut: Any, skip: Any) -> Any:
    """Where a column's number of that key is in a matrix, `skip` numbers further on from key `cut` on."""
    beyond = builder.select(builder.icmp_signed(">=", key, cut), skip, INT64(0))
    return builder.add(builder.add(builder.mul(key, values), column), beyond)


def _make_fold(*, delta: bool) -> Any:
    """`fold(state, target, cut, skip, leap, keys, values, key, query, value, out, decay, step, key_scale, factor)`: a
    matrix `[keys, values]` at address `state`, and from key `cut` on so many numbers further on as `skip` says, decays,
    and `step` times the value is added at the key. It is stored at `target`, that of `state` or of other memory, and
    there as `leap` says. What the query reads then goes to `out`, which may be at the address of `value`. All is
    float32.

    With `delta` what was known at the key is first taken from the value. `key_scale` multiplies the key, and `factor`
    the query. Else `factor` times the value is added to what is read, and keys are what they are.
    """

    @instruction(types.void(*[types.int64] * 11, *[types.float32] * 4))
    def fold(
        builder: Any,
        state: Any,
        target: Any,
        cut: Any,
        skip: Any,
        leap: Any,
        keys: Any,
        values: Any,
        key: Any,
        query: Any,
        value: Any,
        out: Any,
        decay: Any,
        step: Any,
        key_scale: Any,
        factor: Any,
    ) -> None:
        done = INT64(0)
        for lanes in _WIDTHS:
            code = Lanes(builder, lanes)
            end = builder.add(done, builder.and_(builder.sub(values, done), INT64(-lanes)))
            shrink, rate, of_key, last = map(code.spread, (decay, step, key_scale, factor))
            with builder.goto_entry_block():
                known, read = (builder.alloca(code.floats) for _ in range(2))
            with cgutils.for_range_slice(builder, done, end, INT64(lanes)) as (column, _):
                if delta:
                    builder.store(code.constant(code.floats, 0.0), known)
                    with cgutils.for_range(builder, keys) as loop:
                        line = code.load(state, FLOAT, _line(builder, loop.index, values, column, cut, skip))
                        here = code.spread(Lanes(builder).load(key, FLOAT, loop.index))
                        builder.store(code.multiply_add(line, here, builder.load(known)), known)
                given = code.load(value, FLOAT, column)
                if delta:
                    there = builder.fmul(builder.fmul(builder.load(known), of_key), shrink)
                    change = builder.fmul(builder.fmul(builder.fsub(given, there), rate), of_key)
                else:
                    change = builder.fmul(given, rate)
                builder.store(code.constant(code.floats, 0.0), read)
                with cgutils.for_range(builder, keys) as loop:
                    at = _line(builder, loop.index, values, column, cut, skip)
                    here, asked = (code.spread(Lanes(builder).load(each, FLOAT, loop.index)) for each in (key, query))
                    line = code.multiply_add(change, here, builder.fmul(code.load(state, FLOAT, at), shrink))
                    code.store(line, target, FLOAT, _line(builder, loop.index, values, column, cut, leap))
                    builder.store(code.multiply_add(line, asked, builder.load(read)), read)
                found = builder.load(read)
                found = builder.fmul(found, last) if delta else code.multiply_add(given, last, found)
                code.store(found, out, FLOAT, column)
            done = end

    return fold


_fold_delta, _fold_scan = _make_fold(delta=True), _make_fold(delta=False)


@inlined
def _inverse_norm(x: Any, width: Any) -> Any:
    squares = np.float32(0)
    for i in range(width):
        squares += x[i] * x[i]
    return _ONE / np.sqrt(squares + np.float32(NORM_EPS))


@inlined
def _softplus(x: Any) -> Any:
    return max(x, np.float32(0)) + np.float32(math.log1p(exponential(-abs(x))))


@parallel
def _recur(
    a: Any,
    state_decodes: int,
    state_rows: int,
    state_bytes: int,
    heads: int,
    group: int,
    keys: int,
    values: int,
    width: int,
    first: int,
    eps: float,
    scale: float,
    mixed: Tensor,
    gates: Tensor,
    rates: Tensor,
    time_bias: Tensor,
    factors: Tensor,
    row_states: Tensor,
    state_blocks: StateBlocks,
    z: Tensor,
    out: Tensor,
    prompt_starts: Tensor | None = None,
    *,
    delta: bool,
) -> None:
    """Draw heads of rows until none is left, the longest rows first. `delta` says which of both recurrences it is."""
    of_keys: Any = heads // group * keys
    of_values: Any = heads * values
    size: Any = state_bytes // 4
    while True:
        item = draw(a)
        if item >= state_rows * heads:
            return
        row: Any = state_rows - 1 - item // heads
        head: Any = item % heads
        blocks: Any = state_blocks[row * a.state_blocks_stride :]
        at: Any = first + head * keys * values
        here = _at(blocks, size, at)
        cut = min(keys, (size - at % size) // values)  # the other keys are in the next block
        skip = _at(blocks, size, at + cut * values) - here - cut * values if cut < keys else 0
        end = _begin(row + 1, state_decodes, prompt_starts)
        kept_first = end - _count_kept(blocks, a.states_kept, a.blocks_each)
        for token in range(_begin(row, state_decodes, prompt_starts), end):
            there, leap = here, skip
            if token > kept_first:
                to: Any = blocks[(token - kept_first) * a.blocks_each :]
                there = _at(to, size, at)
                leap = _at(to, size, at + cut * values) - there - cut * values if cut < keys else 0
            own_at: Any = token * of_values + head * values
            gate: Any = gates[token * a.gates_stride :]
            if delta:
                own: Any = out[own_at:]
                opened: Any = z[token * a.z_stride + head * values :]
                state, target = a.row_states + 4 * here, a.row_states + 4 * there
                query_at: Any = token * width + head // group * keys
                key_at: Any = query_at + of_keys
                value_at: Any = token * width + 2 * of_keys + head * values
                value, key, query = a.mixed + 4 * value_at, a.mixed + 4 * key_at, a.mixed + 4 * query_at
                beta = logistic(_ONE, widen(gate[head]))
                decay = exponential(-rates[head] * _softplus(widen(gate[heads + head]) + widen(time_bias[head])))
                of_key, of_query = _inverse_norm(mixed[key_at:], keys), _inverse_norm(mixed[query_at:], keys) * scale
                scales = decay, beta, of_key, of_query
                _fold_delta(state, target, cut, skip, leap, keys, values, key, query, value, value, *scales)
                found: Any = mixed[value_at:]
                squares = np.float32(0)
                for i in range(values):
                    squares += found[i] * found[i]
                factor = _ONE / np.sqrt(squares / np.float32(values) + eps)
                for i in range(values):
                    gated = logistic(widen(opened[i]), widen(opened[i]))
                    own[i] = convert(found[i] * factor * widen(factors[i]) * gated, own[i])
            else:
                value_at = token * width + head * values
                key_at = token * width + of_values + head // group * keys
                step = _softplus(widen(gate[head]) + widen(time_bias[head]))
                _fold_scan(  # in another order LLVM rounds the decay in another way
                    a.row_states + 4 * here,
                    a.row_states + 4 * there,
                    cut,
                    skip,
                    leap,
                    keys,
                    values,
                    a.mixed + 4 * key_at,
                    a.mixed + 4 * (key_at + heads // group * keys),
                    a.mixed + 4 * value_at,
                    a.out + 4 * own_at,
                    exponential(-rates[head] * step),
                    step,
                    _ONE,
                    widen(factors[head]),
                )
                own = out[own_at:]
                opened = z[token * a.z_stride + head * values :]
                for i in range(values):
                    own[i] *= logistic(widen(opened[i]), widen(opened[i]))
            here, skip = there, leap
