"""What an attention backend is called with: a segment's rows, their place in the pool of KV, and what a layer asks for.

The keys, or the values, of one head of one token are a row of the pool, of `columns` elements. In float8 it is
`head_dim` numbers, then their scale as float32. Each row has its own scale, inside the block, so nothing that is stored
later can change it: its bits are the same however a prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.points import Point
from app.gpu.device.hardware import dtype_name
from app.gpu.device.streams import Put, put_each
from app.gpu.kernels.linear.encodings import float8_parts, float8_rows, widen_float8
from app.gpu.state.kv_header import SCALE_BYTES, row_columns

FLOAT8 = torch.float8_e4m3fn


class RowShape(Struct, frozen=True):  # hundreds are made a step: a tuple takes three times as long
    """One row as host integers: its tokens are `[start, start + length)` of the batch; they see `context` keys, which
    are their own too: the first stands at position `context - length`.
    """

    start: int
    length: int
    context: int


class Taps(Protocol):
    """Sees what layers compute at points at which something is to be done, and may change it in place. A layer tells of
    each of its points while its tensor is whole, is needed as it is, and is not read as anything else.
    """

    @property
    def points(self) -> frozenset[Point]:
        """Those at which something is done. Others need not be told of."""

    def of_row(self, index: int) -> Taps:
        """For a batch of row `index` alone."""

    def enter(self, hidden: Tensor) -> None:
        """The layer is about to take `hidden` `[tokens, hidden_size]`."""

    def __call__(self, point: Point, x: Tensor, order: Tensor | None = None) -> None:
        """`x` is `[tokens, width]` or `[tokens, heads, head_dim]`, of any strides with the last one dense. A head in
        the order of a checkpoint is `head[order]`, int64.
        """

    def experts(self, ids: Tensor, weights: Tensor, count: int) -> None:
        """Which of `count` experts each token visits, and with which weights, `[tokens, visits]` each."""

    def state(self, read: Callable[[Tensor], Tensor], states: Tensor) -> None:
        """`read` makes of `states` `[rows, bytes]` uint8 what a recurrent layer remembers of each row behind its last
        token, float32 `[rows, numbers]`.
        """

    def pattern(self, query: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec) -> None:
        """What `Attention` was called with, of a batch whose keys have been stored."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one segment, decode rows (one token each) first. Tokens of all rows are packed along one axis.

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
    """`[rows, max_blocks]` int32: pool blocks of each row in order, and past its context anything that is a block."""
    contexts: Tensor
    """`[rows]` int32: `RowShape.context` on the device."""
    prompt_starts: Tensor | None = None
    """`[prompts + 1]` int32: where the tokens of each row behind the decode rows begin, from 0 on, and their number."""
    states: Tensor | None = None
    """`[rows, state bytes]` uint8: what folding layers remember of each row, which they replace, if there are any; with
    `state_blocks` those are `[blocks, block bytes]`.
    """
    token_ids: Tensor | None = None
    """`[tokens]` int64, for layers that look at them. None where a layer is run by itself."""
    adapters: Sequence[tuple[Any, Any]] = field(default=(), kw_only=True)
    """Which tokens are of a session with a LoRA adapter: `models.adapters.Sites.rows`."""
    state_blocks: Tensor | None = field(default=None, kw_only=True)
    """`[rows, kept, blocks]` int64: in which blocks of `states` each row's state is, one behind the other. Behind a row
    with drafted tokens all that may come to be its state are kept: where the first is it began, and the others are
    behind each of its last tokens in turn. A row that keeps fewer has -1 there.
    """
    taps: Taps | None = field(default=None, kw_only=True)
    """Where something is to be done inside the one layer that the batch is for."""
    others: tuple[tuple[Tensor, Tensor], ...] = field(default=(), kw_only=True)
    """`slot_blocks` and `block_tables` of each group of layers but the first (`layer_state.Groups`)."""

    def by_group(self) -> list[Batch]:
        """What layers of each group are called with."""
        others = (replace(self, slot_blocks=slots, block_tables=tables, others=()) for slots, tables in self.others)
        return [self, *others]


def make_batch(
    spans: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
    groups: int = 1,
) -> Batch:
    """A batch by itself. `spans[i]` is row i's `(first position, token count)`, `tables[i]` its sequence's blocks."""
    used = [-(-(first + length) // block_size) * groups for first, length in spans]
    padded = np.zeros((len(spans), max(used)), dtype=np.int32)
    for row, (table, count) in enumerate(zip(tables, used, strict=True)):
        padded[row, :count] = table[:count]
    firsts, lengths = np.array(spans, dtype=np.int64).T
    return place_batch(firsts, lengths, padded, block_size, put_each(device), groups)


def place_batch(
    firsts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tables: NDArray[np.int32],
    block_size: int,
    put: Put,
    groups: int = 1,
) -> Batch:
    """Describe rows to the layers, in arrays that `put` takes to the device. Row i has `lengths[i]` tokens from
    position `firsts[i]` on; `tables[i]` are the blocks of its sequence, one for each of the `groups` of layers in turn,
    and whatever follows them. Rows of one token must come first. Built in NumPy: for so few numbers, waking PyTorch's
    threads costs more than the work.
    """
    starts = np.cumsum(lengths) - lengths
    contexts = firsts + lengths
    decodes = int((lengths == 1).sum())
    if (lengths[:decodes] != 1).any():
        raise ValueError("decode rows must come first")
    width = -(-int(contexts.max()) // block_size)
    row_of_token, positions = np.arange(len(lengths)), firsts
    if decodes < len(lengths):
        row_of_token = np.repeat(row_of_token, lengths)
        positions = np.arange(len(row_of_token)) + (firsts - starts)[row_of_token]
    prompt_starts = np.append(starts[decodes:], len(positions)) - decodes
    stripes, ends = positions // block_size * groups, width * groups
    placed = [
        (put(tables[row_of_token, stripes + group].astype(np.int64)), put(tables[:, group:ends:groups]))
        for group in range(groups)
    ]
    return Batch(
        rows=tuple(map(RowShape, starts.tolist(), lengths.tolist(), contexts.tolist())),
        decodes=decodes,
        positions=put(positions),
        slot_blocks=placed[0][0],
        slot_offsets=put(positions % block_size),
        block_tables=placed[0][1],
        contexts=put(contexts.astype(np.int32)),
        prompt_starts=put(prompt_starts.astype(np.int32)) if len(prompt_starts) > 1 else None,
        others=tuple(placed[1:]),
    )


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention needs beside its tensors. `scale` multiplies the scores. `window` is the number of most
    recent keys a query sees, itself included (None: all). `softcap` bounds scores to `softcap * tanh(score / softcap)`
    as Gemma 2 does (None: off). `sinks`, `[heads]` float32, are scores that take part in each softmax and have no
    value, as in gpt-oss (Xiao et al., arXiv:2309.17453).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Batch, AttentionSpec], Tensor]
"""A backend, of a query, key, value, kv, batch and spec, that keeps nothing between calls. It writes keys and values at
the batch's slots of `kv`, then attends causally.

query: `[tokens, heads, head_dim]`; key, value: `[tokens, kv_heads, head_dim]`;
kv: one layer of the pool, `[blocks, 2, kv_heads, block_size, columns]`, any strides with the last two dense. Its dtype
is that of the queries, or a half type under float32, or float8; see above. Keys and values are rounded to it, to
nearest even, and queries see what the pool holds, of their own batch too.
`heads` is a multiple of `kv_heads`; query head h reads key head `h // (heads // kv_heads)`.
Returns `[tokens, heads, head_dim]`, contiguous.
"""


def require_rows(dtype: torch.dtype, head_dim: int) -> None:
    """Raise FieldOutOfRange if rows of such heads cannot be of `dtype`: scales lie on whole words."""
    if dtype is FLOAT8 and head_dim % SCALE_BYTES:
        raise FieldOutOfRange(
            f"kv_dtype: float8 needs heads of a multiple of {SCALE_BYTES} numbers; this model's have {head_dim}",
            param="kv_dtype",
        )


def columns_of(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row."""
    return row_columns(head_dim, dtype_name(dtype))


def to_rows(states: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., head_dim]` of any float type as rows of `dtype`, `[..., columns]`, to nearest even."""
    return float8_rows(states).view(FLOAT8) if dtype is FLOAT8 else states.to(dtype)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What rows `[..., columns]` stand for, `[..., head_dim]` of `dtype`."""
    if rows.dtype is not FLOAT8:
        return rows.to(dtype)
    return widen_float8(*float8_parts(rows.view(torch.uint8)), dtype)
