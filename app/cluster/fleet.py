"""The replicas of one cluster as one of them sees the others, and which of them is best for something new."""

from __future__ import annotations

import enum
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Protocol
from urllib.parse import urlsplit

from app.cluster.claims import Member
from app.cluster.load import Load
from app.domain.errors import ReplicaAway

PLACED_COSTS = 0.02
"""Of a device's KV, what a new session is taken to need until the replica next tells what is free."""


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
    """One server, by its name: what it says of itself, and what this server has found out meanwhile."""

    def __init__(self, name: str, roster: Roster, *, is_here: bool = False) -> None:
        """`is_here`: it is this server, which is there whatever the others know."""
        self.name = name
        self.placed = 0
        """New sessions that went there since it last told its load."""
        self._roster = roster
        self._is_here = is_here
        self._last = roster.members.get(name) or Member(name=name, url="", journal="")
        self._away_until = -math.inf

    @property
    def seen(self) -> Member:
        """What it has said last."""
        now = self._roster.members.get(self.name)
        if now is not None and now is not self._last:
            self._last, self.placed = now, 0
        return self._last

    @property
    def state(self) -> State:
        """Whether it answers, and takes new work. One whose sessions have left is away before it is: a connection that
        closes may take a request with it.
        """
        seen = self.seen
        if not self.is_member or seen.left or time.monotonic() < self._away_until:
            return State.AWAY
        return State.READY if seen.ready else State.REFUSES

    @property
    def is_member(self) -> bool:
        """Whether it holds its lease, by what is known here."""
        return self._is_here or self.name in self._roster.members

    def shun(self, seconds: float) -> None:
        """Take it to be away for so long, or until it is shunned for 0 s: it has not answered."""
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
    def role(self) -> str:
        """As in the settings."""
        return self.seen.role

    @property
    def load(self) -> Load | None:
        """How busy it is; None: it has not said."""
        return self.seen.load

    @property
    def takes_sessions(self) -> bool:
        """Whether it is there for sessions: it does not only compute prompts."""
        return self.role != "prefill"

    @property
    def room(self) -> tuple[float, float, int]:
        """Orders replicas by what a new session finds there: free KV, then free host memory, then turns that would be
        before its own. Where all sessions are away from the device, host memory tells who has more of them.
        """
        if (load := self.load) is None:
            return (0.0, 0.0, -self.placed)
        return (load.kv_free - PLACED_COSTS * self.placed, load.host_free, -load.turns - self.placed)


class Fleet:
    """All replicas that have been there since this server began. Used on the event loop only."""

    def __init__(self, here: str, roster: Roster) -> None:
        """`here` is the server's own name."""
        self.here = here
        self._roster = roster
        self._replicas = {here: Replica(here, roster, is_here=True)}

    def __iter__(self) -> Iterator[Replica]:
        """In the order of their names, this one among them."""
        for name in self._roster.members:
            if name not in self._replicas:
                self._replicas[name] = Replica(name, self._roster)
        return iter([self._replicas[name] for name in sorted(self._replicas)])

    @property
    def own(self) -> Replica:
        """This one."""
        return self._replicas[self.here]

    @property
    def others(self) -> list[Replica]:
        """All but this one."""
        return [each for each in self if each.name != self.here]

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
        return next((each for each in self if each.name == name), None)

    def reachable(self, name: str) -> Replica:
        """The replica of that name. Raises `ReplicaAway` if it does not answer."""
        replica = self.find(name)
        if replica is None or replica.state is State.AWAY:
            raise ReplicaAway(f"replica {name} is away, and what is there with it: try again")
        return replica

    def place(self, but: str | None = None, key: str | None = None) -> Replica:
        """Where something new goes: the replica with the most free KV, of equal ones this one, but for those that only
        compute prompts, if there are others, and for the one of the name `but`. If none takes new work, one that says
        so itself. Raises `ReplicaAway` if none answers.

        With a `key` it is the same one at each call and at each replica, as long as it answers (rendezvous hashing):
        what is asked for again goes to the replica that may have done it.
        """
        answering = [each for each in self.answering if each.name != but]
        if not answering:
            raise ReplicaAway("no replica answers: try again")
        if key is not None:
            homes = [each for each in answering if each.takes_sessions] or answering
            return max(homes, key=lambda each: hashlib.blake2b(f"{each.name} {key}".encode()).digest())
        ready = [each for each in answering if each.state is State.READY]
        homes = [each for each in ready if each.takes_sessions] or ready or answering
        replica = max(homes, key=lambda each: (each.room, each.name == self.here))
        replica.placed += 1
        return replica
