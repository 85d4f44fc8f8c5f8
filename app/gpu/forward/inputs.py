"""A step's rows as arrays for the device. Block tables are kept from step to step: few of them change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.domain.values import SessionId
from app.gpu.device.streams import Put
from app.gpu.kernels.attention.base import Batch, place_batch
from app.gpu.state.blocks import BlockId
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence

LEAST_ROWS = 16


class Batches:
    """Describes rows to the layers. Blocks of sequences are kept as rows of one array. A row is written when its
    sequence's blocks are not those that it was written with: to compare lists of the same numbers takes a hundredth of
    the time that NumPy takes to read one.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
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
        return place_batch(firsts, lengths, tables, self.block_size, put)

    def tables_of(self, sequences: Sequence[TokenSequence]) -> NDArray[np.int32]:
        """`[sequences, blocks]`: each one's blocks, and zeros; as wide as the longest."""
        places, known, written = list[int](), self._places, self._written
        width = 0
        for sequence in sequences:
            blocks, place = sequence.blocks, known.get(sequence.session)
            if place is None or written[place] != blocks:
                place = self._write(sequence.session, blocks, place, sequences)
            places.append(place)
            width = max(width, len(blocks))
        return self._array[places, :width]

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
