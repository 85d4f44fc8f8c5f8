"""The tensors that describe one segment's rows to the layers: where each token is, and which keys it may attend to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.gpu.device.staging import Put, put_each


class RowShape(NamedTuple):
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
    """`[rows, max_blocks]` int32: pool blocks of each row in order. Nobody may look at entries past the row's context:
    they are 0, or blocks that the row's sequence has for later.
    """
    contexts: Tensor
    """`[rows]` int32: `RowShape.context` on the device."""


def make_batch(
    spans: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int, device: torch.device
) -> Batch:
    """A batch by itself; see `place_batch`. `spans[i]` is row i's `(first position, token count)`, `tables[i]` the pool
    blocks of its sequence.
    """
    used = [-(-(first + length) // block_size) for first, length in spans]
    padded = np.zeros((len(spans), max(used)), dtype=np.int32)
    for row, (table, count) in enumerate(zip(tables, used, strict=True)):
        padded[row, :count] = table[:count]
    firsts, lengths = np.array(spans, dtype=np.int64).T
    return place_batch(firsts, lengths, padded, block_size, put_each(device))


def place_batch(
    firsts: NDArray[np.int64], lengths: NDArray[np.int64], tables: NDArray[np.int32], block_size: int, put: Put
) -> Batch:
    """Describe rows to the layers, in arrays that `put` takes to the device.

    Row i has `lengths[i]` tokens from position `firsts[i]` on; `tables[i]` are the pool blocks of its sequence, and
    whatever follows them. Rows of one token must come first. Built in NumPy: for so few numbers, waking PyTorch's
    threads costs more than the work.
    """
    starts = np.cumsum(lengths) - lengths
    contexts = firsts + lengths
    decodes = int((lengths == 1).sum())
    if (lengths[:decodes] != 1).any():
        raise ValueError("decode rows must come first")
    width = -(-int(contexts.max()) // block_size)
    row_of_token = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(lengths.sum()) + (firsts - starts)[row_of_token]
    slot_blocks = tables[row_of_token, positions // block_size].astype(np.int64)
    return Batch(
        rows=tuple(map(RowShape, starts.tolist(), lengths.tolist(), contexts.tolist())),
        decodes=decodes,
        positions=put(positions),
        slot_blocks=put(slot_blocks),
        slot_offsets=put(positions % block_size),
        block_tables=put(tables[:, :width]),
        contexts=put(contexts.astype(np.int32)),
    )
