"""Sessions in the order of their return, and how long it takes to have the KV of each on the device."""

from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from app.domain.values import SessionId
from app.gpu.state.sequence import TokenSequence

Blocks = tuple[int, int]
"""To read from disk, and to copy to the device."""


class ReturnOrder:
    """Return times and blocks are kept in arrays: a look at ten thousand sessions costs as much as at a few."""

    def __init__(self, blocks: Callable[[TokenSequence], Blocks]) -> None:
        """`blocks`: what a restore of the session moves, as long as its KV stays where it is."""
        self._blocks_of = blocks
        self._keys: list[tuple[float, SessionId]] = []
        self._sequences: dict[SessionId, tuple[float, TokenSequence]] = {}
        self._table: npt.NDArray[np.float64] = np.empty((3, 16))
        """A column for each session, and room for more: return time, and blocks of both kinds."""

    @property
    def times(self) -> npt.NDArray[np.float64]:
        """When each returns."""
        return self._table[0, : len(self)]

    @property
    def blocks(self) -> npt.NDArray[np.float64]:
        """A row of the blocks to read from disk, and one of those to copy to the device."""
        return self._table[1:, : len(self)]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[TokenSequence]:
        """In the order of their return, as it was when the look began; one that is removed meanwhile is left out."""
        for _, session in list(self._keys):
            if session in self._sequences:
                yield self._sequences[session][1]

    def add(self, sequence: TokenSequence) -> None:
        """Expect the session at its return time; an earlier expectation is replaced."""
        self.remove(sequence)
        back_at, count = sequence.return_time, len(self)
        if count == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.empty_like(self._table)], axis=1)
        place = bisect_left(self._keys, (back_at, sequence.session))
        self._keys.insert(place, (back_at, sequence.session))
        self._sequences[sequence.session] = back_at, sequence
        self._table[:, place + 1 : count + 1] = self._table[:, place:count]
        self._table[:, place] = back_at, *self._blocks_of(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Expect the session no more."""
        if sequence.session in self._sequences:
            place = self._place(sequence)
            del self._sequences[sequence.session]
            self._delete(place, place + 1)

    def note_moved(self, sequence: TokenSequence) -> None:
        """The session's KV has changed its place or size."""
        if sequence.session in self._sequences:
            self._table[1:, self._place(sequence)] = self._blocks_of(sequence)

    def take(self, count: int) -> list[TokenSequence]:
        """Take out the first `count` of them."""
        taken = [self._sequences.pop(session)[1] for _, session in self._keys[:count]]
        if taken:
            self._delete(0, len(taken))
        return taken

    def _place(self, sequence: TokenSequence) -> int:
        return bisect_left(self._keys, (self._sequences[sequence.session][0], sequence.session))

    def _delete(self, first: int, end: int) -> None:
        count = len(self)
        self._table[:, first : count - (end - first)] = self._table[:, end:count]
        del self._keys[first:end]
