"""The input of a run of layers as one page of bytes, for one broadcast."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from app.gpu.kernels.attention.base import Batch
from app.gpu.ranks.orders import Run

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
