"""Which peer a session is offered to next, when a server gives all of them away. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from app.cluster.fleet import Replica

MOST_REFUSALS = 8
"""Sessions that a peer may refuse, one after the other, before nothing more is offered to it."""
PATIENCE_S = 0.2
"""After a refusal, until a peer is offered a session again: what it is sent at the moment may still fill it, or end."""
TRIES = 2
"""How often one session is offered to one peer."""


@dataclass(slots=True)
class Tried:
    """What has become of one session's offers."""

    refused_by: Counter[str] = field(default_factory=Counter)
    """Offers, by the peer that has refused them."""
    not_before: float = 0.0
    """When it may be tried again."""
    disturbed: int = 0
    """How often the session itself was in no state to go."""

    def best(self, peers: Sequence[Replica]) -> Replica | None:
        """The first of the peers that has not refused the session for good."""
        return next((each for each in peers if self.refused_by[each.name] < TRIES), None)


class PeerChoice:
    """Keeps account of refusals. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._in_a_row = Counter[str]()
        self._not_before: dict[str, float] = {}

    def is_hopeless(self, ready: Sequence[Replica], tried: Tried) -> bool:
        """Whether all of the peers have refused the session for good."""
        return bool(ready) and all(tried.refused_by[each.name] >= TRIES for each in ready)

    def are_full(self, ready: Collection[Replica]) -> bool:
        """Whether nothing more is offered to any of these peers."""
        return bool(ready) and all(self._in_a_row[each.name] >= MOST_REFUSALS for each in ready)

    def open(self, ready: Sequence[Replica], now: float) -> list[Replica]:
        """Those of the peers that may be offered something now."""
        return [
            each
            for each in ready
            if self._in_a_row[each.name] < MOST_REFUSALS and self._not_before.get(each.name, 0.0) <= now
        ]

    def refused(self, peer: str, tried: Tried, now: float) -> None:
        """The peer has no room for the session."""
        tried.refused_by[peer] += 1
        self._in_a_row[peer] += 1
        self._not_before[peer] = now + PATIENCE_S

    def shunned(self, peer: str, tried: Tried) -> None:
        """The peer will never take the session."""
        tried.refused_by[peer] = TRIES

    def took(self, peer: str) -> None:
        """The peer has taken a session."""
        self._in_a_row[peer] = 0
