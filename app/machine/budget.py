"""What all share and may run out of: memory for bodies and log-probabilities, files on their way, bytes on disks."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

Refuse = Callable[[int, int, int], Exception]
"""Makes the error: takes what all holders have, what this holder has (0 if only the thing itself), and how much the
thing needs.
"""


def leaves_as_much(limit: int, *, taken: int, more: int, besides: int, whole: int) -> bool:
    """Whether a holder may have `more` for one thing, which is `whole` then, where all together have `taken`.

    A holder with several things must leave as much of `limit` free as it takes; `besides` is what its other things
    take. Its only thing may take all (Choudhury and Hahne, *Dynamic queue length thresholds*, 1998). So every holder
    finds room, and a single holder gets half.
    """
    own = besides + whole if besides else 0
    return taken + more + own <= limit


class Budget:
    """At most `limit` at once, which holders share as `leaves_as_much` says. A holder that is None leaves nothing to
    others. Used on the event loop only.
    """

    def __init__(self, limit: int, refuse: Refuse) -> None:
        self.limit = limit
        self._refuse = refuse
        self._taken = Counter[str | None]()
        """Of each holder that has some."""
        self._total = 0

    def require(self, holder: str | None, more: int, held: int = 0) -> None:
        """Raise the error of `refuse` unless the holder may have `more` for a thing that has `held` so far."""
        own = 0 if holder is None else self._taken[holder]
        besides, whole = max(0, own - held), held + more
        if not leaves_as_much(self.limit, taken=self._total, more=more, besides=besides, whole=whole):
            raise self._refuse(self._total, own if besides else 0, whole)

    def take(self, holder: str | None, more: int, held: int = 0) -> None:
        """`require` it and count it. Takes nothing if that raises."""
        self.require(holder, more, held)
        self._taken[holder] += more
        self._total += more

    def give(self, holder: str | None, count: int) -> None:
        """Give back what was taken."""
        self._total -= count
        self._taken[holder] -= count
        if not self._taken[holder]:
            del self._taken[holder]


class Room(Protocol):
    """What a share is of: a budget, or what is free on a disk."""

    def take(self, holder: str | None, more: int, held: int = 0) -> None:
        """Count `more` for a thing that has `held` so far. Raises the room's error, and takes nothing then."""
        ...

    def give(self, holder: str | None, count: int) -> None:
        """Give back what was taken."""
        ...


class Share:
    """What one thing has of a room, such as one body or one file that is written."""

    def __init__(self, room: Room, holder: str | None = None) -> None:
        self._room = room
        self._holder = holder
        self.held = 0

    def grow(self, more: int) -> None:
        """Have `more` than before. Raises the room's error."""
        self._room.take(self._holder, more, self.held)
        self.held += more

    def require(self, count: int) -> None:
        """Have `count` at least. Raises the room's error."""
        if count > self.held:
            self.grow(count - self.held)

    def give(self, count: int) -> None:
        """Give back so much, or all if it has less."""
        count = min(count, self.held)
        self._room.give(self._holder, count)
        self.held -= count

    def shrink(self, count: int = 0) -> None:
        """Have no more than `count`."""
        if self.held > count:
            self.give(self.held - count)
