"""Attention on CPUs: single queries and short chunks in the paged kernel, prompts in PyTorch's own attention."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.cpu_kernels import ARGUMENTS, PADDING, SPLIT, attend_kernel
from app.gpu.batch import Batch, RowShape
from app.gpu.openmp import run_on_torch_threads

PAGED_TOKENS = 8
"""Rows of at most so many tokens attend one query at a time in the paged kernel. Measured: at 16 it breaks even with gathering
the context for PyTorch's attention, at 4 it takes half the time."""

NO_WINDOW = 1 << 40


class PagedCpuAttention:
    """See `Attention`. Scores, softmax and sums are float32 whatever the pool holds: float32, bfloat16 or float16."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """See `Attention.__call__`."""
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        decodes = batch.decodes
        if decodes:
            stored = (_dense_heads(key[:decodes]), _dense_heads(value[:decodes]))
            _attend_paged(query[:decodes], stored, kv, batch.block_tables, batch.positions, spec, output[:decodes])
        if decodes == len(batch.rows):
            return output
        blocks, offsets = batch.slot_blocks[decodes:], batch.slot_offsets[decodes:]
        kv[blocks, 0, :, offsets] = key[decodes:]
        kv[blocks, 1, :, offsets] = value[decodes:]
        for index, row in enumerate(batch.rows[decodes:], decodes):
            tokens = slice(row.start, row.start + row.length)
            if row.length <= PAGED_TOKENS or spec.softcap is not None:
                table = batch.block_tables[index].expand(row.length, -1)
                _attend_paged(query[tokens], None, kv, table, batch.positions[tokens], spec, output[tokens])
            else:
                keys, values = _context(row, tokens, key, value, kv, batch.block_tables[index])
                output[tokens] = _attend_dense(query[tokens], keys, values, row, spec)
        return output


def _attend_paged(
    query: Tensor,
    stored: tuple[Tensor, Tensor] | None,
    kv: Tensor,
    tables: Tensor,
    positions: Tensor,
    spec: AttentionSpec,
    output: Tensor,
) -> None:
    """Attend with `query` `[queries, heads, head_dim]` at `positions` `[queries]` over the blocks of `tables`
    `[queries, blocks]`, into `output`. `stored` are the queries' own keys and values, to be written to their slots first."""
    queries, heads, head_dim = query.shape
    query = _dense_heads(query.float())
    exact = output if output.dtype == torch.float32 else torch.empty(query.shape)
    window = spec.window or NO_WINDOW
    splits = -(-min(tables.shape[1] * kv.shape[3], window) // SPLIT)
    workspace = torch.empty(queries * splits * heads * (head_dim + PADDING))
    finished = torch.zeros(queries, dtype=torch.int64)
    key, value = (None, None) if stored is None else stored
    arguments = np.array(
        (
            *(0, queries, splits, heads, kv.shape[2], kv.shape[3], window),
            *(query.data_ptr(), query.stride(0)),
            *((0, 0) if key is None else (key.data_ptr(), key.stride(0))),
            *((0, 0) if value is None else (value.data_ptr(), value.stride(0))),
            *(kv.data_ptr(), kv.stride(0), kv.stride(1), kv.stride(2)),
            *(tables.data_ptr(), tables.stride(0), positions.data_ptr()),
            *(workspace.data_ptr(), finished.data_ptr(), exact.data_ptr()),
            *(spec.scale, spec.softcap or 0.0),
        ),
        dtype=ARGUMENTS,
    )
    run_on_torch_threads(attend_kernel(kv.dtype, head_dim).address, arguments.ctypes.data)
    if exact is not output:
        output.copy_(exact)


def _dense_heads(x: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]`, copied only if the heads of a token are not one run of memory."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _context(
    row: RowShape, tokens: slice, key: Tensor, value: Tensor, kv: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """All keys and values that a prefill row may see, each `[kv_heads, context, head_dim]`."""
    if row.length == row.context:
        return key[tokens].transpose(0, 1), value[tokens].transpose(0, 1)
    blocks = kv[table[: -(-row.context // kv.shape[3])]]
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : row.context]
    return keys, values


def _attend_dense(query: Tensor, keys: Tensor, values: Tensor, row: RowShape, spec: AttentionSpec) -> Tensor:
    """`[length, heads, head_dim]` queries over `[kv_heads, context, head_dim]` keys and values."""
    mask = None
    if row.length < row.context or (spec.window or NO_WINDOW) < row.context:
        mask = _visible(row, spec)
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


def _visible(row: RowShape, spec: AttentionSpec) -> Tensor:
    """`[length, context]` bool: which keys each of the row's queries sees."""
    keys = torch.arange(row.context)
    queries = keys[row.context - row.length :, None]
    visible = keys <= queries
    if spec.window is not None:
        visible &= keys > queries - spec.window
    return visible
