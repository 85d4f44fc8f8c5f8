"""Counts of whose answer clients got to what they asked an owner for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter

from app.domain.errors import ReplicaAway, ReplicaLost, ReplicaMoving


class Way(StrEnum):
    """How a request came to its owner."""

    OWNER = "owner"
    """At the first try."""
    FOLLOWED = "followed"
    """At the second: the first replica has said where the session has moved."""
    MOVING_ON = "moving_on"
    """Not at all, as the request could not be sent after a session that moves."""
    AWAY = "away"
    """Not at all, as its owner does not answer."""
    LOST = "lost"
    """At the first or the second try, and the owner went away before its answer."""


class RoutingMetrics:
    """Requests that have an owner, in the given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "djinn_front_requests", "Requests for what a replica owns", ["turn", "way"], registry=registry
        )
        # A series that begins with its first event has no rate of it.
        for turn in (True, False):
            for way in Way:
                self._requests.labels(_word(turn), way.value)

    @contextmanager
    def failing(self, *, turn: bool) -> Iterator[None]:
        """Count the request of the block if it fails on its way. `turn`: it asks for one."""
        try:
            yield
        except ReplicaAway:
            self.count(Way.AWAY, turn=turn)
            raise
        except ReplicaLost:
            self.count(Way.LOST, turn=turn)
            raise
        except ReplicaMoving:
            self.count(Way.MOVING_ON, turn=turn)
            raise

    def count(self, way: Way, *, turn: bool) -> None:
        """Count a request."""
        self._requests.labels(_word(turn), way.value).inc()


def _word(turn: bool) -> str:
    return "yes" if turn else "no"
