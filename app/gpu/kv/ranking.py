"""Who leaves the device first, for how long a session stays while it waits, who comes back first, and how long moves
take. Pure planning.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from app.domain.memory_map import MoveTotals
from app.domain.values import Phase, SessionId
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence

LAPSE_S = 30.0
"""How long a session that is late is still expected at any moment."""
LEAVES_FIRST = {Phase.IDLE: 0, Phase.IO_WAIT: 1, Phase.COMPUTE: 2, Phase.READY: 3}
SOON = LEAVES_FIRST[Phase.READY]

Rank = tuple[int, float]
"""A class, and within it the negated return time, if it counts. Lower ranks leave first."""
ANY_TIME: Rank = 0, -math.inf
"""Of all sessions, where their words do not count."""


def rank(sequence: TokenSequence, now: float, margin_s: float) -> Rank:
    """By phase, and then by return time. A session is back so soon that it may have been prefetched, if it returns
    within twice `margin_s`. The return of a session that is long overdue is unknown.
    """
    late_s = now - sequence.return_time
    if late_s >= LAPSE_S:
        return LEAVES_FIRST[Phase.COMPUTE], -math.inf
    if late_s >= -2 * margin_s:
        return SOON, 0.0
    return LEAVES_FIRST[sequence.phase], -sequence.return_time


class Victims:
    """Sessions on the device, in the order in which they give way as of one moment. Equals keep their order. A
    session that has lost its KV since then is passed over. A prefetch takes no room from those that return soon.
    """

    def __init__(self, ranked: Iterable[tuple[Rank, TokenSequence]]) -> None:
        ordered = sorted(ranked, key=lambda each: each[0])
        self._ranks = [rank for rank, _ in ordered]
        self._sequences = [sequence for _, sequence in ordered]
        self._sums = [0, *accumulate(sequence.held_count for sequence in self._sequences)]
        self._bounds = [bisect_left(self._ranks, (group, -math.inf)) for group in range(SOON + 1)]
        self._firsts = list(self._bounds)
        """Of each class: those before have given way, so what the others hold is a difference of two sums."""

    def blocks(self, back_at: float | None = None) -> int:
        """Blocks of all of them; of those that return after `back_at`, if it is given."""
        return sum(max(0, self._sums[end] - self._sums[first]) for first, end in self._parts(back_at))

    def in_order(self, back_at: float | None = None) -> Iterator[TokenSequence]:
        """All of them; those that return after `back_at`, if it is given."""
        for first, end in self._parts(back_at):
            yield from filter(_can_give_way, self._sequences[first:end])

    def _parts(self, back_at: float | None) -> Iterator[tuple[int, int]]:
        """Where those of each class are that are asked."""
        for group, first in enumerate(self._firsts):
            if back_at is None:
                end = len(self._ranks) if group == SOON else self._bounds[group + 1]
            elif group < SOON:
                end = bisect_left(self._ranks, (group, -back_at))
            else:
                return
            while first < end and not _can_give_way(self._sequences[first]):
                first += 1
            self._firsts[group] = first
            yield first, end


def _can_give_way(sequence: TokenSequence) -> bool:
    return sequence.moving is None and bool(sequence.blocks)


@dataclass(frozen=True, slots=True)
class Gap:
    """A wait that began at `began`, of a kind of which earlier ones took `lengths` seconds, in ascending order.

    Gaps at tools are short with a heavy tail. To leave at once copies KV for gaps that end at once; never to leave
    holds it through those that do not end. What a stay costs is the time that the KV holds the tier, and a move costs
    the time that it does. So it stays for as long as makes their sum least on average, which is the ski-rental problem
    with a known distribution (Karlin et al., *Competitive randomized algorithms for nonuniform problems*, 1994).
    """

    began: float
    lengths: Sequence[float] = ()

    def _longer(self, now: float) -> Sequence[float]:
        """Those of the earlier ones that took longer than this one has by now."""
        return self.lengths[bisect_right(self.lengths, now - self.began) :]

    def leave_at(self, now: float, move_s: float) -> float:
        """When KV should leave a tier, if moves away and back take `move_s`. A wait that is longer than all earlier
        ones may last: then it should by `move_s` after them.
        """
        longer = self._longer(now)
        if not longer:
            return self.began + max(self.lengths, default=0.0) + move_s
        elapsed, count = now - self.began, len(longer)
        costs = [move_s]  # of leaving now, then of leaving once one more of them has ended
        for ended, total in enumerate(accumulate(longer), 1):
            waited = longer[ended - 1] - elapsed
            costs.append((total - ended * elapsed + (count - ended) * (waited + move_s)) / count)
        stays = min(range(count + 1), key=lambda ended: (costs[ended], ended))
        if stays == count:
            return self.began + longer[-1] + move_s
        return now if stays == 0 else self.began + longer[stays - 1]

    def over_at(self, now: float, share: float) -> float | None:
        """By when this share of the waits that have gone on for so long are over; None: none has."""
        longer = self._longer(now)
        return self.began + longer[int(share * len(longer))] if longer else None


Blocks = tuple[int, int]
"""To read from disk, and to copy to the device."""


class ReturnOrder:
    """Sessions in the order of their return. They are prefetched in that order: the link carries one at a time. So each
    prefetch must begin early enough for itself and for all sessions that return no later.

    Return times and blocks are kept in arrays: a look at ten thousand sessions costs as much as at a few.
    """

    next_start = math.inf
    """When the first prefetch must begin, as of the last `take_due`; it may have become later since."""

    def __init__(self, blocks: Callable[[TokenSequence], Blocks]) -> None:
        """`blocks`: what a restore of the session moves, as long as its KV stays where it is."""
        self._blocks_of = blocks
        self._keys: list[tuple[float, SessionId]] = []
        self._sequences: dict[SessionId, tuple[float, TokenSequence]] = {}
        self._table: npt.NDArray[np.float64] = np.empty((3, 16))
        """A column for each session, and room for more: return time, and blocks of both kinds."""

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[TokenSequence]:
        """In the order of their return, as it was when the look began, without those that are removed meanwhile."""
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

    def restore_s(self, block_s: tuple[float, float]) -> float:
        """How long it takes to bring all of them to the device. A block takes `block_s` seconds: from disk, and to the
        device.
        """
        return float(self._table[1:, : len(self)].sum(axis=1) @ block_s) if self else 0.0

    def take_due(
        self, now: float, margin_s: float, block_s: tuple[float, float], *, busy_s: float
    ) -> list[TokenSequence]:
        """Take out the sessions whose prefetch must begin now, in the order of their return.

        They are to be back `margin_s` early, and the link is busy with others for the next `busy_s` seconds.
        """
        if not self:  # NumPy would take as long for none as for a few
            self.next_start = math.inf
            return []
        times, blocks = self._table[0, : len(self)], self._table[1:, : len(self)]
        restored_s = busy_s + np.cumsum(np.asarray(block_s) @ blocks)
        starts = times - margin_s - restored_s
        [late] = np.nonzero(starts <= now)
        due = int(late[-1]) + 1 if len(late) else 0  # those before it are prefetched first
        self.next_start = float(starts[due:].min(initial=math.inf))
        taken = [self._sequences.pop(session)[1] for _, session in self._keys[:due]]
        if taken:
            self._delete(0, due)
        return taken

    def _place(self, sequence: TokenSequence) -> int:
        return bisect_left(self._keys, (self._sequences[sequence.session][0], sequence.session))

    def _delete(self, first: int, end: int) -> None:
        count = len(self)
        self._table[:, first : count - (end - first)] = self._table[:, end:count]
        del self._keys[first:end]


FIRST_GUESS_BYTES_PER_S = {MoveKind.OUT: 4e9, MoveKind.IN: 4e9, MoveKind.TO_DISK: 5e8, MoveKind.FROM_DISK: 5e8}
"""Bandwidths until a move has been measured: those of a slow bus and of a slow solid-state disk."""


class MoveMeter:
    """Totals per kind of move, and estimates from them."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._totals = {kind: MoveTotals() for kind in FIRST_GUESS_BYTES_PER_S}

    def add(self, move: Move, report: Moved) -> None:
        """Count a move that has ended. Early copies do not count: they run only in the time that the model leaves."""
        if move.kind in self._totals and not move.early and report.error is None:
            before = self._totals[move.kind]
            moved = max(len(move.source), len(move.target)) * self._block_bytes - move.half.left_out
            self._totals[move.kind] = MoveTotals(
                before.moves + 1, before.bytes + moved, before.seconds + report.seconds
            )

    def seconds(self, blocks: int, *kinds: MoveKind) -> float:
        """Estimated seconds of moves of so many blocks, one of each kind after the other."""
        seen = [(self._totals[kind], FIRST_GUESS_BYTES_PER_S[kind]) for kind in kinds]
        speeds = (each.bytes / each.seconds if each.seconds else guess for each, guess in seen)
        return sum(blocks * self._block_bytes / speed for speed in speeds)

    def totals(self) -> Mapping[str, MoveTotals]:
        """By the name of the kind."""
        return {kind.value: total for kind, total in self._totals.items()}
