"""A step's rows as arrays for the device. Block tables are kept from step to step: few of them change.

Recorded work finds its rows in a `FixedBatch`, into which each step is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.domain.values import SessionId
from app.gpu.device.streams import Put
from app.gpu.kernels.attention.base import Batch, RowShape, place_batch
from app.gpu.models.adapters import Additions
from app.gpu.state.blocks import BlockId
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence

LEAST_ROWS = 16
PADDING = (0, 0, -1, 0)
"""Token id, position, slot block and slot offset of a padding row; its context and its block table are 0 (`Batch`)."""
Places = slice | Tensor
"""Of tokens of a step: `[places]` int64 on the device, or a slice, which copies nothing, if they are neighbours."""


def place_runs(runs: Iterable[tuple[int, int]], put: Put) -> Places | None:
    """The places of rising runs of tokens, each from a first one to before an end. None if there are no tokens."""
    runs = [(first, end) for first, end in runs if first < end]
    if not runs:
        return None
    count = sum([end - first for first, end in runs])
    if runs[-1][1] - runs[0][0] == count:
        return slice(runs[0][0], runs[-1][1])
    firsts, ends = np.array(runs).T
    return put(np.arange(count) + np.repeat(ends - (ends - firsts).cumsum(), ends - firsts))


class Batches:
    """Describes rows to the layers. Blocks of sequences are kept as rows of one array, which are written when blocks
    have changed: to compare lists takes a hundredth of the time that NumPy takes to read one.
    """

    def __init__(self, block_size: int, groups: int, adapters: Mapping[str, Additions] = MappingProxyType({})) -> None:
        """A sequence has a block of so many tokens for each of the `groups` of layers in turn. `adapters` are those
        that are loaded, by digest.
        """
        self._block_size, self._groups, self._adapters = block_size, groups, adapters
        self._array: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._places: dict[SessionId, int] = {}
        self._written: list[list[BlockId]] = []
        """By place."""
        self._free: list[int] = []

    def place(self, rows: Sequence[Row], put: Put) -> Batch:
        """The rows in arrays that `put` takes to the device. Those of one token must come first."""
        tables = self.tables_of([row.sequence for row in rows])
        firsts = np.array([row.first for row in rows], np.int64)
        lengths = np.array([row.length for row in rows], np.int64)
        batch = place_batch(firsts, lengths, tables, self._block_size, put, self._groups)
        return replace(batch, adapters=self._place_adapters(rows, put)) if self._adapters else batch

    def _place_adapters(self, rows: Sequence[Row], put: Put) -> list[tuple[Additions, Places]]:
        """The tokens of each adapter's rows."""
        runs, start = dict[str, list[tuple[int, int]]](), 0
        for row in rows:
            if row.sequence.adapter:
                runs.setdefault(row.sequence.adapter, []).append((start, start + row.length))
            start += row.length
        placed = ((self._adapters[digest], place_runs(some, put)) for digest, some in runs.items())
        return [(adapter, places) for adapter, places in placed if places is not None]

    def tables_of(self, sequences: Sequence[TokenSequence]) -> NDArray[np.int32]:
        """`[sequences, blocks]`: each one's blocks, and zeros; as wide as the longest."""
        places, lengths, known, written = list[int](), list[int](), self._places, self._written
        for sequence in sequences:
            blocks, place = sequence.blocks, known.get(sequence.session)
            if place is None or written[place] != blocks:
                place = self._write(sequence.session, blocks, place, sequences)
            places.append(place)
            lengths.append(len(blocks))
        return self._array[places, : max(lengths)]

    def states_of(self, rows: Sequence[Row], count: int) -> NDArray[np.int64]:
        """`[rows, kept, count]`, as `Batch.state_blocks` has them: of each row the `count` blocks of its state, which
        come last, and those of the states behind its drafted tokens. `tables_of` has seen the blocks.
        """
        places = np.array([self._places[row.sequence.session] for row in rows])[:, None, None]
        ends = np.array([len(row.sequence.blocks) for row in rows])[:, None, None]
        drafted = [len(row.draft) for row in rows]
        place = np.arange(1 + max(drafted))[:, None]
        at = ends - (place + 1) * count + np.arange(count)
        blocks = self._array[places, at].astype(np.int64)  # of places that are not: any
        return np.where(place <= np.array(drafted)[:, None, None], blocks, -1) if any(drafted) else blocks

    def _write(
        self, session: SessionId, blocks: list[BlockId], place: int | None, sequences: Sequence[TokenSequence]
    ) -> int:
        """Write a session's row; returns its place. Those of `sequences` keep theirs."""
        if place is None:
            place = self._places[session] = self._take_place(sequences)
        if len(blocks) > self._array.shape[1]:
            self._resize(len(self._written), max(len(blocks), 2 * self._array.shape[1]))
        row, before = self._array[place], self._written[place]
        kept = len(before) if blocks[: len(before)] == before else 0  # mostly a block has been added
        row[kept : len(blocks)] = blocks[kept:]
        row[len(blocks) : len(before)] = 0
        self._written[place] = list(blocks)
        return place

    def _take_place(self, sequences: Sequence[TokenSequence]) -> int:
        """A free row. If there is none, sessions that are not in this step lose theirs; if few do, rows are added."""
        if not self._free:
            here = {sequence.session for sequence in sequences}
            self._free = [self._places.pop(each) for each in list(self._places) if each not in here]
            rows = len(self._written)
            if len(self._free) <= rows // 2:
                more = max(LEAST_ROWS, rows)
                self._free += range(rows, rows + more)
                self._written += [[] for _ in range(more)]
                self._resize(rows + more, self._array.shape[1])
        return self._free.pop()

    def _resize(self, rows: int, width: int) -> None:
        array = np.zeros((rows, width), np.int32)
        array[: self._array.shape[0], : self._array.shape[1]] = self._array
        self._array = array


class FixedBatch:
    """Memory of a batch that stays where it is. Past a row's context, a block table keeps entries of earlier steps."""

    def __init__(self, tokens: int, rows: int, blocks: int, device: torch.device, groups: int) -> None:
        """For so many tokens and rows at most, each of at most `blocks` blocks of each group. All is padding."""
        self._padding = torch.tensor(PADDING, device=device)[:, None]
        self._columns = self._padding.repeat(1, tokens)
        self.token_ids, self.positions, _, self.slot_offsets = self._columns
        self._contexts = torch.zeros(rows, dtype=torch.int32, device=device)
        slots, tables = self._columns[2], torch.zeros(groups, rows, blocks, dtype=torch.int32, device=device)
        self.placed = [(slots if group == 0 else slots.clone(), tables[group]) for group in range(groups)]
        """Slot blocks and block tables of each group."""

    def first(self, tokens: int, decodes: int, rows: tuple[RowShape, ...] = ()) -> Batch:
        """The first `tokens` tokens, in `rows`, as views. No rows: each token is one, and the host knows none of them.
        Whatever reads them then cannot be recorded, and must fail rather than keep what it has read.
        """
        count = len(rows) or tokens
        placed = [(slots[:tokens], tables[:count]) for slots, tables in self.placed]
        return Batch(
            rows=rows,
            decodes=decodes,
            positions=self.positions[:tokens],
            slot_blocks=placed[0][0],
            slot_offsets=self.slot_offsets[:tokens],
            block_tables=placed[0][1],
            contexts=self._contexts[:count],
            others=tuple(placed[1:]),
        )

    def fill(self, token_ids: Tensor, batch: Batch, rows: int) -> None:
        """Copy a step of one token a row in, behind what the device does now. The rest of `rows` becomes padding."""
        count = len(token_ids)
        if self._columns.is_cuda:
            from app.gpu.models.triton_elementwise import fill_inputs  # a CPU needs nothing of Triton

            fill_inputs(token_ids, batch, self._columns, self._contexts, self.placed[0][1], rows)
        else:
            for column, values in enumerate((token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets)):
                self._columns[column, :count].copy_(values)
            self._contexts[:count].copy_(batch.contexts)
            self.placed[0][1][:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
            self.clear(slice(count, rows))
        for (slots, tables), (given, table) in zip(self.placed[1:], batch.others, strict=True):
            slots[:count].copy_(given)
            tables[:count, : table.shape[1]].copy_(table)
            slots[count:rows], tables[count:rows, 0] = -1, 0

    def clear(self, rows: Places) -> None:
        """Make padding of these rows, until they are filled again."""
        self._columns[:, rows] = self._padding
        self._contexts[rows] = 0
        for slots, tables in self.placed:
            slots[rows], tables[rows, 0] = -1, 0
