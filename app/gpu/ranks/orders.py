"""What rank 0, which runs the engine, orders of the others. Each has a socket for orders that must keep their turn, and
one for copies each way, which run beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Batch, RowShape
from app.gpu.kernels.linear.base import MatmulPrecision
from app.gpu.state.moves import HalfPass
from app.logs.formats import Log
from app.model_store.resolve import ResolvedModel


@dataclass(frozen=True, slots=True)
class Load:
    """First of all: load a part of the model. Answered by None, or by what is wrong: then the process ends."""

    model: ResolvedModel
    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    products: MatmulPrecision
    attend_in_bfloat16: bool
    batch_invariant: bool
    max_model_len: int
    block_size: int
    kv_dtype: torch.dtype
    threads: int
    """That compute on a CPU."""
    log: Log


@dataclass(frozen=True, slots=True)
class Join:
    """Make room for so many blocks of KV in each tier, and meet the others at `store`. Answered as `Load` is.
    Then other orders follow until the socket closes.
    """

    device_blocks: int
    host_blocks: int
    store: Path


@dataclass(frozen=True, slots=True)
class Run:
    """Run layers `[lo, hi)`. A page with the input is broadcast next."""

    lo: int
    hi: int
    rows: tuple[RowShape, ...]
    decodes: int
    tokens: int
    table_blocks: int
    """Width of the block tables."""


@dataclass(frozen=True, slots=True)
class RunHead:
    """Give logits for so many rows of the residual stream, which are broadcast next."""

    rows: int


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy device blocks, `(source, target)` each, in order."""

    copies: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CopyAcross:
    """Copy blocks between device and host, once `after` orders have been carried out. Answered by None."""

    source: Sequence[int]
    target: Sequence[int]
    after: int
    half: HalfPass


Order = Run | RunHead | CopyBlocks


_ALIGNMENT = 64
"""Bytes: kernels read vectors."""


@dataclass(frozen=True, slots=True)
class Page:
    """Where each tensor of a run is in its page."""

    run: Run
    hidden_size: int
    dtype: torch.dtype
    """Of the residual stream."""

    def pack(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The page, uint8, on the device of `hidden` `[tokens, hidden_size]`."""
        page = self.empty(hidden.device)
        given = (batch.positions, batch.slot_blocks, batch.slot_offsets, batch.block_tables, batch.contexts)
        for place, tensor in zip(self._places(page), (*given, batch.prompt_starts, hidden), strict=True):
            if tensor is not None:
                place.copy_(tensor)
        return page

    def unpack(self, page: Tensor) -> tuple[Tensor, Batch]:
        """The residual stream and the batch of `page`, as views of it."""
        positions, slot_blocks, slot_offsets, tables, contexts, starts, hidden = self._places(page)
        run = self.run
        prompt_starts = starts if len(run.rows) > run.decodes else None
        placed = positions, slot_blocks, slot_offsets, tables, contexts, prompt_starts
        return hidden, Batch(run.rows, run.decodes, *placed)

    def empty(self, device: torch.device) -> Tensor:
        """A page for the same run, uninitialised."""
        last, begin = self._layout()[-1]
        return torch.empty(begin + prod(last[0]) * last[1].itemsize, dtype=torch.uint8, device=device)

    def _layout(self) -> list[tuple[tuple[tuple[int, ...], torch.dtype], int]]:
        """Shape, dtype and first byte of each tensor."""
        rows, run = len(self.run.rows), self.run
        each: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((run.tokens,), torch.int64),
            ((run.tokens,), torch.int64),
            ((run.tokens,), torch.int64),
            ((rows, run.table_blocks), torch.int32),
            ((rows,), torch.int32),
            ((rows - run.decodes + 1,), torch.int32),
            ((run.tokens, self.hidden_size), self.dtype),
        ]
        laid, begin = [], 0
        for shape, dtype in each:
            laid.append(((shape, dtype), begin))
            begin += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return laid

    def _places(self, page: Tensor) -> list[Tensor]:
        return [
            page[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (shape, dtype), begin in self._layout()
        ]
