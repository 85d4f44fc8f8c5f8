"""A Triton kernel: attention of the newest tokens of sequences over their paged keys and values, read where they are.

A program takes one tile of queries of one kv head: the heads of its group for as many neighbouring tokens as fill
`tile_rows`, so that a tile of keys is read once for all of them. It walks the keys in tiles with an online softmax
(Milakov and Gimelshein, arXiv:1805.02867). A grid too small for the device is enlarged by splitting every sequence's
keys; `merge` then joins the parts (Dao et al., "Flash-Decoding for long-context inference", 2023).

Tiles of keys start at multiples of `tile_keys` from the sequence's first token, whichever queries share the program. A
tile that a query sees nothing of leaves that query's state as it is, to the bit. So, unsplit and with the same
`tile_rows`, the result of a query depends on nothing but itself and the keys and values that it sees.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec
from app.gpu.kernels.attention.pool_rows import FLOAT8
from app.gpu.kernels.attention.triton_merge import Parts, merge
from app.gpu.kernels.linear.cuda.triton_rounding import decode

LEAST_ROWS = 16
"""Rows and columns below which `tl.dot` does not go."""
KEY_TILE_BYTES, SMALL_KEY_TILE_BYTES = 16 * 1024, 8 * 1024
"""Of one tile of keys, and of one of values. The latter where registers would be spilled otherwise: in float32, whose
products have no tensor cores, and beside `TALL_ROWS` queries or more. As compiled for Hopper, three programs of decode
rows or more share a multiprocessor.
"""
TALL_ROWS = 64
STAGES, TALL_STAGES = 2, 3
"""Tiles of keys in flight. On an H200 two are up to 4 % faster than three for decode rows, whose programs are then more
at a time; tall ones were not timed.
"""
MOST_KEYS = 128
"""In a tile, however small the head."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Sequences:
    """`length` neighbouring queries each, the newest of their sequences; the keys are in the pool already.

    query: `[sequences * length, heads, head_dim]`, the last axis dense. tables: `[sequences, max_blocks]` int32.
    contexts: `[sequences]` int32, keys including the queries' own; 0 for a padding row, with `length` 1.
    """

    query: Tensor
    tables: Tensor
    contexts: Tensor
    length: int


def attend(sequences: Sequences, kv: Tensor, spec: AttentionSpec, output: Tensor, *, rows: int, splits: int) -> None:
    """Write `[sequences * length, heads, head_dim]`, contiguous, to `output`; zeros where the context is 0.

    kv: one layer of the pool, see `Attention`; it is widened to the dtype of the queries. `rows` is the least height of
    a tile, a power of two; `splits` the parts that each sequence's keys are cut into, at most `MAX_SPLITS`.
    """
    query, length = sequences.query, sequences.length
    tokens, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = kv.shape
    block_stride, value_offset, head_stride, *_ = kv.stride()
    group = heads // kv_heads
    tile_rows = max(rows, LEAST_ROWS, triton.next_power_of_2(group))
    tile_dims = max(LEAST_ROWS, triton.next_power_of_2(head_dim))
    tiles = sequences.contexts.shape[0] * triton.cdiv(length, tile_rows // group)
    scaled = kv.dtype is FLOAT8
    parts = Parts.empty(tokens, heads, splits, head_dim, query.device) if splits > 1 else None
    _attend[(tiles, kv_heads, splits)](
        query,
        kv.view(torch.uint8) if scaled else kv,
        kv.view(torch.float32) if scaled else None,
        sequences.tables,
        sequences.contexts,
        output,
        *((parts.sums, parts.peaks, parts.totals) if parts else (None, None, None)),
        length,
        *query.stride()[:2],
        sequences.tables.stride(0),
        block_stride,
        value_offset,
        head_stride,
        spec.scale,
        spec.softcap or 1.0,
        capped=spec.softcap is not None,
        window=spec.window or 0,
        split=splits > 1,
        group=group,
        head_dim=head_dim,
        columns=kv.shape[4],
        scaled=scaled,
        block_size=block_size,
        tile_rows=tile_rows,
        tile_keys=_tile_keys(tile_rows, tile_dims, query.element_size()),
        tile_dims=tile_dims,
        num_warps=4,
        num_stages=TALL_STAGES if tile_rows >= TALL_ROWS else STAGES,
    )
    if parts:
        merge(parts, output)


def _tile_keys(tile_rows: int, tile_dims: int, element_bytes: int) -> int:
    is_small = element_bytes == 4 or tile_rows >= TALL_ROWS
    tile_bytes = SMALL_KEY_TILE_BYTES if is_small else KEY_TILE_BYTES
    return max(LEAST_ROWS, min(MOST_KEYS, tile_bytes // (tile_dims * element_bytes)))


@triton.jit(do_not_specialize=["length", "table_stride"], do_not_specialize_on_alignment=["tables", "contexts"])
def _attend(
    query: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    output: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    length: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    value_offset: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    capped: tl.constexpr,
    window: tl.constexpr,
    split: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    scaled: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_dims: tl.constexpr,
) -> None:
    """One program: a tile of queries (axis 0), the query heads of one kv head (axis 1), one split of the keys (axis 2).

    Row `r` of the tile is head `r % group` of the group, of token `r // group` of the tile.
    """
    tile_tokens: tl.constexpr = tile_rows // group
    tiles = tl.cdiv(length, tile_tokens)
    sequence = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * tile_tokens
    context = tl.load(contexts + sequence)
    row = tl.arange(0, tile_rows)
    token = first + row // group
    real = (row < tile_tokens * group) & (token < length)
    head = tl.program_id(1) * group + row % group
    dim = tl.arange(0, tile_dims)
    in_tile = real[:, None] & (dim < head_dim)[None, :]
    packed = sequence.to(tl.int64) * length + token
    query_at = query + packed * query_stride + head * query_head_stride
    queries = tl.load(query_at[:, None] + dim[None, :], mask=in_tile, other=0.0)

    position = context - length + token
    end = tl.minimum(context - length + first + tile_tokens, context)
    begin = tl.maximum(context - length + first + 1 - window, 0) // tile_keys if window else 0
    count = tl.cdiv(tl.cdiv(end, tile_keys) - begin, tl.num_programs(2))
    lowest = begin + tl.program_id(2) * count
    highest = tl.minimum(lowest + count, tl.cdiv(end, tile_keys))
    head_at = tl.program_id(1) * head_stride
    table = tables + sequence * table_stride
    peak = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    sum_ = tl.zeros([tile_rows, tile_dims], tl.float32)
    for tile in range(lowest, highest):
        key = tile * tile_keys + tl.arange(0, tile_keys)
        block = tl.load(table + key // block_size, mask=key < end, other=0)
        at = head_at + block.to(tl.int64) * block_stride + key % block_size * columns
        keys = _load_tile(pool, scales, at, key < end, dim, head_dim, scaled).to(queries.dtype)
        values = _load_tile(pool, scales, at + value_offset, key < end, dim, head_dim, scaled).to(queries.dtype)
        scores = _scores(queries, keys, scale, softcap, capped)
        seen = key[None, :] <= position[:, None]
        if window:
            seen &= key[None, :] > position[:, None] - window
        peak, total, sum_ = _fold(tl.where(seen, scores, float("-inf")), values, peak, total, sum_)

    at = packed * tl.num_programs(1) * group + head
    if split:
        at = at * tl.num_programs(2) + tl.program_id(2)
        tl.store(peaks + at, peak, mask=real)
        tl.store(totals + at, total, mask=real)
        in_tile &= (total != 0)[:, None]
        tl.store(sums + at[:, None] * head_dim + dim[None, :], sum_, mask=in_tile)
    else:
        attended = sum_ / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(output + at[:, None] * head_dim + dim[None, :], attended, mask=in_tile)


@triton.jit
def _load_tile(
    pool: tl.tensor,
    scales: tl.tensor,
    at: tl.tensor,
    in_context: tl.tensor,
    dim: tl.tensor,
    head_dim: tl.constexpr,
    scaled: tl.constexpr,
) -> tl.tensor:
    """The rows that begin at `at`, `[tile_keys, tile_dims]`; zeros where not `in_context`."""
    mask = in_context[:, None] & (dim < head_dim)[None, :]
    rows = tl.load(pool + at[:, None] + dim[None, :], mask=mask, other=0)
    if scaled:
        scale = tl.load(scales + (at + head_dim) // 4, mask=in_context, other=0.0)
        rows = decode(rows) * scale[:, None]
    return rows


@triton.jit
def _scores(
    queries: tl.tensor, keys: tl.tensor, scale: tl.tensor, softcap: tl.tensor, capped: tl.constexpr
) -> tl.tensor:
    """`[tile_rows, tile_keys]` in units of log 2, so that the weights are powers of 2."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if capped:  # softcap * tanh(scores / softcap)
        shrunk = tl.exp2(tl.abs(scores) * (-2 * _LOG2_E / softcap))
        capped_at = softcap * (1 - shrunk) / (1 + shrunk)
        scores = tl.where(scores < 0, -capped_at, capped_at)
    return scores * _LOG2_E


@triton.jit
def _fold(
    scores: tl.tensor, values: tl.tensor, peak: tl.tensor, total: tl.tensor, sum_: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax. A row of scores that are all -inf changes nothing of its state."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(peak - finite)
    sum_ = tl.dot(weights.to(values.dtype), values, sum_ * shrink[:, None], input_precision="ieee")
    return new_peak, total * shrink + tl.sum(weights, 1), sum_
