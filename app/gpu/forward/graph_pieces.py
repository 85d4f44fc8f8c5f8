"""Runs of layers as few pieces that others can use too, and which of those are worth a graph. Pure: no tensors.

Any boundary may be armed, so any run of layers may be wanted: half the square of their number. Aligned pieces are only
twice their number, and any run is made of a few.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

RECORD_AFTER = 3
"""How often a piece runs without a graph before it has one: to record it takes about as long as that."""


class Piece(NamedTuple):
    """Stages `[lo, hi)` over a batch of up to `bucket` rows."""

    bucket: int
    lo: int
    hi: int

    @property
    def stages(self) -> int:
        """How many there are, which its graph's memory goes with."""
        return self.hi - self.lo


def cut_run(bucket: int, lo: int, hi: int) -> list[Piece]:
    """The pieces of a run, from the lowest up: each has a power of two of stages, and begins at a multiple of that."""
    pieces = []
    while lo < hi:
        size = 1 << ((hi - lo).bit_length() - 1)
        if lo:
            size = min(size, lo & -lo)
        pieces.append(Piece(bucket, lo, lo + size))
        lo += size
    return pieces


class KeptGraphs:
    """Graphs of pieces, with at most `most_stages` stages in all; the one that was replayed last gives way last.

    One that has given way waits as long for a graph as it did at first. So pieces that are too many to be kept cost at
    most twice what they cost without graphs.
    """

    def __init__(self, most_stages: int, record_after: int = RECORD_AFTER) -> None:
        self._most_stages, self._record_after = most_stages, record_after
        self._replays = OrderedDict[Piece, Callable[[], None]]()
        self._wanted = Counter[Piece]()

    @property
    def stages(self) -> int:
        """Of all graphs together."""
        return sum(piece.stages for piece in self._replays)

    def find(self, piece: Piece) -> Callable[[], None] | None:
        """What replays it. None if there is no graph of it, which is noted."""
        replay = self._replays.get(piece)
        if replay is None:
            self._wanted[piece] += 1
        else:
            self._replays.move_to_end(piece)
        return replay

    def due(self) -> Piece | None:
        """The largest piece that has been wanted often enough, and fits."""
        often = [piece for piece, times in self._wanted.items() if times >= self._record_after]
        return max((piece for piece in often if piece.stages <= self._most_stages), key=_size, default=None)

    def make_room(self, piece: Piece) -> None:
        """Let graphs go until there is room for one more."""
        while self._replays and self.stages + piece.stages > self._most_stages:
            self._replays.popitem(last=False)

    def keep(self, piece: Piece, replay: Callable[[], None]) -> None:
        """Keep the graph of a piece that there is room for."""
        self._wanted.pop(piece, None)
        self._replays[piece] = replay

    def drop(self, piece: Piece) -> None:
        """Let the graph of a piece go."""
        del self._replays[piece]


def _size(piece: Piece) -> int:
    return piece.stages
