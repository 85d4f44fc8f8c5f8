"""Attention of CPUs over the pool: single queries and short chunks attend in one kernel, prompts in another."""

import sys
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.gpu.kernels.attention.base import FLOAT8, AttentionSpec, Batch
from app.gpu.kernels.attention.cpu.prompts import attend_prompts
from app.gpu.kernels.attention.cpu.queries import PoolLayer, attend_queries
from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.elementwise import rounded
from app.gpu.kernels.cpu.intrinsics import convert, widen
from app.gpu.kernels.cpu.launch import draw, parallel
from app.gpu.kernels.linear import encodings

PAGED_TOKENS = 8
"""Most tokens of a row that attend one by one, with the bits of single ones. Chosen before prompts had a kernel."""
_CHUNK_ELEMENTS = 8192
_MAGNITUDE, _ROUNDER = np.int32(encodings.MAGNITUDE), np.float32(encodings.ROUNDER)


def attend_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv: Tensor,
    batch: Batch,
    spec: AttentionSpec,
    *,
    batch_invariant: bool = False,
    in_bfloat16: bool = False,
) -> Tensor:
    """An `Attention`. Both kernels compute in float32, over keys and values as the pool has rounded them, those of the
    batch included. Queries of a half type are widened, and what they get is rounded once.

    `in_bfloat16`: what prompts multiply is rounded to bfloat16, and summed in float32.
    `batch_invariant`: prompts attend one query at a time too, in float32, which is slower.
    """
    most = sys.maxsize if batch_invariant else PAGED_TOKENS
    key, value, wide = dense_heads(key), dense_heads(value), dense_heads(query)
    store(key, value, kv, batch.slot_blocks, batch.slot_offsets)
    if query.dtype is not torch.float32:
        wide = rounded(wide, torch.float32)
    output = torch.empty(query.shape, dtype=torch.float32)
    short = count_short(batch, most)
    first = batch.rows[short].start if short < len(batch.rows) else len(query)
    if first:
        tables = token_tables(batch, short)
        attend_queries(wide[:first], kv, tables, batch.positions[:first], spec, output[:first])
    prompts = list[int]()
    for index, row in enumerate(batch.rows[short:], short):
        tokens = slice(row.start, row.start + row.length)
        if row.length <= most:
            tables = batch.block_tables[index].expand(row.length, -1)
            attend_queries(wide[tokens], kv, tables, batch.positions[tokens], spec, output[tokens])
        else:
            prompts.append(index)
    if prompts:
        attend_prompts(wide, kv, batch, prompts, spec, output, in_bfloat16=in_bfloat16)
    return output if query.dtype is torch.float32 else rounded(output, query.dtype)


def count_short(batch: Batch, most: int = PAGED_TOKENS) -> int:
    """How many of the first rows have at most so many tokens. None after them has one token, few have few."""
    return sum(1 for _ in takewhile(lambda row: row.length <= most, batch.rows))


def token_tables(batch: Batch, rows: int) -> Tensor:
    """The block table of each token of the first `rows` rows, `[tokens, blocks]` int32."""
    if batch.decodes >= rows:
        return batch.block_tables[:rows] if batch.rows else batch.block_tables
    lengths = torch.tensor([row.length for row in batch.rows[:rows]])
    return batch.block_tables[:rows].repeat_interleave(lengths, dim=0)


def dense_heads(x: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]`, copied only if the heads of a token are not one run of memory."""
    _, head, element = x.stride()
    return x if (head, element) == (x.shape[2], 1) else x.contiguous()


def store(key: Tensor, value: Tensor, kv: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Write token `i` of `key` and `value`, `[tokens, kv_heads, head_dim]` each with dense heads, to place `offsets[i]`
    of block `blocks[i]`, `[tokens]` int64 each, of a layer of the pool, as `Attention` says. All places differ.
    """
    tokens, kv_heads, head_dim = key.shape
    chunk = max(1, _CHUNK_ELEMENTS // (kv_heads * head_dim))
    slots, write = {"blocks": blocks, "offsets": offsets}, _round_to_float8 if kv.dtype is FLOAT8 else _convert
    _store(tokens=tokens, chunk=chunk, head_dim=head_dim, key=key, value=value, pool=kv, **slots, write=write)


@parallel
def _store(
    a: Any,
    tokens: int,
    chunk: int,
    head_dim: int,
    key: Tensor,
    value: Tensor,
    pool: PoolLayer,
    blocks: Tensor,
    offsets: Tensor,
    *,
    write: Any,
) -> None:
    """Draw chunks of tokens until none is left."""
    while True:
        first = draw(a) * chunk
        if first >= tokens:
            return
        for token in range(first, min(first + chunk, tokens)):
            slot = blocks[token] * a.block_stride + offsets[token] * a.columns
            for head in range(a.kv_heads):
                to, at = slot + head * a.head_stride, head * head_dim
                write(key[token * a.key_stride + at :], pool[to:], head_dim)
                write(value[token * a.value_stride + at :], pool[to + a.value_offset :], head_dim)


@inlined
def _convert(states: Any, row: Any, count: int) -> None:
    """Write `count` numbers to `row`."""
    for i in range(count):
        row[i] = convert(states[i], row[i])


@inlined
def _round_to_float8(states: Any, row: Any, count: int) -> None:
    """Write `count` numbers and their scale to `row`. Bits and powers of two: fast mathematics change nothing."""
    peak: Any = np.int32(0)
    for i in range(count):
        peak = max(peak, np.float32(widen(states[i])).view(np.int32) & _MAGNITUDE)
    bits = max((peak + encodings.ABOVE_448) & encodings.EXPONENT, encodings.LEAST_PEAK) - encodings.SHIFT
    bits = bits if peak < encodings.INFINITE else encodings.NOT_A_NUMBER
    inverse = np.int32(encodings.TWO_POWERS - bits).view(np.float32)
    for i in range(count):
        row[i] = _encode(widen(states[i]) * inverse)
    for i in range(4):
        row[count + i] = (bits >> 8 * i) & 0xFF


@inlined
def _encode(scaled: Any) -> Any:
    """The code of a float32 between -448 and 448, to nearest even: see `triton_matmul.encode`."""
    bits = np.float32(scaled).view(np.int32)
    size = bits & _MAGNITUDE
    small = np.float32(abs(scaled) + _ROUNDER).view(np.int32) - encodings.ROUNDER_BITS
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    code: Any = small if size < encodings.LEAST_NORMAL else normal
    return np.uint8(min(code, encodings.MAX_CODE) | ((bits >> 24) & 0x80))
