"""A kernel of CPUs: attention of prompts over paged keys and values, with the tiles that linear layers are made of.

A work item is a run of queries of one prompt with one key-value head. It goes through the keys in tiles,
with one state for each `SPLIT` of them; these are folded in order. A prompt that is one run has an item for each split,
and the thread that finishes the last folds them all (flash-decoding). Threads draw items from an atomic counter.

Splits and tiles begin at multiples of their lengths, each sum goes from its first term to its last, and no query
depends on those beside it. So what a query gets has the same bits however its prompt is cut into parts, as long as all
of them come here, and on any number of threads.

A tile is `KEYS` keys and values, and some queries as lanes. Scores and results lie transposed, lanes beside each other.
So keys and values are used as they are, and whatever is done to a query is done to a vector of queries.

The state of queries is `[width + 2, lanes]` float32: sums of weighted values, the peak of the scores, and the total of
the weights (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). `width` is the head's dimension,
rounded up to whole strips. `kind` is float32, or `HALVES`: bfloat16 in pairs, whose products are summed in float32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec, Batch, RowShape
from app.gpu.kernels.attention.cpu.queries import (
    ZERO,
    PoolLayer,
    Queries,
    bounded,
    common_arguments,
    query_scale,
    sink_score,
)
from app.gpu.kernels.cpu.amx import DEPTH, configure, make_block, multiplies_in_registers, release
from app.gpu.kernels.cpu.amx import ROWS as REGISTER_ROWS
from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.intrinsics import LEAST_EXPONENT, exp2, fetch_add, pointer
from app.gpu.kernels.cpu.launch import draw, parallel
from app.gpu.kernels.cpu.tiles import (
    COLUMNS,
    HALVES,
    LANES,
    LOWEST,
    PANEL,
    ROWS,
    make_softmax,
    make_tile,
    round_run,
    takes_bfloat16,
    widen_run,
)

KEYS, KEYS_IN_REGISTERS = 48, 64
"""In a tile: whole strips; whole runs of AMX's registers."""
SPLIT = 576
"""Keys of one state, whole tiles of both kinds: enough to pay for the fold, few enough to spread one long context over
the cores."""
RUN_LANES = 192
"""Queries of a run times the query heads that share its key-value head, at most, unless one query has more."""

_tile, _narrow_tile = make_tile(ROWS, COLUMNS), make_tile(ROWS, LANES)
_softmax, _rounded_softmax = (make_softmax(KEYS, rounded=each) for each in (False, True))
_block, _narrow_block = (make_block(2, outputs) for outputs in (PANEL, REGISTER_ROWS))
_softmax_in_registers = make_softmax(KEYS_IN_REGISTERS, rounded=True)


Arrays = Sequence[NDArray[Any]]
"""Memory that a launch works on: it must live as long."""


def place_prompts(
    rows: Sequence[RowShape], tables: Sequence[int], *, heads: int, kv_heads: int, head_dim: int
) -> tuple[dict[str, int], Arrays]:
    """What a launch is told of rows that attend as prompts: where their tokens are, and where several threads put what
    they find out of one. And the memory of that. `tables[i]` is the row of the block tables that `rows[i]` has.

    spans: `[prompts, 5]` int64: a prompt's first token, tokens and context, its row of the block tables, and where its
    states begin in `states`, float32, if it is one run. folded: `[prompts, kv_heads]` int64 zeros, which stay so.
    """
    group = heads // kv_heads
    run, floats = max(1, RUN_LANES // group), 0
    spans = np.empty((len(rows), 5), np.int64)
    for index, (row, table) in enumerate(zip(rows, tables, strict=True)):
        spans[index] = row.start, row.length, row.context, table, floats
        if row.length <= run:
            lanes = -(-row.length * group // LANES) * LANES
            floats += -(-row.context // SPLIT) * kv_heads * (-(-head_dim // ROWS) * ROWS + 2) * lanes
    states, folded = np.empty(floats, np.float32), np.zeros((len(rows), kv_heads), np.int64)
    memory: dict[str, NDArray[Any]] = {"spans": spans, "states": states, "folded": folded}
    addresses = {name: int(each.ctypes.data) for name, each in memory.items()}
    return {"prompts": len(rows), "run": run, **addresses}, tuple(memory.values())


def attend_prompts(
    query: Tensor,
    kv: Tensor,
    batch: Batch,
    prompts: Sequence[int],
    spec: AttentionSpec,
    output: Tensor,
    *,
    in_bfloat16: bool,
) -> None:
    """Attend with the tokens of the rows `prompts` of a batch over all keys that they see. `query` `[tokens, heads,
    head_dim]` float32 has dense heads; `output` is dense, of the same shape. With `in_bfloat16` all that is multiplied
    is rounded to it first, unless the head dimension is odd: numbers are multiplied in pairs.
    """
    _, heads, head_dim = query.shape
    rows, kv_heads = [batch.rows[index] for index in prompts], kv.shape[2]
    placed, _memory = place_prompts(rows, prompts, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    kind = HALVES if in_bfloat16 and head_dim % 2 == 0 else np.float32
    keys = KEYS
    whole = head_dim % (2 * REGISTER_ROWS) == 0 and LANES == REGISTER_ROWS
    if kind is HALVES and whole and multiplies_in_registers():
        keys = KEYS_IN_REGISTERS
    _attend(**common_arguments(query, kv, batch.block_tables, spec, output) | placed, kind=kind, size=keys)


@parallel
def _attend(
    a: Any,
    prompts: int,
    spans: int,
    states: int,
    folded: int,
    run: int,
    window: int,
    query: Queries,
    output: Tensor,
    sinks: Tensor,
    pool: PoolLayer,
    tables: Tensor,
    scale: float,
    softcap: float,
    *,
    kind: Any,
    size: int,
    head_dim: int,
) -> None:
    """Draw work items until none is left: of a prompt, those with the most keys first. See `place_prompts`. A prompt is
    one run if it has at most `run` queries.
    """
    kv_heads = a.kv_heads
    places = carray(pointer(spans), (prompts, 5), np.int64)
    counts = carray(pointer(folded), (prompts, kv_heads), np.int64)
    lines, lanes = -(-head_dim // ROWS) * ROWS + 2, _lanes(a, run)
    panels = np.zeros((-(-lanes // PANEL), head_dim, PANEL), np.float32)
    keys, values = np.zeros(size * head_dim, np.float32), np.zeros(size * head_dim + ROWS, np.float32)
    scores, factors = np.zeros((size, PANEL), np.float32), np.empty((2, LANES), np.float32)
    turned = np.empty((head_dim, size // 2), np.float32)
    memory = panels, scores, turned, keys, values
    if size == KEYS_IN_REGISTERS:
        configure(2 * REGISTER_ROWS, DEPTH)
    own, results = np.empty(lines * lanes, np.float32), np.empty(lines * lanes, np.float32)
    while True:
        item, row = draw(a), 0
        while row < prompts and item >= _items(a, places[row]):
            item -= _items(a, places[row])
            row += 1
        if row == prompts:
            break
        head, part, token, count = item % kv_heads, item // kv_heads, places[row, 0], places[row, 1]
        first = places[row, 2] - count
        one_run = count <= run
        if not one_run:
            skipped = (-(-count // run) - 1 - part) * run
            token, first, count = token + skipped, first + skipped, min(run, count - skipped)
        _take_queries(a, query, kind, token, count, head, panels, head_dim)
        merged = _states(results.ctypes.data, 0, lines, _lanes(a, count))
        _begin(merged)
        lo, splits = _splits(a, first, count)
        start = own.ctypes.data
        if one_run:
            start = states + (places[row, 4] + head * splits * merged.size) * 4
        table = tables[places[row, 3] * a.tables_stride :]
        done = 0
        for split in range(part, part + 1) if one_run else range(splits):
            state = _states(start, split if one_run else 0, lines, merged.shape[1])
            _begin(state)
            _attend_split(a, pool, kind, size, table, head, lo + split, first, count, memory, state, head_dim)
            whole = not one_run or fetch_add(folded + (row * kv_heads + head) * 8, 1) == splits - 1
            for index in range(splits if one_run else 1) if whole else range(0):
                _fold(merged, _states(start, index, lines, merged.shape[1]), factors)
                done += 1
        if done == splits:
            _give_output(a, output, sinks, token, count, head, merged, head_dim)
            counts[row, head] = 0
    if size == KEYS_IN_REGISTERS:
        release()


PromptArguments = _attend.arguments
"""Of a launch of prompts."""


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
    pool: Any,
    kind: Any,
    size: int,
    table: Any,
    head: int,
    split: int,
    first: int,
    count: int,
    memory: Any,
    state: Any,
    head_dim: int,
) -> None:
    """Attend with `count` queries, the first at position `first`, over the keys of one split."""
    panels, scores, turned, keys, values = memory
    lanes, group = state.shape[1], a.heads // a.kv_heads
    oldest, end = max(0, first + 1 - a.window), min((split + 1) * SPLIT, first + count)
    for tile in range(max(split * SPLIT, oldest // size * size), end, size):
        _take_keys(a, pool, kind, size, table, head, tile, min(tile + size, end), memory, head_dim)
        if size == KEYS_IN_REGISTERS:
            _turn(values.ctypes.data, turned)
        for lane in range(0, lanes, PANEL):
            beside = min(PANEL, lanes - lane)
            if tile <= first + (lane + beside - 1) // group:
                panel, weights = panels[lane // PANEL].ctypes.data, scores.ctypes.data
                sums, line = state.ctypes.data + lane * 4, lanes * 4
                at, query = first + lane // group, lane % group
                if size == KEYS_IN_REGISTERS:
                    _multiply_blocks(
                        keys.ctypes.data, head_dim * 4, panel, beside, size, head_dim, weights, PANEL * 4, 0
                    )
                    _weigh(kind, size, a, scores, at, query, tile, state, lane, beside)
                    _multiply_blocks(turned.ctypes.data, size * 2, weights, beside, head_dim, size, sums, line, 1)
                    continue
                for row in range(0, size, ROWS):
                    strip, to = keys.ctypes.data + row * head_dim * 4, weights + row * PANEL * 4
                    _multiply(kind, strip, head_dim * 4, 1, panel, beside, head_dim, to, PANEL * 4, 0)
                _weigh(kind, size, a, scores, at, query, tile, state, lane, beside)
                for row in range(0, len(state) - 2, ROWS):  # add the values to the sums
                    strip, to = values.ctypes.data + row * 4, sums + row * line
                    _multiply(kind, strip, 4, head_dim, weights, beside, size, to, line, 1)


@inlined
def _multiply_blocks(
    x: int, line: int, weights: int, lanes: int, rows: int, inputs: int, out: int, out_line: int, carry: int
) -> None:
    """`rows` of `x` times `lanes` of the `weights`, as `make_block` has them; both rows and inputs are whole blocks."""
    for row in range(0, rows, 2 * REGISTER_ROWS):
        if lanes == PANEL:
            _block(x + row * line, line, weights, inputs // DEPTH, out + row * out_line, out_line, carry)
        else:
            _narrow_block(x + row * line, line, weights, inputs // DEPTH, out + row * out_line, out_line, carry)


@inlined
def _turn(values: int, turned: Any) -> None:
    """Pairs of values, `[pairs, head_dim]` at that address, as `[head_dim, pairs]`."""
    width, pairs = turned.shape
    found = carray(pointer(values), (pairs, width), np.float32)
    for i in range(width):
        for pair in range(pairs):
            turned[i, pair] = found[pair, i]


@inlined
def _take_queries(a: Any, query: Any, kind: Any, token: int, count: int, head: int, panels: Any, head_dim: int) -> None:
    """`count` queries from `token` on, scaled, as `[panels, head_dim, PANEL]`: each with all heads that share the
    key-value head `head` side by side. In bfloat16 numbers of a query's two halves make pairs.
    """
    group = a.heads // a.kv_heads
    scale = query_scale(a.scale, a.softcap)
    for index in range(count * group):
        at = (token + index // group) * a.query_stride + (head * group + index % group) * head_dim
        for i in range(head_dim):
            panels[index // PANEL, i, index % PANEL] = query[at + i] * scale
    if takes_bfloat16(kind):
        half = head_dim // 2 * PANEL * 4
        for panel in range(len(panels)):
            for i in range(head_dim // 2):
                line = panels.ctypes.data + (panel * head_dim + i) * PANEL * 4
                round_run(line, line + half, line, PANEL)


@inlined
def _take_keys(
    a: Any, pool: Any, kind: Any, size: int, table: Any, head: int, first: int, end: int, memory: Any, head_dim: int
) -> None:
    """Keys and values at positions `[first, end)`, `[size, head_dim]` each. Those past the end are zero. In bfloat16
    keys are in pairs as `_take_queries` makes them, and values of two keys make a pair.
    """
    _panels, _scores, _turned, keys, values = memory
    block, offset = first // a.block_size, first % a.block_size
    for key in range(end - first):
        at = a.pool + (head * a.head_stride + table[block] * a.block_stride + offset * a.columns) * pool.itemsize
        line = key * head_dim * 4
        widen_run(pool, at, keys.ctypes.data + line, head_dim)
        widen_run(pool, at + a.value_offset * pool.itemsize, values.ctypes.data + line, head_dim)
        offset += 1
        if offset == a.block_size:
            block, offset = block + 1, 0
    for i in range((end - first) * head_dim, size * head_dim):
        keys[i] = values[i] = ZERO
    if takes_bfloat16(kind):
        for key in range(size):
            line = keys.ctypes.data + key * head_dim * 4
            round_run(line, line + head_dim // 2 * 4, line, head_dim // 2)
        for pair in range(size // 2):
            line = values.ctypes.data + pair * head_dim * 8
            round_run(line, line + head_dim * 4, values.ctypes.data + pair * head_dim * 4, head_dim)


@inlined
def _begin(state: Any) -> None:
    """No query has seen a key: its peak is the lowest, its total and its sums are zero."""
    width = len(state) - 2
    for i in range(width + 2):
        for lane in range(state.shape[1]):
            state[i, lane] = LOWEST if i == width else ZERO


@inlined
def _multiply(
    kind: Any, x: int, line: int, step: int, weights: int, lanes: int, inputs: int, out: int, out_line: int, carry: int
) -> None:
    """`ROWS` rows of `x` times `lanes` of the `weights`, `[inputs, PANEL]`; the rest is as `make_tile` has it."""
    column = 0
    while column + COLUMNS <= lanes:
        _tile(kind, x, line, step, weights, column, inputs, out + column * 4, out_line, carry)
        column += COLUMNS
    while column < lanes:
        _narrow_tile(kind, x, line, step, weights, column, inputs, out + column * 4, out_line, carry)
        column += LANES


@inlined
def _weigh(
    kind: Any, size: int, a: Any, scores: Any, first: int, head: int, tile: int, state: Any, begin: int, lanes: int
) -> None:
    """Turn the scores of a panel into weights, zero for keys that a query does not see, and make the earlier sums fit.

    The panel's lanes are `[begin, begin + lanes)` of `state`. Its first query stands at `first`, with head `head` of
    the group; the keys begin at position `tile`.
    """
    group = a.heads // a.kv_heads
    last = first + (head + lanes - 1) // group
    if tile + size > first + 1 or last + 1 - a.window > tile:
        for lane in range(lanes):
            position = first + (head + lane) // group
            for key in range(size):
                if tile + key > position or tile + key <= position - a.window:
                    scores[key, lane] = LOWEST
    if a.softcap != 0:
        for key in range(size):
            for lane in range(lanes):
                if scores[key, lane] > LOWEST:
                    scores[key, lane] = bounded(scores[key, lane], a.softcap)
    line = state.shape[1] * 4
    for vector in range(0, lanes, LANES):
        at = state.ctypes.data + (begin + vector) * 4
        start = scores.ctypes.data + vector * 4
        if size == KEYS_IN_REGISTERS:
            _softmax_in_registers(start, PANEL * 4, at, line, len(state) - 2)
        elif takes_bfloat16(kind):
            _rounded_softmax(start, PANEL * 4, at, line, len(state) - 2)
        else:
            _softmax(start, PANEL * 4, at, line, len(state) - 2)


@inlined
def _fold(merged: Any, state: Any, factors: Any) -> None:
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
def _give_output(a: Any, output: Any, sinks: Any, token: int, count: int, head: int, state: Any, head_dim: int) -> None:
    """Write the results of the queries that `_take_queries` takes."""
    group = a.heads // a.kv_heads
    width = len(state) - 2
    for lane in range(count * group):
        at = ((token + lane // group) * a.heads + head * group + lane % group) * head_dim
        sink, own = sink_score(sinks, head * group + lane % group), state[width, lane]
        peak = max(own, sink)
        kept, added = exp2(max(own - peak, LEAST_EXPONENT)), exp2(max(sink - peak, LEAST_EXPONENT))
        scale = kept / (state[width + 1, lane] * kept + added)
        for i in range(head_dim):
            output[at + i] = state[i, lane] * scale
