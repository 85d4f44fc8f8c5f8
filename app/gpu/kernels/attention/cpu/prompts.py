"""A Numba kernel: attention of prompts over paged keys and values, with the tiles that linear layers are made of.

A work item is a run of queries of one prompt with one key-value head. It goes through the keys in tiles (see
`tiles`), with a state of its own for each `SPLIT` of them, which are folded in order. A prompt that is one run has
an item for each split, and the thread that finishes the last folds them all (flash-decoding). Threads draw items from
an atomic counter.

Splits and tiles begin at multiples of their lengths, each sum goes from its first term to its last, and no query
depends on those beside it. So what a query gets has the same bits however its prompt is cut into parts, as long as all
of them come here, and on any number of threads.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec
from app.gpu.kernels.attention.batch import RowShape
from app.gpu.kernels.attention.cpu.tiles import (
    KEYS,
    UNBOUNDED,
    add_values,
    begin,
    fold,
    give_output,
    round_keys,
    round_queries,
    score,
    take_keys,
    take_queries,
    weigh,
)
from app.gpu.kernels.cpu.compile import POOL_ELEMENTS, c_function, inlined
from app.gpu.kernels.cpu.intrinsics import fetch_add, pointer
from app.gpu.kernels.cpu.openmp import run_on_torch_threads
from app.gpu.kernels.linear.cpu.pairs import HALVES
from app.gpu.kernels.linear.cpu.product import takes_bfloat16
from app.gpu.kernels.linear.cpu.tile import LANES, ROWS
from app.gpu.kernels.linear.cpu.weights import PANEL

SPLIT = 10 * KEYS
"""Keys of one state: enough to pay for the fold, few enough to spread one long context over the cores."""
RUN_LANES = 192
"""Queries of a run times the query heads that share its key-value head, at most, unless one query has more."""


class PromptArguments(ctypes.Structure):
    """What the kernel reads. Tensors are given by address; strides and offsets count elements.

    query: `[tokens, heads, head_dim]` float32. prompts, spans, states, folded: see `PlacedPrompts`. A prompt is one run
    if it has at most `run` queries. pool: one layer's `[blocks, 2, kv_heads, block_size, columns]`, with all keys
    and values. tables: `[rows, blocks]` int32. output: as `query`, dense. `window` is at least 1, `softcap` 0 is off,
    `next_item` is 0.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("next_item", "prompts", "spans", "states", "folded", "run", "window")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "block_size", "columns")),
        *((name, ctypes.c_int64) for name in ("query", "query_stride", "output")),
        *((name, ctypes.c_int64) for name in ("pool", "block_stride", "value_offset", "head_stride")),
        *((name, ctypes.c_int64) for name in ("tables", "table_stride")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


_ARGUMENTS = np.dtype(PromptArguments)


class PlacedPrompts:
    """Rows that attend as prompts: where their tokens are, and memory for what several threads find out of one.

    spans: `[prompts, 5]` int64: a prompt's first token, tokens and context, its row of the block tables, and where its
    states begin in `states`, float32, if it is one run. folded: `[prompts, kv_heads]` int64 zeros, and zeros again when
    the kernel is done.
    """

    def __init__(
        self, rows: Sequence[RowShape], tables: Sequence[int], *, heads: int, kv_heads: int, head_dim: int
    ) -> None:
        """`tables[i]` is the row of the block tables that `rows[i]` has."""
        group = heads // kv_heads
        self.run = max(1, RUN_LANES // group)
        self.spans, floats = np.empty((len(rows), 5), np.int64), 0
        for index, (row, table) in enumerate(zip(rows, tables, strict=True)):
            self.spans[index] = row.start, row.length, row.context, table, floats
            if row.length <= self.run:
                lanes = -(-row.length * group // LANES) * LANES
                floats += -(-row.context // SPLIT) * kv_heads * (-(-head_dim // ROWS) * ROWS + 2) * lanes
        self.states = np.empty(floats, np.float32)
        self.folded = np.zeros((len(rows), kv_heads), np.int64)

    def arguments(self) -> dict[str, int]:
        """Fields of `PromptArguments`."""
        return {
            "prompts": len(self.spans),
            "spans": self.spans.ctypes.data,
            "states": self.states.ctypes.data,
            "folded": self.folded.ctypes.data,
        }


def attend_prompts(
    query: Tensor,
    kv: Tensor,
    prompts: PlacedPrompts,
    tables: Tensor,
    spec: AttentionSpec,
    output: Tensor,
    *,
    in_bfloat16: bool,
) -> None:
    """Attend with the tokens of `prompts`, whose blocks are in `tables` `[rows, blocks]` int32, over all keys that they
    see. `query` `[tokens, heads, head_dim]` float32 has dense heads; `output` is dense, of the same shape.

    With `in_bfloat16` queries, keys, values and their weights are rounded to it before they are multiplied, unless the
    head dimension is odd: numbers are multiplied in pairs.
    """
    _, heads, head_dim = query.shape
    _, _, kv_heads, block_size, columns = kv.shape
    block_stride, value_offset, head_stride, *_ = kv.stride()
    arguments = PromptArguments(
        **prompts.arguments(),
        run=prompts.run,
        window=spec.window or UNBOUNDED,
        heads=heads,
        kv_heads=kv_heads,
        block_size=block_size,
        columns=columns,
        query=query.data_ptr(),
        query_stride=query.stride(0),
        output=output.data_ptr(),
        pool=kv.data_ptr(),
        block_stride=block_stride,
        value_offset=value_offset,
        head_stride=head_stride,
        tables=tables.data_ptr(),
        table_stride=tables.stride(0),
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )
    run_on_torch_threads(_compiled(kv.dtype, head_dim, in_bfloat16 and head_dim % 2 == 0).address, arguments)


@functools.cache
def _compiled(dtype: torch.dtype, head_dim: int, in_bfloat16: bool) -> Any:
    """The kernel for a pool of `dtype`, as a C function of the address of `PromptArguments`."""
    element, kind = POOL_ELEMENTS[dtype], HALVES if in_bfloat16 else np.float32

    def attend(arguments: int) -> None:
        _attend(arguments, element, kind, head_dim)

    return c_function(attend)


@inlined
def _attend(arguments: int, element: Any, kind: Any, head_dim: int) -> None:
    """Draw work items until none is left: of a prompt, those with the most keys first, which leaves the least to wait
    for.
    """
    a = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    spans = carray(pointer(a.spans), (a.prompts, 5), np.int64)
    folded = carray(pointer(a.folded), (a.prompts, a.kv_heads), np.int64)
    lines, lanes = -(-head_dim // ROWS) * ROWS + 2, _lanes(a, a.run)
    query = np.zeros((-(-lanes // PANEL), head_dim, PANEL), np.float32)
    keys, values = np.zeros(KEYS * head_dim, np.float32), np.zeros(KEYS * head_dim + ROWS, np.float32)
    scores, factors = np.zeros((KEYS, PANEL), np.float32), np.empty((2, LANES), np.float32)
    own, results = np.empty(lines * lanes, np.float32), np.empty(lines * lanes, np.float32)
    while True:
        item, row = fetch_add(arguments), 0
        while row < a.prompts and item >= _items(a, spans[row]):
            item -= _items(a, spans[row])
            row += 1
        if row == a.prompts:
            break
        head, part, token, count = item % a.kv_heads, item // a.kv_heads, spans[row, 0], spans[row, 1]
        first = spans[row, 2] - count
        one_run = count <= a.run
        if not one_run:
            start = (-(-count // a.run) - 1 - part) * a.run
            token, first, count = token + start, first + start, min(a.run, count - start)
        take_queries(a, token, count, head, query, head_dim)
        if takes_bfloat16(kind):
            round_queries(query, head_dim)
        merged = _states(results.ctypes.data, 0, lines, _lanes(a, count))
        begin(merged)
        lo, splits = _splits(a, first, count)
        states = own.ctypes.data
        if one_run:
            states = a.states + (spans[row, 4] + head * splits * merged.size) * 4
        table = carray(pointer(a.tables + spans[row, 3] * a.table_stride * 4), UNBOUNDED, np.int32)
        done = 0
        for split in range(part, part + 1) if one_run else range(splits):
            state = _states(states, split if one_run else 0, lines, merged.shape[1])
            begin(state)
            _attend_split(
                a, element, kind, table, head, lo + split, first, count, query, keys, values, scores, state, head_dim
            )
            whole = not one_run or fetch_add(a.folded + (row * a.kv_heads + head) * 8) == splits - 1
            for index in range(splits if one_run else 1) if whole else range(0):
                fold(merged, _states(states, index, lines, merged.shape[1]), factors)
                done += 1
        if done == splits:
            give_output(a, token, count, head, merged, head_dim)
            folded[row, head] = 0


@inlined
def _items(a: Any, span: Any) -> Any:
    """Of a prompt: its splits if it is one run, or else its runs, for each key-value head."""
    length = span[1]
    if length > a.run:
        return a.kv_heads * -(-length // a.run)
    return a.kv_heads * _splits(a, span[2] - length, length)[1]


@inlined
def _splits(a: Any, first: int, count: int) -> Any:
    """Where the keys begin that `count` queries from position `first` on see, and how many splits they have."""
    lo = max(0, first + 1 - a.window) // SPLIT
    return lo, -(-(first + count) // SPLIT) - lo


@inlined
def _lanes(a: Any, queries: int) -> Any:
    """Of so many queries: whole vectors."""
    return -(-queries * (a.heads // a.kv_heads) // LANES) * LANES


@inlined
def _states(start: int, index: int, lines: int, lanes: int) -> Any:
    """State `index`, `[lines, lanes]`, of those that begin at address `start`."""
    return carray(pointer(start + index * lines * lanes * 4), (lines, lanes), np.float32)


@inlined
def _attend_split(
    a: Any,
    element: Any,
    kind: Any,
    table: Any,
    head: int,
    split: int,
    first: int,
    count: int,
    query: Any,
    keys: Any,
    values: Any,
    scores: Any,
    state: Any,
    head_dim: int,
) -> None:
    """Attend with `count` queries, the first at position `first`, over the keys of one split."""
    lanes, group = state.shape[1], a.heads // a.kv_heads
    oldest, end = max(0, first + 1 - a.window), min((split + 1) * SPLIT, first + count)
    for tile in range(max(split * SPLIT, oldest // KEYS * KEYS), end, KEYS):
        take_keys(a, element, table, head, tile, min(tile + KEYS, end), keys, values, head_dim)
        if takes_bfloat16(kind):
            round_keys(keys, values, head_dim)
        for lane in range(0, lanes, PANEL):
            beside = min(PANEL, lanes - lane)
            if tile <= first + (lane + beside - 1) // group:
                score(kind, keys, head_dim, query[lane // PANEL], beside, scores)
                weigh(kind, a, scores, first + lane // group, lane % group, tile, state, lane, beside)
                add_values(kind, values, head_dim, scores, beside, state, lane)
