"""What the CPU's attention of prompts does to one tile: `KEYS` keys and values, and some queries as lanes.

Scores and results lie transposed, lanes beside each other. So keys and values are used as they are, and whatever is
done to a query is done to a vector of queries. No lane depends on another, so it does not matter which it is.

The state of queries is `[width + 2, lanes]` float32: sums of weighted values, the peak of the scores, and the total of
the weights (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). `width` is the head's dimension,
rounded up to whole strips.

`kind` is float32, or `HALVES`: then what is multiplied is rounded to bfloat16 and lies in pairs. All is summed in
float32 in either case.
"""

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from app.gpu.kernels.attention.cpu.scores import LEAST_EXPONENT, LOWEST, ONE, ZERO, bounded, query_scale
from app.gpu.kernels.attention.cpu.vectors import make_softmax, round_run, widen_run
from app.gpu.kernels.cpu.compile import exp2, inlined
from app.gpu.kernels.cpu.intrinsics import pointer
from app.gpu.kernels.linear.cpu.product import takes_bfloat16
from app.gpu.kernels.linear.cpu.tile import COLUMNS, LANES, ROWS, make_column_tile, make_tile
from app.gpu.kernels.linear.cpu.weights import PANEL

KEYS = 48
"""In a tile: whole strips."""
UNBOUNDED = 1 << 60
"""Elements of an array that is only known by its address."""

_tile, _column_tile = make_tile(ROWS, COLUMNS), make_column_tile(ROWS, COLUMNS)
_softmax, _rounded_softmax = make_softmax(KEYS), make_softmax(KEYS, rounded=True)
_narrow_tile, _narrow_column_tile = make_tile(ROWS, LANES), make_column_tile(ROWS, LANES)


@inlined
def take_queries(a: Any, token: int, count: int, head: int, query: Any, head_dim: int) -> None:
    """`count` queries from `token` on, scaled, as `[panels, head_dim, PANEL]`: each with all heads that share the
    key-value head `head` side by side.
    """
    group = a.heads // a.kv_heads
    queries = carray(pointer(a.query), UNBOUNDED, np.float32)
    scale = query_scale(a.scale, a.softcap)
    for index in range(count * group):
        at = (token + index // group) * a.query_stride + (head * group + index % group) * head_dim
        for i in range(head_dim):
            query[index // PANEL, i, index % PANEL] = queries[at + i] * scale


@inlined
def take_keys(
    a: Any, element: Any, table: Any, head: int, first: int, end: int, keys: Any, values: Any, head_dim: int
) -> None:
    """Keys and values at positions `[first, end)`, `[KEYS, head_dim]` each. Those past the end are zero."""
    nbytes = carray(pointer(a.pool), UNBOUNDED, element).itemsize
    block, offset = first // a.block_size, first % a.block_size
    for key in range(end - first):
        at = a.pool + (head * a.head_stride + table[block] * a.block_stride + offset * a.columns) * nbytes
        line = key * head_dim * 4
        widen_run(element, at, keys.ctypes.data + line, head_dim)
        widen_run(element, at + a.value_offset * nbytes, values.ctypes.data + line, head_dim)
        offset += 1
        if offset == a.block_size:
            block, offset = block + 1, 0
    for i in range((end - first) * head_dim, KEYS * head_dim):
        keys[i] = values[i] = ZERO


@inlined
def round_queries(query: Any, head_dim: int) -> None:
    """Make pairs of bfloat16 of what `take_queries` has left: the first half of a query's numbers, each with one of the
    second.
    """
    for panel in range(len(query)):
        start = query.ctypes.data + panel * head_dim * PANEL * 4
        for i in range(head_dim // 2):
            line = start + i * PANEL * 4
            round_run(line, line + head_dim // 2 * PANEL * 4, line, PANEL)


@inlined
def round_keys(keys: Any, values: Any, head_dim: int) -> None:
    """Make pairs of bfloat16 of what `take_keys` has left: keys as `round_queries` does, values of two keys each."""
    for key in range(KEYS):
        line = keys.ctypes.data + key * head_dim * 4
        round_run(line, line + head_dim // 2 * 4, line, head_dim // 2)
    for pair in range(KEYS // 2):
        line = values.ctypes.data + pair * head_dim * 8
        round_run(line, line + head_dim * 4, values.ctypes.data + pair * head_dim * 4, head_dim)


@inlined
def begin(state: Any) -> None:
    """No query has seen a key: its peak is the lowest, its total and its sums are zero."""
    width = len(state) - 2
    for i in range(width + 2):
        for lane in range(state.shape[1]):
            state[i, lane] = LOWEST if i == width else ZERO


@inlined
def score(kind: Any, keys: Any, head_dim: int, panel: Any, lanes: int, scores: Any) -> None:
    """Scores of a tile's keys with `lanes` queries of a panel, into `scores` `[KEYS, PANEL]`."""
    x, line, weights, out = keys.ctypes.data, head_dim * 4, panel.ctypes.data, scores.ctypes.data
    for row in range(0, KEYS, ROWS):
        at, to = x + row * line, out + row * PANEL * 4
        column = 0
        while column + COLUMNS <= lanes:
            _tile(kind, at, line, weights, column, head_dim, to + column * 4, PANEL * 4, 0)
            column += COLUMNS
        while column < lanes:
            _narrow_tile(kind, at, line, weights, column, head_dim, to + column * 4, PANEL * 4, 0)
            column += LANES


@inlined
def add_values(kind: Any, values: Any, head_dim: int, scores: Any, lanes: int, state: Any, lane: int) -> None:
    """Add the values of a tile, weighted by `scores`, to the sums of `lanes` queries from `lane` on."""
    weights, line = scores.ctypes.data, state.shape[1] * 4
    for row in range(0, len(state) - 2, ROWS):
        at, to = values.ctypes.data + row * 4, state.ctypes.data + row * line + lane * 4
        column = 0
        while column + COLUMNS <= lanes:
            _column_tile(kind, head_dim, at, 4, weights, column, KEYS, to + column * 4, line, 1)
            column += COLUMNS
        while column < lanes:
            _narrow_column_tile(kind, head_dim, at, 4, weights, column, KEYS, to + column * 4, line, 1)
            column += LANES


@inlined
def weigh(kind: Any, a: Any, scores: Any, first: int, head: int, tile: int, state: Any, begin: int, lanes: int) -> None:
    """Turn the scores of a panel into weights, zero for keys that a query does not see, and make the earlier sums fit.

    The panel's lanes are `[begin, begin + lanes)` of `state`. Its first query stands at `first`, with head `head` of
    the group; the keys begin at position `tile`.
    """
    group = a.heads // a.kv_heads
    last = first + (head + lanes - 1) // group
    if tile + KEYS > first + 1 or last + 1 - a.window > tile:
        _hide(scores, first, head, group, tile, a.window, lanes)
    if a.softcap != 0:
        for key in range(KEYS):
            for lane in range(lanes):
                if scores[key, lane] > LOWEST:
                    scores[key, lane] = bounded(scores[key, lane], a.softcap)
    line = state.shape[1] * 4
    for vector in range(0, lanes, LANES):
        at = state.ctypes.data + (begin + vector) * 4
        start = scores.ctypes.data + vector * 4
        if takes_bfloat16(kind):
            _rounded_softmax(start, PANEL * 4, at, line, len(state) - 2)
        else:
            _softmax(start, PANEL * 4, at, line, len(state) - 2)


@inlined
def _hide(scores: Any, first: int, head: int, group: int, tile: int, window: int, lanes: int) -> None:
    for lane in range(lanes):
        position = first + (head + lane) // group
        for key in range(KEYS):
            if tile + key > position or tile + key <= position - window:
                scores[key, lane] = LOWEST


@inlined
def fold(merged: Any, state: Any, factors: Any) -> None:
    """Take the state of later keys into that of earlier ones. One without keys changes no bit."""
    width = len(state) - 2
    earlier, later = factors[0], factors[1]
    for vector in range(0, state.shape[1], LANES):
        for lane in range(LANES):
            at = vector + lane
            peak = max(merged[width, at], state[width, at])
            earlier[lane] = exp2(max(merged[width, at] - peak, LEAST_EXPONENT))
            later[lane] = exp2(max(state[width, at] - peak, LEAST_EXPONENT))
            merged[width, at] = peak
            merged[width + 1, at] = merged[width + 1, at] * earlier[lane] + state[width + 1, at] * later[lane]
        for i in range(width):
            for lane in range(LANES):
                at = vector + lane
                merged[i, at] = merged[i, at] * earlier[lane] + state[i, at] * later[lane]


@inlined
def give_output(a: Any, token: int, count: int, head: int, state: Any, head_dim: int) -> None:
    """Write the results of the queries that `take_queries` takes."""
    group = a.heads // a.kv_heads
    target = carray(pointer(a.output), UNBOUNDED, np.float32)
    total = len(state) - 1
    for lane in range(count * group):
        at = ((token + lane // group) * a.heads + head * group + lane % group) * head_dim
        scale = ONE / state[total, lane]
        for i in range(head_dim):
            target[at + i] = state[i, lane] * scale
