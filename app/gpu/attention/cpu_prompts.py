"""A Numba kernel: attention of prompts over paged keys and values, with the tiles that linear layers are made of.

A work item is a run of queries of one prompt with one key-value head. It goes through the keys in tiles of `KEYS`, from
position 0 or where its window begins, with an online softmax (Milakov and Gimelshein, arXiv:1805.02867; Dao et al.,
arXiv:2205.14135). Scores and results are computed transposed: `PANEL` queries lie beside each other, so that keys and
values are used as they are, and whatever is done to a query is done to a vector of queries.

Tiles begin at multiples of `KEYS`, and each sum goes from its first term to its last. So what a query gets has the same
bits however its prompt is cut into parts, as long as all of them come here.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import RowShape
from app.gpu.attention.cpu_scores import LEAST_EXPONENT, LOWEST, ONE, ZERO, bounded, query_scale
from app.gpu.cpu.compile import ELEMENTS, c_function, exp2, inlined
from app.gpu.cpu.intrinsics import fetch_add, pointer, widen
from app.gpu.cpu.openmp import run_on_torch_threads
from app.gpu.linear.cpu_tile import COLUMNS, ROWS, make_column_tile, make_tile
from app.gpu.linear.cpu_weights import PANEL

KEYS = 48
"""In a tile: a multiple of the rows of any tile of sums."""
ITEM_ROWS = 192
"""Queries of an item times the query heads that share its key-value head, about."""
_UNBOUNDED = 1 << 60


class _Arguments(ctypes.Structure):
    """What the kernel reads. Tensors are given by address; strides count elements.

    query: `[tokens, heads, head_dim]` float32, of which `spans` `[rows, 3]` int64 are prompts: first token, tokens,
    context. pool: one layer's `[blocks, 2, kv_heads, block_size, head_dim]`, with all keys and values.
    tables: `[rows, blocks]` int32. output: as `query`, dense. `queries` of them make an item; `next_item` starts at 0.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("next_item", "queries", "window", "heads", "kv_heads", "block_size")),
        *((name, ctypes.c_int64) for name in ("query", "query_stride", "spans", "rows")),
        *((name, ctypes.c_int64) for name in ("pool", "block_stride", "value_offset", "head_stride")),
        *((name, ctypes.c_int64) for name in ("tables", "table_stride", "output")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


_ARGUMENTS = np.dtype(_Arguments)
_tile, _column_tile = make_tile(ROWS, COLUMNS), make_column_tile(ROWS, COLUMNS)


def attend_prompts(
    query: Tensor, kv: Tensor, rows: Sequence[RowShape], tables: Tensor, spec: AttentionSpec, output: Tensor
) -> None:
    """Attend with the tokens of `rows`, whose blocks are in `tables` `[rows, blocks]` int32, over all keys that they
    see. `query` `[tokens, heads, head_dim]` float32 has dense heads; `output` is dense, of the same shape.
    """
    _, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = kv.shape
    block_stride, value_offset, head_stride, *_ = kv.stride()
    spans = np.array([(row.start, row.length, row.context) for row in rows], np.int64)
    arguments = _Arguments(
        queries=max(1, ITEM_ROWS * kv_heads // heads),
        window=spec.window or _UNBOUNDED,
        heads=heads,
        kv_heads=kv_heads,
        block_size=block_size,
        query=query.data_ptr(),
        query_stride=query.stride(0),
        spans=spans.ctypes.data,
        rows=len(spans),
        pool=kv.data_ptr(),
        block_stride=block_stride,
        value_offset=value_offset,
        head_stride=head_stride,
        tables=tables.data_ptr(),
        table_stride=tables.stride(0),
        output=output.data_ptr(),
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )
    run_on_torch_threads(_compiled(kv.dtype, head_dim).address, arguments)


@functools.cache
def _compiled(dtype: torch.dtype, head_dim: int) -> Any:
    """The kernel for a pool of `dtype`, as a C function of the address of an `_Arguments`."""
    element = ELEMENTS[dtype]

    def attend(arguments: int) -> None:
        _attend(arguments, element, head_dim)

    return c_function(attend)


@inlined
def _attend(arguments: int, element: Any, head_dim: int) -> None:
    """Draw work items until none is left: those with the most keys first, which leaves the least to wait for."""
    a = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    pool = carray(pointer(a.pool), _UNBOUNDED, element)
    spans = carray(pointer(a.spans), (a.rows, 3), np.int64)
    group = a.heads // a.kv_heads
    panels, width = -(-a.queries * group // PANEL), -(-head_dim // ROWS) * ROWS
    query = np.zeros((panels, head_dim, PANEL), np.float32)
    output, state = np.empty((panels, width, PANEL), np.float32), np.empty((panels, 2, PANEL), np.float32)
    keys, values = np.zeros(KEYS * head_dim, np.float32), np.zeros(KEYS * head_dim + ROWS, np.float32)
    scores, shrink = np.empty((KEYS, PANEL), np.float32), np.empty(PANEL, np.float32)
    while True:
        item = fetch_add(arguments)
        row, part = 0, item // a.kv_heads
        while row < a.rows and part >= -(-spans[row, 1] // a.queries):
            part -= -(-spans[row, 1] // a.queries)
            row += 1
        if row == a.rows:
            break
        head = item % a.kv_heads
        start = (-(-spans[row, 1] // a.queries) - 1 - part) * a.queries
        count = min(a.queries, spans[row, 1] - start)
        first, token = spans[row, 2] - spans[row, 1] + start, spans[row, 0] + start
        table = carray(pointer(a.tables + row * a.table_stride * 4), _UNBOUNDED, np.int32)
        _take_queries(a, token, count, head * group, group, query, head_dim)
        _begin(state, output)
        for tile in range(max(0, first + 1 - a.window) // KEYS * KEYS, first + count, KEYS):
            end = min(tile + KEYS, first + count)
            _take_keys(a, pool, table, head * a.head_stride, tile, end, keys, values, head_dim)
            for panel in range(-(-count * group // PANEL)):
                at = first + panel * PANEL // group
                if tile > at + (PANEL - 1) // group + 1:
                    continue
                _multiply(keys.ctypes.data, head_dim, 1, KEYS, query[panel], scores, 0)
                if _weigh(a, scores, at, panel * PANEL % group, group, tile, state[panel], shrink):
                    for i in range(width):
                        for column in range(PANEL):
                            output[panel, i, column] *= shrink[column]
                _multiply(values.ctypes.data, 1, head_dim, width, scores, output[panel], 1)
        _give_output(a, token, count, head * group, group, state, output, head_dim)


@inlined
def _take_queries(a: Any, token: int, count: int, head: int, group: int, query: Any, head_dim: int) -> None:
    """The item's queries, scaled, as `[panels, head_dim, PANEL]`: each with all heads of the group side by side."""
    queries = carray(pointer(a.query), _UNBOUNDED, np.float32)
    scale = query_scale(a.scale, a.softcap)
    for index in range(count * group):
        at = (token + index // group) * a.query_stride + (head + index % group) * head_dim
        for i in range(head_dim):
            query[index // PANEL, i, index % PANEL] = queries[at + i] * scale


@inlined
def _begin(state: Any, output: Any) -> None:
    """No query has seen a key: its peak is the lowest, its total and its sums are zero."""
    for panel in range(len(state)):
        for column in range(PANEL):
            state[panel, 0, column] = LOWEST
            state[panel, 1, column] = ZERO
        for i in range(output.shape[1]):
            for column in range(PANEL):
                output[panel, i, column] = ZERO


@inlined
def _take_keys(
    a: Any, pool: Any, table: Any, head: int, first: int, end: int, keys: Any, values: Any, head_dim: int
) -> None:
    """Keys and values at positions `[first, end)`, `[KEYS, head_dim]` each. Those past the end are zero."""
    for key in range(end - first):
        position = first + key
        at = head + table[position // a.block_size] * a.block_stride + position % a.block_size * head_dim
        for i in range(head_dim):
            keys[key * head_dim + i] = widen(pool[at + i])
            values[key * head_dim + i] = widen(pool[at + a.value_offset + i])
    for i in range((end - first) * head_dim, KEYS * head_dim):
        keys[i] = values[i] = ZERO


@inlined
def _multiply(x: Any, x_stride: int, step: int, rows: int, panel: Any, out: Any, carry: int) -> None:
    """`rows` rows at address `x`, `x_stride` floats apart, times `panel` `[inputs, PANEL]`, into `out` `[rows, PANEL]`,
    or added to it if `carry` is 1. A row's terms are `step` floats apart.
    """
    weight, target, line = panel.ctypes.data, out.ctypes.data, PANEL * 4
    for column in range(0, PANEL, COLUMNS):
        for row in range(0, rows, ROWS):
            at, to = x + row * x_stride * 4, target + row * line + column * 4
            if step == 1:
                _tile(np.float32, at, x_stride * 4, weight, column, len(panel), to, line, carry)
            else:
                _column_tile(np.float32, step, at, x_stride * 4, weight, column, len(panel), to, line, carry)


@inlined
def _weigh(a: Any, scores: Any, first: int, head: int, group: int, tile: int, state: Any, shrink: Any) -> bool:
    """Turn the scores `[KEYS, PANEL]` of a panel into weights, zero for keys that a query does not see. Its first query
    stands at `first`, with head `head` of the group. `shrink` is what earlier results are to be multiplied by; returns
    whether that changes any.
    """
    last = first + (head + PANEL - 1) // group
    if tile + KEYS > first + 1 or last + 1 - a.window > tile:
        for column in range(PANEL):
            position = first + (head + column) // group
            for key in range(KEYS):
                if tile + key > position or tile + key <= position - a.window:
                    scores[key, column] = LOWEST
    if a.softcap != 0:
        for key in range(KEYS):
            for column in range(PANEL):
                if scores[key, column] > LOWEST:
                    scores[key, column] = bounded(scores[key, column], a.softcap)
    for column in range(PANEL):
        shrink[column] = state[0, column]
    for key in range(KEYS):
        for column in range(PANEL):
            state[0, column] = max(state[0, column], scores[key, column])
    least = ONE
    for column in range(PANEL):
        shrink[column] = exp2(max(shrink[column] - state[0, column], LEAST_EXPONENT))
        state[1, column] *= shrink[column]
        least = min(least, shrink[column])
    for key in range(KEYS):
        for column in range(PANEL):
            weight = exp2(max(scores[key, column] - state[0, column], LEAST_EXPONENT))
            weight = weight if scores[key, column] > LOWEST else ZERO
            scores[key, column] = weight
            state[1, column] += weight
    return bool(least < ONE)


@inlined
def _give_output(a: Any, token: int, count: int, head: int, group: int, state: Any, output: Any, head_dim: int) -> None:
    target = carray(pointer(a.output), _UNBOUNDED, np.float32)
    for index in range(count * group):
        panel, column = index // PANEL, index % PANEL
        at = ((token + index // group) * a.heads + head + index % group) * head_dim
        scale = ONE / state[panel, 1, column]
        for i in range(head_dim):
            target[at + i] = output[panel, i, column] * scale
