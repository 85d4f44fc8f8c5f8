"""Requests that a replica turns away because another one does them: how far the front door follows."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from http import HTTPStatus

import h11

from app.cluster.fleet import Fleet, Replica
from app.cluster.front.body import Body
from app.cluster.front.heads import moved_to, not_done
from app.cluster.front.routing.metrics import Way
from app.cluster.front.routing.owners import Owner
from app.domain.errors import ReplicaMoving

PATIENCE_S = 20.0
"""How long a request waits for a session that is on its way."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.5
"""Between two questions after it: half as long again each time. Most moves take less than a second."""


class Why(enum.Enum):
    """Why nothing of a request was done."""

    MOVED = "moved"
    LOST = "lost"
    """It has moved to a replica that is none of these any more."""
    MOVES = "moving"
    DRAINS = "draining"
    STALLS = "stalled"
    """Its engine makes no progress."""


@dataclass(frozen=True, slots=True)
class Turned:
    """A request that was turned away. `home` is where the session has gone."""

    why: Why
    home: Replica | None = None


def turned_away(head: h11.Response, fleet: Fleet) -> Turned | None:
    """What a replica's answer says of that; None: it is the answer, or names no known replica."""
    if head.status_code == HTTPStatus.MISDIRECTED_REQUEST:
        home = fleet.find(moved_to(head.headers))
        return Turned(Why.LOST if home is None else Why.MOVED, home)
    why = not_done(head.headers)
    return Turned(Why(why)) if why in (Why.MOVES.value, Why.DRAINS.value, Why.STALLS.value) else None


@dataclass(slots=True)
class Following:
    """How one request has been turned away so far. It began at `began`, a time of the event loop, with `first`."""

    first: str
    began: float
    has_sought: bool = False
    """Whether all replicas have been asked who has the session."""
    way: Way = Way.OWNER
    _asked: set[str] = field(default_factory=set)
    _refused: set[str] = field(default_factory=set)
    _wait_s: float = FIRST_WAIT_S

    def __post_init__(self) -> None:
        """The first replica is the first of those that were asked."""
        self._asked.add(self.first)

    def may_follow(self, turned: Turned, owner: Owner, body: Body, now: float) -> bool:
        """Whether to go on; else the client gets the answer, and repeats its request itself."""
        if turned.why is Why.MOVED:
            return True
        if turned.why is Why.LOST:
            return body.can_repeat and owner.seek is not None and not self.has_sought
        if turned.why is Why.MOVES:
            return body.can_repeat and now - self.began < PATIENCE_S
        return body.can_repeat and (owner.key is None or owner.is_new) and owner.replica.name not in self._refused

    def note_refusal(self, name: str) -> None:
        """That replica takes nothing new: it is not asked again."""
        self._refused.add(name)

    def next_wait_s(self) -> float:
        """How long to wait before the same replica is asked again."""
        wait_s, self._wait_s = self._wait_s, min(1.5 * self._wait_s, LONGEST_WAIT_S)
        return wait_s

    def go(self, name: str, body: Body) -> None:
        """Ask that replica next. Raises `ReplicaMoving` if the body cannot be sent again, and for a session that comes
        back to where it was: it is not chased.
        """
        if not body.can_repeat:
            raise ReplicaMoving(f"the session has moved to replica {name}: repeat the request")
        if name in self._asked:
            raise ReplicaMoving(f"the session moves on, now to replica {name}: repeat the request")
        self._asked.add(name)
