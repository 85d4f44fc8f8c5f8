"""The tensors that describe one segment's rows to the layers: where each token is, and which keys it may attend to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.gpu.device.staging import Put, put_each


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

    The `cuda` attention also takes padding rows, so that a captured graph can run fewer rows than it was captured with:
    decode rows whose context is 0, whose slot block is -1 and whose position and block table are 0. Nothing is stored
    for them and their output is zeros. It reads no `rows` before `decodes`: those of a padded batch may be empty.
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


def make_batch(
    spans: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int, device: torch.device
) -> Batch:
    """A batch by itself; see `place_batch`."""
    return place_batch(spans, tables, block_size, put_each(device))


def place_batch(spans: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int, put: Put) -> Batch:
    """Describe rows to the layers, in arrays that `put` takes to the device.

    `spans[i]` is row i's `(first position, token count)`, `tables[i]` the pool blocks of its sequence. Rows of one
    token must come first. Built in NumPy: for so few numbers, waking PyTorch's threads costs more than the work.
    """
    firsts, lengths = np.array(spans, dtype=np.int64).T
    starts = np.cumsum(lengths) - lengths
    contexts = firsts + lengths
    decodes = int((lengths == 1).sum())
    if (lengths[:decodes] != 1).any():
        raise ValueError("decode rows must come first")
    used = -(-contexts // block_size)
    padded = np.zeros((len(spans), used.max()), dtype=np.int32)
    for row, (table, count) in enumerate(zip(tables, used, strict=True)):
        padded[row, :count] = table[:count]
    row_of_token = np.repeat(np.arange(len(spans)), lengths)
    positions = np.arange(lengths.sum()) + (firsts - starts)[row_of_token]
    slot_blocks = padded[row_of_token, positions // block_size].astype(np.int64)
    return Batch(
        rows=tuple(map(RowShape, starts.tolist(), lengths.tolist(), contexts.tolist())),
        decodes=decodes,
        positions=put(positions),
        slot_blocks=put(slot_blocks),
        slot_offsets=put(positions % block_size),
        block_tables=put(padded),
        contexts=put(contexts.astype(np.int32)),
    )
