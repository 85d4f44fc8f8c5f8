"""Attention on CPUs: single queries and short chunks in the paged kernel, prompts in PyTorch's own attention."""

import ctypes
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import Batch, RowShape
from app.gpu.attention.cpu_kernels import PADDING, SPLIT, Arguments, attend_kernel
from app.gpu.cpu.openmp import run_on_torch_threads

PAGED_TOKENS = 8
"""Rows of at most so many tokens attend one query at a time in the paged kernel. Measured on contexts of 128 to 2,048:
at 16 it breaks even with gathering the context for PyTorch's attention, at 4 it takes half the time."""
TILE_QUERIES = 128
NO_WINDOW = 1 << 40
"""More keys than any query sees."""


class PagedCpuAttention:
    """See `Attention`. The pool may hold float32, bfloat16 or float16, whatever the dtype of the model: queries attend
    over keys and values as the pool has rounded them. The paged kernel computes in float32.

    `batch_invariant`: prompts attend in the paged kernel too, which is slower. The result of a token is then the same
    to the bit in any batch, and however a prompt is cut into chunks.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._paged_tokens = sys.maxsize if batch_invariant else PAGED_TOKENS

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        key, value, decodes = key.to(kv.dtype), value.to(kv.dtype), batch.decodes
        if decodes == len(batch.rows):
            return _attend_paged(query, (key, value), kv, batch.block_tables, batch.positions, spec)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if decodes:
            new = key[:decodes], value[:decodes]
            output[:decodes] = _attend_paged(query[:decodes], new, kv, batch.block_tables, batch.positions, spec)
        blocks, offsets = batch.slot_blocks[decodes:], batch.slot_offsets[decodes:]
        kv[blocks, 0, :, offsets] = key[decodes:]
        kv[blocks, 1, :, offsets] = value[decodes:]
        for row, table in zip(batch.rows[decodes:], batch.block_tables[decodes:], strict=True):
            tokens = slice(row.start, row.start + row.length)
            if row.length <= self._paged_tokens or spec.softcap is not None:
                tables = table.expand(row.length, -1)
                output[tokens] = _attend_paged(query[tokens], None, kv, tables, batch.positions[tokens], spec)
            else:
                keys, values = _context(row, key[tokens], value[tokens], kv, table)
                output[tokens] = _attend_dense(query[tokens], keys, values, row, spec)
        return output


def batch_invariant_attention() -> PagedCpuAttention:
    """The backend under which a token's result depends on nothing but itself and what it sees."""
    return PagedCpuAttention(batch_invariant=True)


def _attend_paged(
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    kv: Tensor,
    tables: Tensor,
    positions: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Attend with `query` `[queries, heads, head_dim]` at `positions` over the blocks of `tables` `[queries, blocks]`.

    `new` are the queries' own keys and values if they are not in the pool yet; they are written to it.
    """
    queries, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = kv.shape
    wide = _dense_heads(query.float())
    key, value = (_dense_heads(new[0]), _dense_heads(new[1])) if new else (None, None)
    output = torch.empty(wide.shape)
    window = spec.window or NO_WINDOW
    splits = -(-min(tables.shape[1] * block_size, window) // SPLIT)
    workspace = torch.empty(queries * splits * heads * (head_dim + PADDING))
    finished = torch.zeros(queries, dtype=torch.int64)
    block_stride, value_offset, head_stride, *_ = kv.stride()
    arguments = Arguments(
        queries=queries,
        splits=splits,
        window=window,
        heads=heads,
        kv_heads=kv_heads,
        block_size=block_size,
        query=wide.data_ptr(),
        query_stride=wide.stride(0),
        key=0 if key is None else key.data_ptr(),
        key_stride=0 if key is None else key.stride(0),
        value=0 if value is None else value.data_ptr(),
        value_stride=0 if value is None else value.stride(0),
        pool=kv.data_ptr(),
        block_stride=block_stride,
        value_offset=value_offset,
        head_stride=head_stride,
        tables=tables.data_ptr(),
        table_stride=tables.stride(0),
        positions=positions.data_ptr(),
        workspace=workspace.data_ptr(),
        finished=finished.data_ptr(),
        output=output.data_ptr(),
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )
    run_on_torch_threads(attend_kernel(kv.dtype, head_dim).address, ctypes.addressof(arguments))
    return output.to(query.dtype)


def _dense_heads(x: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]`, copied only if the heads of a token are not one run of memory."""
    _, head, element = x.stride()
    return x if (head, element) == (x.shape[2], 1) else x.contiguous()


def _context(row: RowShape, key: Tensor, value: Tensor, kv: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """All keys and values a prefill row may see, each `[kv_heads, context, head_dim]`; `key`, `value` are its own."""
    if row.length == row.context:
        return key.transpose(0, 1), value.transpose(0, 1)
    blocks = kv[table[: -(-row.context // kv.shape[3])]]
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : row.context]
    return keys, values


def _attend_dense(query: Tensor, keys: Tensor, values: Tensor, row: RowShape, spec: AttentionSpec) -> Tensor:
    """`[length, heads, head_dim]` queries over `[kv_heads, context, head_dim]` keys and values."""
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if query.dtype != torch.float32:
        return _attend_tiles(query, keys, values, row, spec)
    mask = None
    if row.length < row.context or (spec.window or NO_WINDOW) < row.context:
        mask = _visible(row.context - row.length, row.length, 0, row.context, spec)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _attend_tiles(query: Tensor, keys: Tensor, values: Tensor, row: RowShape, spec: AttentionSpec) -> Tensor:
    """The same for half types, `TILE_QUERIES` at a time, as oneDNN multiplies these faster than PyTorch's fused
    attention on CPU: a prompt of 1,000 tokens of a 135M model took 0.80 s in all this way, and 1.02 s the other."""
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
