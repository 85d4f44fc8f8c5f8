"""Attention on CUDA: Triton kernels over the paged keys and values, and flash attention for new prompts.

The kernels store new keys and values in the pool, and attend to them where they are.

A program of attention takes one tile of queries of one kv head: the heads of its group for as many neighbouring tokens
of a sequence as fill `tile_rows`, so that a tile of keys is read once for all of them. It walks the keys in tiles with
an online softmax (Milakov and Gimelshein, arXiv:1805.02867). One launch serves rows of any lengths: a program finds its
sequence by bisection. A grid too small for the device is enlarged by splitting every sequence's keys; `_merge` then
joins the parts (Dao et al., "Flash-Decoding for long-context inference", 2023).

Tiles of keys start at multiples of `tile_keys` from the sequence's first token, and one that a query sees nothing of
leaves that query's state as it is, to the bit. So, unsplit and with the same `tile_rows`, the result of a query depends
on nothing but itself and the keys and values that it sees.
"""

import sys

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.attention.base import FLOAT8, AttentionSpec, Batch
from app.gpu.kernels.linear.triton_matmul import decode, encode, inverse, magnitude, scale_bits

LEAST_ROWS = 16
"""Rows and columns below which `tl.dot` does not go."""
KEY_TILE_BYTES, SMALL_KEY_TILE_BYTES = 16 * 1024, 8 * 1024
"""Of one tile of keys, and of one of values. The latter where registers would be spilled otherwise: in float32, whose
products have no tensor cores, and beside `TALL_ROWS` queries or more.
"""
TALL_ROWS = 64
STAGES, TALL_STAGES = 2, 3
"""Tiles of keys in flight. On an H200 two are up to 4 % faster than three for decode rows; tall ones were not timed."""
WIDE_DIMS = 256
"""Heads of more dimensions, as latents have, take twice the threads, for their registers, and one tile in flight."""
MOST_KEYS = 128
"""In a tile, however small the head."""
SPLIT_KEYS, MAX_SPLITS = 128, 32
"""Least keys of a split: two tiles of a head of 128. Chosen by reasoning, not tuned on a device."""
PROGRAMS_PER_PROCESSOR = 4
"""Programs of a split grid for each multiprocessor: by its registers, as many run on Hopper. Not tuned either."""
HALVES = (torch.float16, torch.bfloat16)
FLASH_DIMS, FLASH_DIMS_STEP = 256, 8
"""What PyTorch's flash attention takes: heads of up to so many dimensions, and of multiples of so many."""
PROMPT_ROWS = 64
"""Height of a prompt's tiles in our own kernel, if flash attention takes such heads: others overfill the registers."""
_LOG2_E = tl.constexpr(1.4426950408889634)


def attend_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv: Tensor,
    batch: Batch,
    spec: AttentionSpec,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """An `Attention`. Takes CUDA tensors of compute capability 8.0 or newer, and CPU tensors in Triton's interpreter.

    Decode rows, and padding (see `Batch`), attend in one launch of the Triton kernel; nothing of that depends on what
    the host knows of them, so it can be captured in a CUDA graph. All prompts attend in one more call:

    - in PyTorch's flash attention over their own keys and values, if they are float16 or bfloat16 with heads of up to
      `FLASH_DIMS` dimensions, the spec has no softcap and no sinks, none has a past, and the pool does not round them;
    - in the Triton kernel otherwise. PyTorch's flash attention reads pools in blocks of 256 tokens, if at all.

    `batch_invariant`: every row attends in the Triton kernel, in tiles of one height and with its keys in one piece, as
    said above. This rests on matrix products whose rows do not influence each other, which a test asks a CUDA device.
    It costs a prompt flash attention, and a small batch of long contexts the multiprocessors of splits.
    """
    query, key, value = _dense(query), _dense(key), _dense(value)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    decodes, starts, splits = batch.decodes, batch.prompt_starts, 1 if batch_invariant else None
    with torch.cuda.device_of(query):
        store(key, value, kv, batch.slot_blocks, batch.slot_offsets)
        if decodes:
            rows = query[:decodes], batch.block_tables[:decodes], batch.contexts[:decodes]
            attend(*rows, None, kv, spec, output[:decodes], rows=LEAST_ROWS, splits=splits)
        if starts is None:
            return output
        in_flash = not batch_invariant and query.dtype in HALVES and query.shape[2] <= FLASH_DIMS
        prompts = batch.rows[decodes:]
        is_kept = kv.dtype is query.dtype and all(row.length == row.context for row in prompts)
        if in_flash and is_kept and spec.softcap is None and spec.sinks is None:
            states, longest = [x[decodes:] for x in (query, key, value)], max(row.length for row in prompts)
            output[decodes:] = _attend_flash(states, starts, longest, spec)
        else:
            rows = query[decodes:], batch.block_tables[decodes:], batch.contexts[decodes:]
            height = PROMPT_ROWS if in_flash else LEAST_ROWS
            attend(*rows, starts, kv, spec, output[decodes:], rows=height, splits=splits)
    return output


def _dense(x: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]`, copied only if a head is not one run of memory."""
    return x if x.stride(2) == 1 else x.contiguous()


def _attend_flash(states: list[Tensor], starts: Tensor, longest: int, spec: AttentionSpec) -> Tensor:
    """Causal attention of prompts without a past, of at most `longest` tokens: their queries, keys and values. By the
    operator behind `torch.nn.attention.varlen`, whose own signature changes from release to release.
    """
    head_dim = states[0].shape[2]
    if head_dim % FLASH_DIMS_STEP:
        states = [F.pad(x, (0, -head_dim % FLASH_DIMS_STEP)) for x in states]
    attended: Tensor = torch.ops.aten._flash_attention_forward.default(
        *states,
        starts,
        starts,
        longest,
        longest,
        0.0,  # of dropout
        True,  # causal
        False,  # no mask for debugging
        scale=spec.scale,
        window_size_left=-1 if spec.window is None else spec.window - 1,
        window_size_right=0,
    )[0]
    return attended[..., :head_dim]


def store(key: Tensor, value: Tensor, kv: Tensor, slot_blocks: Tensor, slot_offsets: Tensor) -> None:
    """Write `key` and `value`, `[tokens, kv_heads, head_dim]` with the last axis dense, to the tokens' slots.

    kv: one layer of the pool, see `Attention`; both are rounded to its dtype.
    slot_blocks, slot_offsets: `[tokens]` int64. A token whose slot block is negative is stored nowhere.
    """
    tokens, kv_heads, head_dim = key.shape
    pool = (kv.view(torch.uint8), kv.view(torch.int32)) if kv.dtype is FLOAT8 else (kv, None)
    strides = *key.stride()[:2], *value.stride()[:2], *kv.stride()[:3]
    _store[(tokens,)](
        *(key, value, *pool, slot_blocks, slot_offsets, *strides),
        kv_heads=kv_heads,
        head_dim=head_dim,
        columns=kv.shape[4],
        tile_heads=triton.next_power_of_2(kv_heads),
        tile_dims=triton.next_power_of_2(head_dim),
    )


def attend(
    query: Tensor,
    tables: Tensor,
    contexts: Tensor,
    starts: Tensor | None,
    kv: Tensor,
    spec: AttentionSpec,
    output: Tensor,
    *,
    rows: int,
    splits: int | None = None,
) -> None:
    """Attention of the newest tokens of sequences, whose keys and values are in the pool already.

    query: `[tokens, heads, head_dim]`, the last axis dense; tables: `[sequences, max_blocks]` int32; contexts:
    `[sequences]` int32, keys including the queries' own; starts: `Batch.prompt_starts`, None for sequences of one token
    each, of which those with a context of 0 get zeros. kv: one layer of the pool, see `Attention`; it is widened to the
    dtype of the queries. output: `[tokens, heads, head_dim]`, contiguous, is written.

    `rows` is the least height of a tile, a power of two; `splits` the parts that each sequence's keys are cut into, at
    most `MAX_SPLITS`. By default they fill the device, and are the same at every replay of a graph.
    """
    tokens, heads, head_dim = query.shape
    _, _, kv_heads, block_size, columns = kv.shape
    sequences, group = len(contexts), heads // kv_heads
    tile_rows = max(rows, LEAST_ROWS, triton.next_power_of_2(group))
    tile_dims = max(LEAST_ROWS, triton.next_power_of_2(head_dim))
    tall, wide = tile_rows >= TALL_ROWS, tile_dims > WIDE_DIMS
    tile_bytes = SMALL_KEY_TILE_BYTES if tall or query.element_size() == 4 else KEY_TILE_BYTES
    tiles = sequences if starts is None else tokens // (tile_rows // group) + sequences
    if splits is None:
        keys = min(tables.shape[1] * block_size, spec.window or sys.maxsize)
        wanted = -(-PROGRAMS_PER_PROCESSOR * _processors(kv.device) // (tiles * kv_heads))
        splits = max(1, min(wanted, keys // SPLIT_KEYS, MAX_SPLITS))
    sums = peaks = totals = None
    if splits > 1:
        sums = torch.empty(tokens, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        peaks, totals = (torch.empty(sums.shape[:3], dtype=sums.dtype, device=sums.device) for _ in range(2))
    pool = (kv.view(torch.uint8), kv.view(torch.float32)) if kv.dtype is FLOAT8 else (kv, None)
    strides = *query.stride()[:2], tables.stride(0), *kv.stride()[:3]
    _attend[(tiles, kv_heads, splits)](
        *(query, *pool, tables, contexts, starts, output, spec.sinks, sums, peaks, totals, sequences),
        *(*strides, spec.scale, spec.softcap or 1.0),
        capped=spec.softcap is not None,
        window=spec.window or 0,
        group=group,
        head_dim=head_dim,
        columns=columns,
        block_size=block_size,
        tile_rows=tile_rows,
        tile_keys=max(LEAST_ROWS, min(MOST_KEYS, tile_bytes // (tile_dims * query.element_size()))),
        tile_dims=tile_dims,
        num_warps=8 if wide else 4,
        num_stages=1 if wide else TALL_STAGES if tall else STAGES,
    )
    if splits > 1:
        grid, dims = (tokens, heads), triton.next_power_of_2(head_dim)
        parts = sums, peaks, totals, spec.sinks
        _merge[grid](*parts, output, splits, head_dim=head_dim, tile_splits=MAX_SPLITS, tile_dims=dims)


def _processors(device: torch.device) -> int:
    """Multiprocessors of the device; Triton's interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _store(
    key: tl.tensor,
    value: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    slot_blocks: tl.tensor,
    slot_offsets: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_stride: tl.tensor,
    value_offset: tl.tensor,
    head_stride: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_dims: tl.constexpr,
) -> None:
    """One program stores one token: `[kv_heads, head_dim]` of each, padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(slot_blocks + token)
    heads = tl.arange(0, tile_heads)[:, None]
    dims = tl.arange(0, tile_dims)[None, :]
    in_head = (heads < kv_heads) & (block >= 0)
    real = in_head & (dims < head_dim)
    new_key = tl.load(key + token * key_stride + heads * key_head_stride + dims, mask=real, other=0.0)
    new_value = tl.load(value + token * value_stride + heads * value_head_stride + dims, mask=real, other=0.0)
    slot = block * block_stride + tl.load(slot_offsets + token) * columns + heads * head_stride
    _store_rows(pool, scales, slot, new_key, dims, real, in_head, head_dim)
    _store_rows(pool, scales, slot + value_offset, new_value, dims, real, in_head, head_dim)


@triton.jit
def _store_rows(
    pool: tl.tensor,
    scales: tl.tensor,
    slot: tl.tensor,
    states: tl.tensor,
    dims: tl.tensor,
    real: tl.tensor,
    in_head: tl.tensor,
    head_dim: tl.constexpr,
) -> None:
    """Round `[tile_heads, tile_dims]`, zeros where not `real`, to rows of the pool that begin at `slot`."""
    if scales is None:
        tl.store(pool + slot + dims, states.to(pool.dtype.element_ty), mask=real)
    else:
        states = states.to(tl.float32)
        bits = scale_bits(tl.max(magnitude(states), 1)[:, None])
        tl.store(pool + slot + dims, encode(states * inverse(bits)), mask=real)
        tl.store(scales + (slot + head_dim) // 4, bits, mask=in_head)


@triton.jit(
    do_not_specialize=["sequences", "table_stride"], do_not_specialize_on_alignment=["tables", "contexts", "starts"]
)
def _attend(
    query: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    starts: tl.tensor,
    output: tl.tensor,
    sinks: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sequences: tl.tensor,
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
    group: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_dims: tl.constexpr,
) -> None:
    """One program: a tile of queries (axis 0), the query heads of one kv head (axis 1), one split of the keys (axis 2).

    Row `r` of the tile is head `r % group` of the group, of token `r // group` of the tile. Splits write the sum of
    values weighted by `2 ** (score - peak)`, the peak in units of log 2, and the total of the weights; a split that saw
    nothing has a total of 0 and writes no sum.
    """
    tile_tokens: tl.constexpr = tile_rows // group
    sequence, start, first, length = tl.program_id(0), tl.program_id(0), 0, 1
    if starts is not None:
        sequence = _sequence_of(tl.program_id(0), starts, sequences, tile_tokens)
        start = tl.load(starts + sequence)
        first = (tl.program_id(0) - start // tile_tokens - sequence) * tile_tokens
        length = tl.load(starts + sequence + 1) - start
    context = tl.load(contexts + sequence)
    row = tl.arange(0, tile_rows)
    token = first + row // group
    real = (row < tile_tokens * group) & (token < length)
    head = tl.program_id(1) * group + row % group
    dim = tl.arange(0, tile_dims)
    in_tile = real[:, None] & (dim < head_dim)[None, :]
    packed = (start + token).to(tl.int64)
    query_at = query + packed * query_stride + head * query_head_stride
    queries = tl.load(query_at[:, None] + dim[None, :], mask=in_tile, other=0.0)

    position = context - length + token
    end = tl.minimum(context - length + first + tile_tokens, context)
    end = tl.where(first < length, end, 0)  # the last tile of a sequence may have none of its tokens
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
        keys = _load_rows(pool, scales, at, key < end, dim, head_dim).to(queries.dtype)
        values = _load_rows(pool, scales, at + value_offset, key < end, dim, head_dim).to(queries.dtype)
        scores = _scores(queries, keys, scale, softcap, capped)
        seen = key[None, :] <= position[:, None]
        if window:
            seen &= key[None, :] > position[:, None] - window
        peak, total, sum_ = _fold(tl.where(seen, scores, float("-inf")), values, peak, total, sum_)

    at = packed * tl.num_programs(1) * group + head
    if sums is None:
        if sinks is not None:
            sink = tl.load(sinks + head) * _LOG2_E
            highest = tl.maximum(peak, sink)
            kept = tl.exp2(peak - highest)
            total, sum_ = total * kept + tl.exp2(sink - highest), sum_ * kept[:, None]
        attended = sum_ / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(output + at[:, None] * head_dim + dim[None, :], attended, mask=in_tile)
    else:
        at = at * tl.num_programs(2) + tl.program_id(2)
        tl.store(peaks + at, peak, mask=real)
        tl.store(totals + at, total, mask=real)
        in_tile &= (total != 0)[:, None]
        tl.store(sums + at[:, None] * head_dim + dim[None, :], sum_, mask=in_tile)


@triton.jit
def _sequence_of(tile: tl.tensor, starts: tl.tensor, sequences: tl.tensor, tile_tokens: tl.constexpr) -> tl.tensor:
    """Whose tile it is. Those of sequence `i` begin at `starts[i] // tile_tokens + i`: one more each than are full."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // tile_tokens + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _load_rows(
    pool: tl.tensor, scales: tl.tensor, at: tl.tensor, in_context: tl.tensor, dim: tl.tensor, head_dim: tl.constexpr
) -> tl.tensor:
    """The rows of the pool that begin at `at`, `[tile_keys, tile_dims]`; zeros where not `in_context`."""
    mask = in_context[:, None] & (dim < head_dim)[None, :]
    rows = tl.load(pool + at[:, None] + dim[None, :], mask=mask, other=0)
    if scales is not None:
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


@triton.jit(do_not_specialize=["splits"])
def _merge(
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    splits: tl.tensor,
    head_dim: tl.constexpr,
    tile_splits: tl.constexpr,
    tile_dims: tl.constexpr,
) -> None:
    """One program joins the splits of one head of one token; zeros where none saw anything."""
    query = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part = tl.arange(0, tile_splits)
    dims = tl.arange(0, tile_dims)
    at = query * splits + part
    total = tl.load(totals + at, mask=part < splits, other=0.0)
    seen = total != 0  # not-a-number counts, so that it shows
    peak = tl.load(peaks + at, mask=seen, other=float("-inf"))
    highest = tl.max(peak, 0)
    if sinks is not None:
        sink = tl.load(sinks + tl.program_id(1)) * _LOG2_E
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    real = seen[:, None] & (dims < head_dim)[None, :]
    sum_at = sums + at[:, None] * head_dim + dims[None, :]
    joined = tl.sum(tl.load(sum_at, mask=real, other=0.0) * weight[:, None], 0)
    whole = tl.sum(total * weight, 0)
    if sinks is not None:
        whole += tl.exp2(sink - highest)
    joined = joined / tl.where(whole == 0, 1.0, whole)
    tl.store(output + query * head_dim + dims, joined, mask=dims < head_dim)
