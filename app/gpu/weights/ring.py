"""Places in a ring of bytes: given out one after the other round and round, and again once their holder has let go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Guard = TypeVar("Guard")
"""What tells that the last use of a place has ended, such as an event of the device."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes `[start, end)` of the ring."""

    start: int
    end: int

    def touches(self, other: Place) -> bool:
        """Whether the two have a byte in common."""
        return self.start < other.end and other.start < self.end


class Ring(Generic[Guard]):
    """Which bytes of a ring are in use, and which must not be written before a guard has passed.

    A place is one run of bytes: where the rest up to the ring's end is too short for it, the rest is skipped. Places
    are aligned as their sizes are, and those of bundles are multiples of the alignment.
    """

    def __init__(self, size: int) -> None:
        """A ring of `size` bytes, all free."""
        self.size = size
        self._next = 0
        """Where the next place begins, if it ends within the ring."""
        self._in_use: set[Place] = set()
        self._released: list[tuple[Place, Guard]] = []
        """Disjoint, so there are never more than the ring has room for, however long it turns."""

    def reserve(self, size: int) -> tuple[Place, list[Guard]] | None:
        """The next place of `size` bytes, and the guards that must pass before it is written; from now on it is in use.

        None until something is released: reuse is first in, first out, so a place in use is never passed by. If
        nothing is in use there is always room. Raises ValueError unless `size` is positive and at most the ring's.
        """
        if not 0 < size <= self.size:
            raise ValueError(f"{size} bytes asked of a ring of {self.size} bytes")
        wraps = self._next + size > self.size
        skipped = Place(self._next, self.size if wraps else self._next)
        start = 0 if wraps else self._next
        place = Place(start, start + size)
        if any(held.touches(place) or held.touches(skipped) for held in self._in_use):
            return None
        self._in_use.add(place)
        self._next = place.end
        return place, self._take_guards(place)

    def release(self, place: Place, guard: Guard) -> None:
        """Let the ring have a place again, in any order; the next user of a part waits for `guard`."""
        if place not in self._in_use:
            raise RuntimeError(f"{place} is released, but it is not in use")
        self._in_use.remove(place)
        self._released.append((place, guard))

    def _take_guards(self, place: Place) -> list[Guard]:
        """The guards of all that `place` touches. They stay with what of their places lies behind it; nothing lies
        before it, since a place begins where the last one ended.
        """
        guards: list[Guard] = []
        still: list[tuple[Place, Guard]] = []
        for released, guard in self._released:
            if not released.touches(place):
                still.append((released, guard))
                continue
            guards.append(guard)
            if released.end > place.end:
                still.append((Place(place.end, released.end), guard))
        self._released = still
        return guards
