"""The directory of a cluster, as the front door uses it: how often it is asked and written."""

from __future__ import annotations

from collections import Counter, OrderedDict

from loadgen.experiments.simulate.world.replica import Replica
from loadgen.experiments.simulate.world.session import Session

REMEMBERED = 100_000
"""Places that a front door knows without asking."""


class Directory:
    """Counts look-ups (`finds`) and writes (`puts`) by the second.

    An id names its home, so a session that has not moved needs no lookup. One that has moved is in the front door's
    memory, else its home says where it is, and while that is away the directory does.
    """

    def __init__(self, finds: Counter[int], puts: Counter[int]) -> None:
        self._finds, self._puts = finds, puts
        self._known: OrderedDict[int, None] = OrderedDict()

    def moved(self, session: Session, now: float) -> None:
        """A session has moved."""
        self._puts[int(now)] += 1
        self._remember(session.number)

    def follow(self, session: Session, home: Replica, now: float) -> bool:
        """Find a session that has moved. Whether its home was asked first and sent the turn on."""
        if session.number in self._known:
            self._known.move_to_end(session.number)
            return False
        self._remember(session.number)
        if home.up:
            return True
        self._finds[int(now)] += 1
        return False

    def _remember(self, number: int) -> None:
        self._known[number] = None
        self._known.move_to_end(number)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


class Names:
    """The same for clients that name their sessions themselves: each name is bound once, and found again unless the
    front door remembers it.
    """

    def __init__(self, finds: Counter[int], puts: Counter[int]) -> None:
        self._finds, self._puts = finds, puts
        self._known: OrderedDict[int, None] = OrderedDict()

    def use(self, session: Session, now: float, *, is_new: bool) -> None:
        """A turn names its session."""
        if is_new:
            self._finds[int(now)] += 1
            self._puts[int(now)] += 1
        elif session.number not in self._known:
            self._finds[int(now)] += 1
        self._known[session.number] = None
        self._known.move_to_end(session.number)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
