"""The tensors that describe one segment's rows to the layers: where each token is, and what it may attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowShape:
    """One row as host integers: its tokens are `[start, start + length)` of the batch; they see `context` keys.

    `context` counts the row's own tokens too, so the first of them stands at position `context - length`.
    """

    start: int
    length: int
    context: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one segment, decode rows (one token each) first.

    Tokens of all rows are packed along one axis; nothing is padded except `block_tables`.
    """

    rows: tuple[RowShape, ...]
    decodes: int
    """Rows `[0, decodes)` have exactly one token; token `i` of the batch belongs to row `i` for `i < decodes`."""
    positions: Tensor
    """`[tokens]` int64: position of each token in its own sequence."""
    slot_blocks: Tensor
    """`[tokens]` int64: pool block that takes each token's key and value."""
    slot_offsets: Tensor
    """`[tokens]` int64: place inside that block."""
    block_tables: Tensor
    """`[rows, max_blocks]` int32: pool blocks of each row in order; entries past the row's context are 0."""
    contexts: Tensor
    """`[rows]` int32: `RowShape.context` on the device."""


def make_batch(spans: list[tuple[int, int]], tables: list[list[int]], block_size: int, device: torch.device) -> Batch:
    """Describe rows to the layers.

    `spans[i]` is row i's `(first position, token count)`, `tables[i]` the pool blocks of its sequence. Rows of one
    token must come first.
    """
    rows: list[RowShape] = []
    start = 0
    for first, length in spans:
        rows.append(RowShape(start, length, first + length))
        start += length
    decodes = sum(1 for row in rows if row.length == 1)
    if any(row.length != 1 for row in rows[:decodes]):
        raise ValueError("decode rows must come first")
    widths = [-(-row.context // block_size) for row in rows]
    width = max(widths)
    positions = torch.cat([torch.arange(first, first + length) for first, length in spans])
    padded = torch.tensor(
        [table[:used] + [0] * (width - used) for table, used in zip(tables, widths, strict=True)],
        dtype=torch.int32,
    )
    lengths = torch.tensor([row.length for row in rows])
    row_of_token = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    slot_blocks = padded[row_of_token, positions // block_size].to(torch.int64)
    return Batch(
        rows=tuple(rows),
        decodes=decodes,
        positions=positions.to(device),
        slot_blocks=slot_blocks.to(device),
        slot_offsets=(positions % block_size).to(device),
        block_tables=padded.to(device),
        contexts=torch.tensor([row.context for row in rows], dtype=torch.int32).to(device),
    )
