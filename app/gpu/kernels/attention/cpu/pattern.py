"""A kernel of CPUs: the shares that keys have in the attention of some queries, `[queries, heads, keys]`.

Writing takes as long as computing, so each number is written once, past the caches: a core need not first read the
memory. Zeros of keys that no query sees are not written if the memory already has them. A work item is a run of
queries with one head: scores of all its keys, with the tiles that linear layers are made of, in memory that stays in a
core's cache, and then the softmax of each query. Threads draw items from an atomic counter. What a query gets has the
same bits whatever is computed beside it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from app.domain.activations import MAX_CAPTURE_BYTES
from app.gpu.device.hardware import LargeMemory
from app.gpu.kernels.attention.base import AttentionSpec
from app.gpu.kernels.attention.cpu import dense_heads
from app.gpu.kernels.attention.cpu.queries import (
    ONE,
    ZERO,
    PoolLayer,
    Queries,
    bounded,
    common_arguments,
    query_scale,
    sink_score,
)
from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.intrinsics import LEAST_EXPONENT, exp2, pointer
from app.gpu.kernels.cpu.launch import draw, parallel
from app.gpu.kernels.cpu.tiles import (
    COLUMNS,
    LANES,
    LOWEST,
    PANEL,
    ROWS,
    highest,
    make_tile,
    stream_scaled,
    stream_zeros,
    weigh,
    widen_run,
)

RUN = 2 * ROWS
"""Queries of an item: so many share each panel of keys while it is in the first-level cache."""

_tile, _MEMORY = make_tile(ROWS, COLUMNS), LargeMemory(MAX_CAPTURE_BYTES)


def pattern(
    query: Tensor, kv: Tensor, table: Tensor, positions: Sequence[int], spec: AttentionSpec, heads: Sequence[int]
) -> Tensor:
    """As `attention_pattern` has it."""
    query, context = dense_heads(query.float()), positions[-1] + 1
    filled = tuple(positions), len(heads), context, spec.window
    found, is_blank = _MEMORY.take((len(positions), len(heads), context), torch.float32, filled)
    try:
        given = common_arguments(query, kv, table, spec, found)
        del given["head_dim"]
        _share(
            **given,
            places=torch.from_numpy(np.fromiter(positions, np.int64, len(positions))),
            chosen=torch.tensor(heads),
            runs=-(-len(positions) // RUN),
            queries=len(positions),
            count=len(heads),
            context=context,
            blank=is_blank,
        )
    except BaseException:
        found.zero_()  # the next tensor in this memory counts as blank
        raise
    return found


@parallel
def _share(
    a: Any,
    queries: int,
    count: int,
    runs: int,
    context: int,
    blank: int,
    window: int,
    query: Queries,
    pool: PoolLayer,
    tables: Tensor,
    places: Tensor,
    chosen: Tensor,
    sinks: Tensor,
    output: Tensor,
    scale: float,
    softcap: float,
) -> None:
    """Draw runs of queries of the `count` chosen heads until none is left. tables: `[blocks]` int32, the row's. places:
    `[queries]` int64, rising positions below `context`. output: `[queries, count, context]`. If `blank`, it is
    already 0 for keys that a query does not see.
    """
    head_dim, group = a.head_dim, a.heads // a.kv_heads
    positions: Any = carray(pointer(a.places), queries, np.int64)
    numbers: Any = carray(pointer(a.chosen), count, np.int64)
    first_panel = max(0, positions[0] + 1 - window) // PANEL
    panels = np.empty((-(-context // PANEL) - first_panel) * head_dim * PANEL, np.float32)
    width = -(-context // PANEL) * PANEL + LANES  # rows of a power of two would share few lines of the cache
    keys, own = np.zeros(PANEL * head_dim, np.float32), np.zeros(RUN * head_dim, np.float32)
    scores = np.empty((RUN, width), np.float32)
    factor, taken = query_scale(scale, softcap), -1
    while True:
        item = draw(a)
        if item >= count * runs:
            break
        head, first = numbers[item // runs], (runs - 1 - item % runs) * RUN  # those with the most keys first
        if head // group != taken:
            taken = head // group
            _take_keys(a, pool, tables, taken, first_panel, context, keys, panels)
        some = min(RUN, queries - first)
        for index in range(some):
            at = (first + index) * a.query_stride + head * head_dim
            for i in range(head_dim):
                own[index * head_dim + i] = query[at + i] * factor
        oldest, end = max(0, positions[first] + 1 - window) // PANEL, positions[first + some - 1] // PANEL + 1
        for panel in range(oldest, end):
            start, line = panels.ctypes.data + (panel - first_panel) * head_dim * PANEL * 4, head_dim * 4
            for row in range(0, some, ROWS):
                for column in range(0, PANEL, COLUMNS):
                    at = own.ctypes.data + row * line
                    to = scores.ctypes.data + (row * width + panel * PANEL + column) * 4
                    _tile(np.float32, at, line, 1, start, column, head_dim, to, width * 4, 0)
        for index in range(some):
            stop = positions[first + index] + 1
            seen = max(0, stop - window)
            total = _weigh(a, scores[index], seen, stop, sink_score(sinks, head))
            to = ((first + index) * count + item // runs) * context
            _write(scores[index], seen, stop, ONE / total, a.output + to * 4, context, blank)


@inlined
def _take_keys(
    a: Any, pool: Any, table: Any, head: int, first_panel: int, context: int, keys: Any, panels: Any
) -> None:
    """The keys of a key-value head from a panel on, as `[panels, head_dim, PANEL]` float32; zeros past the last."""
    head_dim = a.head_dim
    for panel in range(first_panel, -(-context // PANEL)):
        for lane in range(PANEL):
            position = panel * PANEL + lane
            if position < context:
                slot = table[position // a.block_size] * a.block_stride + position % a.block_size * a.columns
                at = a.pool + (head * a.head_stride + slot) * pool.itemsize
                widen_run(pool, at, keys.ctypes.data + lane * head_dim * 4, head_dim)
            else:
                for i in range(head_dim):
                    keys[lane * head_dim + i] = ZERO
        start = (panel - first_panel) * head_dim * PANEL
        for i in range(head_dim):
            for lane in range(PANEL):
                panels[start + i * PANEL + lane] = keys[lane * head_dim + i]


@inlined
def _weigh(a: Any, scores: Any, first: int, end: int, sink: Any) -> Any:
    """Turn a query's scores into weights, 0 for keys outside `[first, end)` in the panels of these; returns their total
    and that of the sink.
    """
    begin, stop = first // PANEL * PANEL, -(-end // PANEL) * PANEL
    if a.softcap != 0:
        for key in range(begin, stop):
            scores[key] = bounded(scores[key], a.softcap)
    for key in range(begin, first):
        scores[key] = LOWEST
    for key in range(end, stop):
        scores[key] = LOWEST
    start = scores.ctypes.data + begin * 4
    peak = highest(start, stop - begin, sink)
    total = weigh(start, stop - begin, peak) + exp2(max(sink - peak, LEAST_EXPONENT))
    for key in range(begin, first):
        scores[key] = ZERO
    for key in range(end, stop):
        scores[key] = ZERO
    return total


@inlined
def _write(weights: Any, first: int, end: int, scale: Any, output: int, context: int, blank: int) -> None:
    """Write the shares of all keys to address `output`: 0 for those outside `[first, end)`. If `blank`, memory has
    these zeros already. Weights are 0 up to whole panels.
    """
    begin, stop = first // PANEL * PANEL, min(-(-end // PANEL) * PANEL, context)
    if blank == 0:
        stream_zeros(output, begin)
        stream_zeros(output + stop * 4, context - stop)
    stream_scaled(weights.ctypes.data + begin * 4, scale, output + begin * 4, stop - begin)
