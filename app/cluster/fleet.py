"""The replicas of one cluster as one of them sees the others, and which of them is best for something new."""

from __future__ import annotations

import enum
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Protocol
from urllib.parse import urlsplit

from app.cluster.claims import Load, Member
from app.domain.errors import ReplicaAway

PLACED_COSTS = 0.02
"""The part of a device's KV that a new session is assumed to need until the replica next reports its load."""


class Roster(Protocol):
    """Who is in the cluster."""

    @property
    def members(self) -> Mapping[str, Member]:
        """Those that are there, by name, this one among them."""
        ...


class State(enum.Enum):
    """What is known of a replica."""

    READY = "ready"
    REFUSES = "refuses"
    """It answers, but takes no new work: it drains, or its engine is started again."""
    AWAY = "away"


class Replica:
    """One server: what it reports, and what this server has found out since."""

    def __init__(self, name: str, roster: Roster, *, is_here: bool = False) -> None:
        """`is_here`: it is this server, which is present whatever the store says."""
        self.name = name
        self.placed = 0
        """New sessions that were placed there since it last reported its load."""
        self._roster = roster
        self._is_here = is_here
        self._last = roster.members.get(name) or Member(name=name, url="", journal="")
        self._away_until = -math.inf

    @property
    def seen(self) -> Member:
        """Its last report."""
        now = self._roster.members.get(self.name)
        if now is not None and now is not self._last:
            self._last, self.placed = now, 0
        return self._last

    @property
    def state(self) -> State:
        """Whether it answers and takes new work. One whose sessions have left counts as away while it still ends: a
        request that is sent just then could be lost with its connection.
        """
        if not self.is_member or self.seen.left or time.monotonic() < self._away_until:
            return State.AWAY
        return State.READY if self.seen.ready else State.REFUSES

    @property
    def is_member(self) -> bool:
        """Whether it holds its lease, as far as is known here."""
        return self._is_here or self.name in self._roster.members

    def shun(self, seconds: float) -> None:
        """Treat it as away for so many seconds, as it has not answered. 0 ends that."""
        self._away_until = time.monotonic() + seconds

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return self.seen.url

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    @property
    def load(self) -> Load | None:
        """How busy it is; None before its first report."""
        return self.seen.load

    @property
    def takes_sessions(self) -> bool:
        """Whether it takes sessions, and does not only compute prompts."""
        return self.seen.role != "prefill"

    @property
    def room(self) -> tuple[float, float, int]:
        """What replicas are compared by for a new session: free KV, then free host memory, then turns ahead of it.
        Where no session has KV on the device, host memory tells which has fewer of them.
        """
        if (load := self.load) is None:
            return (0.0, 0.0, -self.placed)
        return (load.kv_free - PLACED_COSTS * self.placed, load.host_free, -load.turns - self.placed)


class Fleet:
    """All replicas that have been there since this server began. Used on the event loop only."""

    def __init__(self, here: str, roster: Roster) -> None:
        """`here` is the server's own name."""
        self.here = here
        self.own = Replica(here, roster, is_here=True)
        self._roster = roster
        self._replicas = {here: self.own}

    def __iter__(self) -> Iterator[Replica]:
        """In the order of their names, this one among them."""
        return iter([each for _, each in sorted(self._by_name().items())])

    def _by_name(self) -> dict[str, Replica]:
        for name in self._roster.members.keys() - self._replicas.keys():
            self._replicas[name] = Replica(name, self._roster)
        return self._replicas

    @property
    def others(self) -> list[Replica]:
        """All but this one."""
        return [each for each in self if each is not self.own]

    @property
    def answering(self) -> list[Replica]:
        """Those that are not away."""
        return [each for each in self if each.state is not State.AWAY]

    @property
    def ready(self) -> list[Replica]:
        """Others that take new work, the one with the most free KV first, and last those that only compute prompts."""
        ready = [each for each in self.others if each.state is State.READY]
        return sorted(ready, key=lambda each: (each.takes_sessions, each.room), reverse=True)

    def find(self, name: str | None) -> Replica | None:
        """The replica of that name, which may be away by now."""
        return None if name is None else self._by_name().get(name)

    def reachable(self, name: str) -> Replica:
        """The replica of that name. Raises `ReplicaAway` if it does not answer."""
        replica = self.find(name)
        if replica is None or replica.state is State.AWAY:
            raise ReplicaAway(f"replica {name} is away, and what is there with it: try again")
        return replica

    def place(self, but: str | None = None, key: str | None = None) -> Replica:
        """Where something new goes: to the replica with the most free KV; among equals, to this one.

        Replicas that only compute prompts come last, and the one called `but` is left out. If none takes new work, one
        is returned that will say so. Raises `ReplicaAway` if none answers. With a `key`, each replica returns the same
        one at each call, as long as that answers (rendezvous hashing). So a repeated request goes to the replica that
        may have done it.
        """
        answering = [each for each in self.answering if each.name != but]
        if not answering:
            raise ReplicaAway("no replica answers: try again")
        if key is not None:
            homes = [each for each in answering if each.takes_sessions] or answering
            return max(homes, key=lambda each: hashlib.blake2b(f"{each.name} {key}".encode()).digest())
        ready = [each for each in answering if each.state is State.READY]
        homes = [each for each in ready if each.takes_sessions] or ready or answering
        replica = max(homes, key=lambda each: (each.room, each is self.own))
        replica.placed += 1
        return replica
