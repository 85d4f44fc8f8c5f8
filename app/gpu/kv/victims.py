"""Sessions without a turn whose KV is on the device, in the order in which they give way. Pure planning."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import itemgetter
from typing import Self

from app.domain.values import Phase
from app.gpu.state.sequence import TokenSequence

LAPSE_S = 30.0
"""How long a session that is late is still expected at any moment."""
_EVICTED_FIRST = {Phase.IDLE: 0, Phase.IO_WAIT: 1, Phase.COMPUTE: 2, Phase.READY: 3}
_SOON = _EVICTED_FIRST[Phase.READY]

_Ranked = tuple[float, TokenSequence]
"""The negated return time, if it counts, and the session."""


class Victims:
    """Sessions as they were at one moment. One that has lost its KV since then is passed over."""

    def __init__(self, groups: Iterable[list[_Ranked]]) -> None:
        """A prefetch takes no room from the group of those that return soon, which is the fourth."""
        self._groups = [_Group(ranked) for ranked in groups]

    @classmethod
    def in_given_order(cls, sequences: Iterable[TokenSequence]) -> Self:
        """As they come. Nobody has said when any of them returns, so each may give way to a prefetch."""
        return cls([[(-math.inf, sequence) for sequence in sequences]])

    @classmethod
    def by_return(cls, sequences: Iterable[TokenSequence], now: float, margin_s: float) -> Self:
        """By phase, and then by return time. Equals keep their order. A session is back so soon that it may have been
        prefetched, if it returns within twice `margin_s`. The return of a session that is long overdue is unknown.
        """
        groups: list[list[_Ranked]] = [[] for _ in _EVICTED_FIRST]
        for sequence in sequences:
            back_at = sequence.return_time
            if now - back_at >= LAPSE_S:
                groups[_EVICTED_FIRST[Phase.COMPUTE]].append((-math.inf, sequence))
            elif now - back_at >= -2 * margin_s:
                groups[_SOON].append((0.0, sequence))
            else:
                groups[_EVICTED_FIRST[sequence.phase]].append((-back_at, sequence))
        return cls(sorted(group, key=itemgetter(0)) for group in groups)

    def blocks(self, back_at: float | None = None) -> int:
        """Blocks of all of them; of those that return after `back_at`, if it is given."""
        return sum(group.blocks(end) for group, end in self._parts(back_at))

    def in_order(self, back_at: float | None = None) -> Iterator[TokenSequence]:
        """All of them; those that return after `back_at`, if it is given."""
        for group, end in self._parts(back_at):
            yield from group.in_order(end)

    def _parts(self, back_at: float | None) -> Iterator[tuple[_Group, int]]:
        if back_at is None:
            return ((group, len(group.sequences)) for group in self._groups)
        return ((group, group.returning_after(back_at)) for group in self._groups[:_SOON])


class _Group:
    """Sessions of one rank. Those before `_first` have given way: what the others hold is a difference of two sums."""

    def __init__(self, ranked: list[_Ranked]) -> None:
        self._ranks = [rank for rank, _ in ranked]
        self.sequences = [sequence for _, sequence in ranked]
        self._sums = [0, *accumulate(len(sequence.blocks) for sequence in self.sequences)]
        self._first = 0

    def returning_after(self, back_at: float) -> int:
        return bisect_left(self._ranks, -back_at)

    def blocks(self, end: int) -> int:
        while self._first < end and not _can_give_way(self.sequences[self._first]):
            self._first += 1
        return max(0, self._sums[end] - self._sums[self._first])

    def in_order(self, end: int) -> Iterator[TokenSequence]:
        return (sequence for sequence in self.sequences[self._first : end] if _can_give_way(sequence))


def _can_give_way(sequence: TokenSequence) -> bool:
    return sequence.moving is None and bool(sequence.blocks)
