"""A Triton kernel that copies a step into the inputs of recorded graphs: one launch instead of nine."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.attention.base import Batch

TILE = 256
"""Blocks of a row that are copied at once."""


def fill_inputs(token_ids: Tensor, batch: Batch, columns: Tensor, contexts: Tensor, tables: Tensor, rows: int) -> None:
    """Write a step of one token a row, and padding up to `rows`; the rest of each block table stays as it is.

    token_ids: `[count]` int64, of the `batch`, with at most `rows` rows.
    columns: `[4, most rows]` int64: token ids, positions, slot blocks, slot offsets; contexts: `[most rows]` int32;
    tables: `[most rows, blocks]` int32, at least as wide as the batch's. Each is dense.
    """
    count, width = batch.block_tables.shape
    with torch.cuda.device_of(columns):
        _fill[(rows,)](
            token_ids,
            batch.positions,
            batch.slot_blocks,
            batch.slot_offsets,
            batch.contexts,
            batch.block_tables,
            columns,
            contexts,
            tables,
            count,
            width,
            columns.shape[1],
            tables.shape[1],
            tile=TILE,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["count", "width", "most_rows", "table_stride"])
def _fill(
    token_ids: tl.tensor,
    positions: tl.tensor,
    slot_blocks: tl.tensor,
    slot_offsets: tl.tensor,
    given_contexts: tl.tensor,
    given_tables: tl.tensor,
    columns: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    most_rows: tl.tensor,
    table_stride: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """One program has one row: a given one, or one of padding (`PADDING`)."""
    row = tl.program_id(0)
    given = row < count
    tl.store(columns + row, tl.load(token_ids + row, mask=given, other=0))
    tl.store(columns + most_rows + row, tl.load(positions + row, mask=given, other=0))
    tl.store(columns + 2 * most_rows + row, tl.load(slot_blocks + row, mask=given, other=-1))
    tl.store(columns + 3 * most_rows + row, tl.load(slot_offsets + row, mask=given, other=0))
    tl.store(contexts + row, tl.load(given_contexts + row, mask=given, other=0))
    source, target = given_tables + row.to(tl.int64) * width, tables + row.to(tl.int64) * table_stride
    tl.store(target, 0, mask=row >= count)
    for first in range(0, width, tile):
        at = first + tl.arange(0, tile)
        real = given & (at < width)
        tl.store(target + at, tl.load(source + at, mask=real, other=0), mask=real)
