"""A kernel of CPUs: attention of single queries over paged keys and values, read where they are.

The keys of a query are cut into splits of `SPLIT` tokens; a work item is one split of one query, for all heads. It
walks its blocks once, in tiles of `TILE` tokens, with an online softmax (Milakov and Gimelshein, arXiv:1805.02867); the
thread that finishes a query's last split merges them (flash-decoding). Threads draw items from an atomic counter, and
the cuts depend only on the query's own context: so does its result, to the bit, on any number of threads.

Blocks of one sequence lie anywhere in the pool, which defeats the hardware prefetcher: the kernel asks for the next
tile's cache lines while it computes on this one. That alone is worth a factor of 1.6 to 1.8.
"""

from functools import cache
from typing import Annotated, Any

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec
from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.intrinsics import (
    CACHE_LINE,
    LEAST_EXPONENT,
    LOG2_E,
    exp2,
    fetch_add,
    pointer,
    prefetch,
    scale_of,
    widen,
)
from app.gpu.kernels.cpu.launch import draw, parallel
from app.gpu.kernels.cpu.tiles import LOWEST

SPLIT = 256
"""Tokens in one work item: enough to pay for the merge, few enough to spread one long context over the cores."""
PADDING = 16
"""Floats after each head's accumulator in the workspace: its peak, its total, and the rest of a cache line."""
TILE = 16
"""Tokens whose scores are computed before they are weighed."""
NO_WINDOW = 1 << 40
"""More keys than any query sees."""
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)


PoolLayer = Annotated[Tensor, ("block_stride", "value_offset", "head_stride"), ("kv_heads", "block_size", "columns")]
"""One layer's `[blocks, 2, kv_heads, block_size, columns]`, for a kernel's signature; see `parallel`."""
Queries = Annotated[Tensor, ("query_stride",), ("heads", "head_dim")]
"""`[tokens, heads, head_dim]` float32, of which the heads of a token are one run of memory."""


def attend_queries(
    query: Tensor, kv: Tensor, tables: Tensor, positions: Tensor, spec: AttentionSpec, output: Tensor
) -> None:
    """Attend with `Queries` at `positions`, `[queries]` int64, over blocks of `tables` `[queries, blocks]` int32 of a
    `PoolLayer`, which has the queries' own keys and values. `output`: as `query`, dense.
    """
    queries, heads, head_dim = query.shape
    splits = -(-min(tables.shape[1] * kv.shape[3], spec.window or NO_WINDOW) // SPLIT)
    _attend(
        **common_arguments(query, kv, tables, spec, output),
        queries=queries,
        positions=positions,
        workspace=torch.empty(queries * splits * heads * (head_dim + PADDING)),
        finished=torch.zeros(queries, dtype=torch.int64),
        columns=kv.shape[4],
    )


def common_arguments(query: Tensor, kv: Tensor, tables: Tensor, spec: AttentionSpec, output: Tensor) -> dict[str, Any]:
    """What both kernels take. `window` is at least 1, `softcap` 0 is off."""
    return {
        "query": query,
        "output": output,
        "pool": kv,
        "tables": tables,
        "sinks": _no_sinks(query.shape[1]) if spec.sinks is None else spec.sinks,
        "window": spec.window or NO_WINDOW,
        "scale": spec.scale,
        "softcap": spec.softcap or 0.0,
        "head_dim": query.shape[2],
    }


@cache
def _no_sinks(heads: int) -> Tensor:
    """Sinks, `[heads]` float32, that change no bit of any result."""
    return torch.full((heads,), float(LOWEST))


@parallel
def _attend(
    a: Any,
    queries: int,
    window: int,
    query: Queries,
    pool: PoolLayer,
    tables: Tensor,
    positions: Tensor,
    workspace: Tensor,
    finished: Tensor,
    output: Tensor,
    sinks: Tensor,
    scale: float,
    softcap: float,
    *,
    head_dim: int,
    columns: int,
) -> None:
    """Draw work items until none is left. tables: stride 0: one for all. workspace: `[queries, splits, heads, head_dim
    + PADDING]`, for as many splits as the longest context has at least. finished: `[queries]` zeros, which stay so.
    """
    heads = a.heads
    splits = 1
    for row in range(queries):
        splits = max(splits, _splits(positions[row] + 1, window))
    states = carray(pointer(a.workspace), (queries, splits, heads, head_dim + PADDING), np.float32)
    outputs = carray(pointer(a.output), (queries, heads, head_dim), np.float32)
    scaled = np.empty((heads, head_dim), np.float32)
    scores = np.empty(TILE, np.float32)
    factor = query_scale(scale, softcap)
    while True:
        item = draw(a)
        if item >= queries * splits:
            break
        row, split = item % queries, item // queries  # queries of one context find its split in the cache
        context = positions[row] + 1
        oldest = max(0, context - window)
        first = oldest + split * SPLIT
        if first >= context:
            continue
        end = min(first + SPLIT, context)
        table = tables[row * a.tables_stride :]
        for head in range(heads):
            for i in range(head_dim):
                scaled[head, i] = query[row * a.query_stride + head * head_dim + i] * factor
        _attend_split(a, pool, table, first, end, scaled, scores, states[row, split], head_dim, columns)
        own_splits = _splits(context, window)
        if fetch_add(a.finished + row * 8, 1) == own_splits - 1:
            _merge(states[row], own_splits, sinks, outputs[row], head_dim)
            finished[row] = 0


@inlined
def query_scale(scale: Any, softcap: Any) -> Any:
    """What a query is multiplied by, so that `bounded` takes its scores."""
    return scale * LOG2_E if softcap == 0 else scale / softcap


@inlined
def sink_score(sinks: Any, head: int) -> Any:
    """A head's sink in units of log 2, as scores are."""
    return max(sinks[head] * LOG2_E, LOWEST)


@inlined
def bounded(score: Any, softcap: Any) -> Any:
    """`softcap * tanh(score)` as a power of 2, or the score as it is if there is no cap."""
    if softcap == 0:
        return score
    power = min(max(TWO * LOG2_E * score, LEAST_EXPONENT), -LEAST_EXPONENT)
    return softcap * LOG2_E * (ONE - TWO / (ONE + exp2(power)))


@inlined
def _splits(context: Any, window: int) -> Any:
    return -(-min(context, window) // SPLIT)


@inlined
def _attend_split(
    a: Any,
    pool: Any,
    table: Any,
    first: int,
    end: int,
    query: Any,
    scores: Any,
    state: Any,
    head_dim: int,
    columns: int,
) -> None:
    """Attend over the keys at positions `[first, end)`; leaves each head's accumulator, peak and total in `state`."""
    for head in range(a.heads):
        for i in range(head_dim + 2):
            state[head, i] = ZERO
        state[head, head_dim] = LOWEST
    position, group = first, a.heads // a.kv_heads
    while position < end:
        offset = position % a.block_size
        count = min(min(a.block_size - offset, TILE), end - position)
        at = table[position // a.block_size] * a.block_stride + offset * columns
        following = min(position + count, end - 1)
        ahead = table[following // a.block_size] * a.block_stride + following % a.block_size * columns
        for head in range(a.heads):
            keys = head // group * a.head_stride
            values = keys + a.value_offset
            # Each query head of a group asks for its share of the next tile: in one burst they would stall the core.
            part = head % group
            share = part * count // group * columns
            length = (part + 1) * count // group * columns - share
            own = state[head]
            _prefetch_run(pool, ahead + keys + share, length)
            tile_peak = _score(query[head], pool[at + keys :], count, a.softcap, scores, head_dim, columns)
            _prefetch_run(pool, ahead + values + share, length)
            peak = max(own[head_dim], tile_peak)
            if peak > own[head_dim]:
                shrink = exp2(max(own[head_dim] - peak, LEAST_EXPONENT))
                for i in range(head_dim):
                    own[i] *= shrink
                own[head_dim] = peak
                own[head_dim + 1] *= shrink
            total = ZERO
            for token in range(TILE):  # scores become weights
                scores[token] = exp2(max(scores[token] - peak, LEAST_EXPONENT))
                total += scores[token]
            own[head_dim + 1] += total
            _weigh(scores, pool[at + values :], count, own, head_dim, columns)
        position += count


@inlined
def _prefetch_run(pool: Any, start: int, length: int) -> None:
    for i in range(0, length, CACHE_LINE // pool.itemsize):
        prefetch(pool, start + i)


@inlined
def _score(query: Any, keys: Any, count: int, softcap: Any, scores: Any, head_dim: int, columns: int) -> Any:
    """Scores of a tile's `count` keys; the rest of `scores` becomes `LOWEST`. Returns the peak."""
    peak = LOWEST
    whole = count - count % 4
    for token in range(0, whole, 4):  # four at a time share each load of the query
        a = b = c = d = ZERO
        four = keys[token * columns :]
        for i in range(head_dim):
            a += query[i] * widen(four[i])
            b += query[i] * widen(four[columns + i])
            c += query[i] * widen(four[2 * columns + i])
            d += query[i] * widen(four[3 * columns + i])
        a, b = a * scale_of(four, head_dim), b * scale_of(four, columns + head_dim)
        c, d = c * scale_of(four, 2 * columns + head_dim), d * scale_of(four, 3 * columns + head_dim)
        a, b, c, d = bounded(a, softcap), bounded(b, softcap), bounded(c, softcap), bounded(d, softcap)
        scores[token], scores[token + 1], scores[token + 2], scores[token + 3] = a, b, c, d
        peak = max(peak, max(max(a, b), max(c, d)))
    for token in range(whole, count):
        a = ZERO
        one = keys[token * columns :]
        for i in range(head_dim):
            a += query[i] * widen(one[i])
        scores[token] = bounded(a * scale_of(one, head_dim), softcap)
        peak = max(peak, scores[token])
    for token in range(count, TILE):
        scores[token] = LOWEST
    return peak


@inlined
def _weigh(weights: Any, values: Any, count: int, output: Any, head_dim: int, columns: int) -> None:
    """Add the weighted values of a tile's `count` tokens to `output`."""
    whole = count - count % 4
    for token in range(0, whole, 4):  # four at a time share each load and store of the output
        four = values[token * columns :]
        a, b = weights[token] * scale_of(four, head_dim), weights[token + 1] * scale_of(four, columns + head_dim)
        c = weights[token + 2] * scale_of(four, 2 * columns + head_dim)
        d = weights[token + 3] * scale_of(four, 3 * columns + head_dim)
        for i in range(head_dim):
            ab = a * widen(four[i]) + b * widen(four[columns + i])
            cd = c * widen(four[2 * columns + i]) + d * widen(four[3 * columns + i])
            output[i] += ab + cd
    for token in range(whole, count):
        one = values[token * columns :]
        weight = weights[token] * scale_of(one, head_dim)
        for i in range(head_dim):
            output[i] += weight * widen(one[i])


@inlined
def _merge(states: Any, splits: int, sinks: Any, output: Any, head_dim: int) -> None:
    """Join the splits of one query, `[splits, heads, head_dim + PADDING]`, into `[heads, head_dim]`."""
    for head in range(output.shape[0]):
        sink = sink_score(sinks, head)
        peak = sink
        for split in range(splits):
            peak = max(peak, states[split, head, head_dim])
        total = exp2(max(sink - peak, LEAST_EXPONENT))
        for i in range(head_dim):
            output[head, i] = ZERO
        for split in range(splits):
            factor = exp2(max(states[split, head, head_dim] - peak, LEAST_EXPONENT))
            total += factor * states[split, head, head_dim + 1]
            for i in range(head_dim):
                output[head, i] += factor * states[split, head, i]
        for i in range(head_dim):
            output[head, i] /= total
