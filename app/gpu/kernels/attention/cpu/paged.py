"""Attention on CPUs: single queries and short chunks in the paged kernel, prompts in a kernel with tiles of queries."""

import sys
from itertools import takewhile

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec
from app.gpu.kernels.attention.batch import Batch, RowShape
from app.gpu.kernels.attention.cpu.kernels import PADDING, SPLIT, Arguments, attend_kernel
from app.gpu.kernels.attention.cpu.prompts import PlacedPrompts, attend_prompts
from app.gpu.kernels.attention.cpu.store import store
from app.gpu.kernels.attention.pool_rows import FLOAT8, from_rows
from app.gpu.kernels.cpu.openmp import run_on_torch_threads

PAGED_TOKENS = 8
"""Rows of at most so many tokens attend one query at a time in the paged kernel, where each has the bits of a single
one. Chosen when prompts attended in PyTorch: gathering their context broke even at 16 tokens, on contexts of 128 to
2,048. The prompts' kernel has not been compared with it."""
TILE_QUERIES = 128
NO_WINDOW = 1 << 40
"""More keys than any query sees."""


class PagedCpuAttention:
    """See `Attention`. Under queries of float32 the pool may hold float32, bfloat16, float16 or float8; both kernels
    compute in float32, over keys and values as the pool has rounded them, those of the batch included. Under queries of
    a half type it holds that type, or float8.

    `in_bfloat16`: what prompts multiply is rounded to bfloat16, and summed in float32.
    `batch_invariant`: prompts attend in the paged kernel too, in float32, which is slower. The result of a token is
    then the same to the bit in any batch, and however a prompt is cut into chunks.
    """

    def __init__(self, *, batch_invariant: bool = False, in_bfloat16: bool = False) -> None:
        self._in_bfloat16 = in_bfloat16
        self._paged_tokens = sys.maxsize if batch_invariant else PAGED_TOKENS

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        if query.dtype is not torch.float32 and kv.dtype is not FLOAT8:
            key, value = key.to(kv.dtype), value.to(kv.dtype)
        store(_dense_heads(key), _dense_heads(value), kv, batch.slot_blocks, batch.slot_offsets)
        short = count_short(batch, self._paged_tokens)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        first = batch.rows[short].start if short < len(batch.rows) else len(query)
        if first:
            tables = token_tables(batch, short)
            _attend_paged(query[:first], kv, tables, batch.positions[:first], spec, output[:first])
        prompts = list[int]()
        for index, row in enumerate(batch.rows[short:], short):
            tokens = slice(row.start, row.start + row.length)
            half = query.dtype is not torch.float32
            if row.length <= self._paged_tokens or (half and spec.softcap is not None):
                tables = batch.block_tables[index].expand(row.length, -1)
                _attend_paged(query[tokens], kv, tables, batch.positions[tokens], spec, output[tokens])
            elif not half:
                prompts.append(index)
            else:
                keys, values = _context(row, key[tokens], value[tokens], kv, batch.block_tables[index])
                output[tokens] = _attend_tiles(query[tokens], keys, values, row, spec)
        if prompts:
            rows = [batch.rows[index] for index in prompts]
            placed = PlacedPrompts(rows, prompts, heads=query.shape[1], kv_heads=kv.shape[2], head_dim=query.shape[2])
            attend_prompts(
                _dense_heads(query), kv, placed, batch.block_tables, spec, output, in_bfloat16=self._in_bfloat16
            )
        return output


def count_short(batch: Batch, most: int = PAGED_TOKENS) -> int:
    """How many of the first rows have at most so many tokens. None after them has one token, few have few."""
    return sum(1 for _ in takewhile(lambda row: row.length <= most, batch.rows))


def token_tables(batch: Batch, rows: int) -> Tensor:
    """The block table of each token of the first `rows` rows, `[tokens, blocks]` int32."""
    if batch.decodes >= rows:
        return batch.block_tables[:rows] if batch.rows else batch.block_tables
    lengths = torch.tensor([row.length for row in batch.rows[:rows]])
    return batch.block_tables[:rows].repeat_interleave(lengths, dim=0)


def batch_invariant_attention() -> PagedCpuAttention:
    """The backend under which a token's result depends on nothing but itself and what it sees."""
    return PagedCpuAttention(batch_invariant=True)


def bfloat16_attention() -> PagedCpuAttention:
    """The backend of models whose matrices are multiplied in bfloat16."""
    return PagedCpuAttention(in_bfloat16=True)


def _attend_paged(
    query: Tensor, kv: Tensor, tables: Tensor, positions: Tensor, spec: AttentionSpec, output: Tensor
) -> None:
    """Attend with `query` `[queries, heads, head_dim]` at `positions`, over blocks of `tables` `[queries, blocks]`, to
    `output`, dense, of the query's shape and dtype.
    """
    queries, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = kv.shape
    wide = _dense_heads(query.float())
    attended = output if output.dtype is torch.float32 else torch.empty(wide.shape)
    window = spec.window or NO_WINDOW
    splits = -(-min(tables.shape[1] * block_size, window) // SPLIT)
    workspace = torch.empty(queries * splits * heads * (head_dim + PADDING))
    finished = torch.zeros(queries, dtype=torch.int64)
    block_stride, value_offset, head_stride, *_ = kv.stride()
    arguments = Arguments(
        queries=queries,
        window=window,
        heads=heads,
        kv_heads=kv_heads,
        block_size=block_size,
        query=wide.data_ptr(),
        query_stride=wide.stride(0),
        pool=kv.data_ptr(),
        block_stride=block_stride,
        value_offset=value_offset,
        head_stride=head_stride,
        tables=tables.data_ptr(),
        table_stride=tables.stride(0),
        positions=positions.data_ptr(),
        workspace=workspace.data_ptr(),
        finished=finished.data_ptr(),
        output=attended.data_ptr(),
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )
    run_on_torch_threads(attend_kernel(kv.dtype, head_dim).address, arguments)
    if attended is not output:
        output.copy_(attended)


def _dense_heads(x: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]`, copied only if the heads of a token are not one run of memory."""
    _, head, element = x.stride()
    return x if (head, element) == (x.shape[2], 1) else x.contiguous()


def _context(row: RowShape, key: Tensor, value: Tensor, kv: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """All keys and values a prefill row may see, each `[kv_heads, context, head_dim]`; `key`, `value` are its own."""
    if row.length == row.context and kv.dtype is not FLOAT8:
        return key.transpose(0, 1), value.transpose(0, 1)
    blocks = kv[table[: -(-row.context // kv.shape[3])]]
    keys, values = from_rows(blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : row.context], key.dtype)
    return keys, values


def _attend_tiles(query: Tensor, keys: Tensor, values: Tensor, row: RowShape, spec: AttentionSpec) -> Tensor:
    """`[length, heads, head_dim]` queries of half types over `[kv_heads, context, head_dim]` keys and values,
    `TILE_QUERIES` at a time: oneDNN multiplies these faster than PyTorch's fused attention on CPU. A prompt of 1,000
    tokens of a 135M model took 0.80 s in all this way, and 1.02 s the other.
    """
    length, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start in range(0, length, TILE_QUERIES):
        count = min(TILE_QUERIES, length - start)
        first = row.context - row.length + start
        lo, hi = max(0, first + 1 - (spec.window or NO_WINDOW)), first + count
        tile = (query[start : start + count].transpose(0, 1) * spec.scale).reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(tile, keys[:, lo:hi].transpose(1, 2)).view(heads, count, hi - lo)
        seen_by_all = first - lo if spec.window is None else 0
        hidden = ~_visible(first, count, lo + seen_by_all, hi, spec)
        scores[:, :, seen_by_all:].masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, dim=-1).view(kv_heads, -1, hi - lo)  # sums in float32, whatever it is given
        attended = torch.matmul(weights, values[:, lo:hi]).view(heads, count, head_dim)
        output[start : start + count] = attended.transpose(0, 1)
    return output


def _visible(first: int, count: int, lo: int, hi: int, spec: AttentionSpec) -> Tensor:
    """`[count, hi - lo]` bool: which keys `[lo, hi)` the queries at positions `[first, first + count)` see."""
    keys = torch.arange(lo, hi)
    queries = torch.arange(first, first + count)[:, None]
    visible = keys <= queries
    if spec.window is not None:
        visible &= keys > queries - spec.window
    return visible
