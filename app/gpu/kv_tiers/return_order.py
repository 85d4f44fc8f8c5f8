"""Sessions in the order of their return, and how long it takes to have the KV of each on the device."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

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
        self.times: npt.NDArray[np.float64] = np.empty(0)
        self.blocks: npt.NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)

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
        back_at = sequence.return_time
        place = bisect_left(self._keys, (back_at, sequence.session))
        self._keys.insert(place, (back_at, sequence.session))
        self._sequences[sequence.session] = back_at, sequence
        self.times = np.insert(self.times, place, back_at)
        self.blocks = np.insert(self.blocks, place, self._blocks_of(sequence), axis=0)

    def remove(self, sequence: TokenSequence) -> None:
        """Expect the session no more."""
        if sequence.session in self._sequences:
            place = self._place(sequence)
            del self._sequences[sequence.session]
            self._delete(place)

    def note_moved(self, sequence: TokenSequence) -> None:
        """The session's KV has changed its place or size."""
        if sequence.session in self._sequences:
            self.blocks[self._place(sequence)] = self._blocks_of(sequence)

    def take(self, count: int) -> list[TokenSequence]:
        """Take out the first `count` of them."""
        taken = [self._sequences.pop(session)[1] for _, session in self._keys[:count]]
        self._delete(slice(0, count))
        return taken

    def _place(self, sequence: TokenSequence) -> int:
        return bisect_left(self._keys, (self._sequences[sequence.session][0], sequence.session))

    def _delete(self, places: Any) -> None:
        del self._keys[places]
        self.times = np.delete(self.times, places)
        self.blocks = np.delete(self.blocks, places, axis=0)
