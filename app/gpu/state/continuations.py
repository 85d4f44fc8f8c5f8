"""Which entry of a log of edits the next one goes on in, so that one for every token is a single entry."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.domain.breakpoints import Intervention

MAX_RUNS = 256
"""Of one entry. Each turn writes to the journal what it has changed, and an entry that grew for ever would be that."""


class Entry(NamedTuple):
    """An edit in a log, which never changes: copies of the log share it."""

    made: Intervention
    digest: bytes


@dataclass(slots=True)
class _Front:
    """The entries of one boundary, and where the newest of them are."""

    numbers: list[int] = field(default_factory=list)
    """In the log, rising."""
    end: int = 0
    """The position after the last that any of them has."""
    first: int = 0
    last: int = -1
    """The last entry that reaches past `first`; -1: none does. Most edits begin there, or behind all others."""


class Continuations:
    """Finds entries by boundary and edit.

    Only edits at one boundary and one position have an order. An edit may become part of an equal entry if neither
    that one nor any after it reaches past where the edit begins. It takes the first such entry: so equal edits of a
    breakpoint, which are made again at every position, find one entry each.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        """For a log that has these. `note` tells of each that it gets or changes."""
        self._entries = entries
        self._equal: dict[tuple[int, bytes], list[int]] = {}
        self._fronts: dict[int, _Front] = {}
        for number, (made, digest) in enumerate(entries):
            self._add(number, made, digest)
        for front in self._fronts.values():
            front.first = front.end

    def find(self, made: Intervention, digest: bytes) -> int | None:
        """The number of the entry that goes on with `made`; None: it is an entry of its own."""
        after = self._last_past(made)
        if made.has_rows:
            return None
        equal = self._equal.get((made.boundary, digest), [])
        candidates = (equal[place] for place in range(bisect_right(equal, after), len(equal)))
        return next((number for number in candidates if len(self._entries[number].made.only) < MAX_RUNS), None)

    def note(self, number: int, made: Intervention, digest: bytes) -> None:
        """`made`, which was asked for last, is in the entry of that number now."""
        front = self._front(made.boundary)
        if not front.numbers or number > front.numbers[-1]:
            self._add(number, made, digest)
        front.end, front.last = max(front.end, made.end), max(front.last, number)

    def _add(self, number: int, made: Intervention, digest: bytes) -> None:
        front = self._front(made.boundary)
        front.numbers.append(number)
        if made.end > front.end:
            front.end = made.end
        self._equal.setdefault((made.boundary, digest), []).append(number)

    def _front(self, boundary: int) -> _Front:
        front = self._fronts.get(boundary)
        if front is None:
            front = self._fronts[boundary] = _Front()
        return front

    def _last_past(self, made: Intervention) -> int:
        """The last entry of the boundary that reaches past where `made` begins; -1: none does."""
        front = self._front(made.boundary)
        if made.first >= front.end:
            front.first, front.last = made.first, -1
            return -1
        if made.first >= front.first:
            return self._reaching(front, bisect_right(front.numbers, front.last), made.first)
        front.first, front.last = made.first, self._reaching(front, len(front.numbers), made.first)
        return front.last

    def _reaching(self, front: _Front, count: int, position: int) -> int:
        """The last of the boundary's first `count` entries that reaches past `position`; -1: none does."""
        for place in range(count - 1, -1, -1):
            if self._entries[front.numbers[place]].made.end > position:
                return front.numbers[place]
        return -1
