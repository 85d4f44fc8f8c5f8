"""The tensors that recorded decode steps read: always the same ones, filled anew before each replay."""

from __future__ import annotations

import torch
from torch import Tensor

from app.gpu.batch import Batch

PADDING = (0, 0, -1, 0)
"""Token id, position, slot block and slot offset of a padding row; its context and its block table are 0 (`Batch`)."""


class DecodeInputs:
    """Room for `rows` rows of one token, each of at most `blocks` blocks. Steps recorded with n rows read the first n.

    Block tables keep entries of earlier steps past a row's context, where no attention may look.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self._padding = torch.tensor(PADDING, device=device)[:, None]
        self._columns = self._padding.repeat(1, rows)
        """`[4, rows]` int64: token ids, positions, slot blocks, slot offsets."""
        self._contexts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)

    def first(self, rows: int) -> tuple[Tensor, Batch]:
        """Token ids and batch of the first `rows` rows, as views. The batch has no rows on the host: whatever reads
        them cannot be recorded, and must fail rather than keep what it has read.
        """
        token_ids, positions, slot_blocks, slot_offsets = (column[:rows] for column in self._columns)
        return token_ids, Batch(
            rows=(),
            decodes=rows,
            positions=positions,
            slot_blocks=slot_blocks,
            slot_offsets=slot_offsets,
            block_tables=self._tables[:rows],
            contexts=self._contexts[:rows],
        )

    def fill(self, token_ids: Tensor, batch: Batch, rows: int) -> None:
        """Copy a step in, behind what the device does now, and make padding of what is left of the first `rows`."""
        count, width = batch.block_tables.shape
        given = (token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets)
        for column, values in enumerate(given):
            self._columns[column, :count].copy_(values)
        self._contexts[:count].copy_(batch.contexts)
        self._tables[:count, :width].copy_(batch.block_tables)
        if count < rows:
            self._columns[:, count:rows] = self._padding
            self._contexts[count:rows] = 0
            self._tables[count:rows, 0] = 0
