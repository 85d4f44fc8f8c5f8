"""The replicas of the cluster as this server sees them, and which of them is best for a new session."""

import enum
import hashlib
import math
import operator
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from urllib.parse import urlsplit

from app.cluster.claims import Member
from app.domain.errors import ReplicaAway

PLACED_COSTS = 0.02
"""How much of a device's KV a new session is assumed to need, until the replica reports its load again."""
NEAR = (0.1, 0.1, 8)
"""How much more room than here (free parts of device KV and of host memory, and fewer turns) is worth a hop."""
Members = Callable[[], Mapping[str, Member]]
"""Returns the current members of the cluster, by name."""


class State(enum.Enum):
    """What is known of a replica. One that `REFUSES` answers, but takes no new work: it drains, or has no engine."""

    READY = "ready"
    REFUSES = "refuses"
    AWAY = "away"


class Replica:
    """One server: what it reports, and what this server has found out since."""

    def __init__(self, name: str, members: Members, *, is_here: bool = False) -> None:
        """`is_here`: it is this server, which is present whatever the store says."""
        self.name = name
        self.placed = 0
        """New sessions that were placed there since it last reported its load."""
        self._members, self._is_here = members, is_here
        self._last = members().get(name) or Member(name=name, url="", journal="")
        self._away_until = -math.inf

    @property
    def seen(self) -> Member:
        """Its last report."""
        now = self._members().get(self.name)
        if now is not None and now is not self._last:
            self._last, self.placed = now, 0
        return self._last

    @property
    def is_member(self) -> bool:
        """Whether it holds its lease, as far as is known here."""
        return self.name in self._members()

    @property
    def state(self) -> State:
        """Whether it answers and takes new work. One whose sessions have left counts as away while it still ends: a
        request that is sent just then could be lost with its connection. This server itself answers.
        """
        is_away = not self.is_member or self.seen.left or time.monotonic() < self._away_until
        if is_away and not self._is_here:
            return State.AWAY
        return State.READY if self.seen.ready else State.REFUSES

    def shun(self, seconds: float) -> None:
        """Treat it as away for at least that many seconds, as it has not answered; 0 ends that."""
        self._away_until = max(self._away_until, time.monotonic() + seconds) if seconds else -math.inf

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.seen.url)
        return parts.hostname or "", parts.port or 80

    @property
    def takes_sessions(self) -> bool:
        """Whether it takes sessions, and does not only compute prompts."""
        return self.seen.role != "prefill"

    @property
    def room(self) -> tuple[float, float, int]:
        """Ranks replicas for a new session: by free device KV, then free host memory, then how few turns are there."""
        load = self.seen.load
        return load.kv_free - PLACED_COSTS * self.placed, load.host_free, -load.turns - self.placed


class Fleet:
    """All replicas that have been there since this server began. Used on the event loop only."""

    def __init__(self, here: str, members: Members) -> None:
        """`here` is the server's own name."""
        self.here = here
        self.own = Replica(here, members, is_here=True)
        self._members = members
        self._replicas = {here: self.own}

    def __iter__(self) -> Iterator[Replica]:
        """In the order of their names, this one among them."""
        for name in self._members().keys() - self._replicas.keys():
            self._replicas[name] = Replica(name, self._members)
        return iter(sorted(self._replicas.values(), key=lambda each: each.name))

    @property
    def answering(self) -> list[Replica]:
        """Those that are not away."""
        return [each for each in self if each.state is not State.AWAY]

    @property
    def ready(self) -> list[Replica]:
        """Others that take new work, the one with the most room first."""
        ready = [each for each in self if each.state is State.READY and each is not self.own]
        return sorted(ready, key=lambda each: (each.takes_sessions, each.room), reverse=True)

    def find(self, name: str | None) -> Replica | None:
        """The replica of that name, which may be away by now."""
        return next((each for each in self if each.name == name), None)

    def reachable(self, name: str, has: str = "has what this request is about") -> Replica:
        """The replica of that name. Raises `ReplicaAway`, which says what it `has`, if it does not answer."""
        if (replica := self.find(name)) is None or replica.state is State.AWAY:
            raise ReplicaAway(f"replica {name}, which {has}, is away: try again")
        return replica

    def place(self, but: Collection[str] = (), key: str | None = None, *, is_named: bool = False) -> Replica:
        """The replica for something new, but none of those in `but`, which took nothing: the one with the most room. It
        is this one if others took nothing, or if it `is_named` and none has clearly more room: who chooses a replica by
        the name saves the hop. If none takes new work, the returned one will say so. With a `key`, all replicas return
        the same one at each call, as long as it answers, and else the same next one (rendezvous hashing). So a repeated
        request goes to the replica that may have done it.
        """
        own, found = self.own, [each for each in self.answering if each.name not in but] or [self.own]
        if key is not None:
            draws = {each: hashlib.blake2b(f"{each.name} {key}".encode()).digest() for each in found}
            return max(found, key=lambda each: (each.takes_sessions, draws[each]))
        kinds = {each: (each.state is State.READY, each.takes_sessions) for each in found}
        best = max(found, key=lambda each: (kinds[each], each.room, each is own))
        more = map(operator.sub, best.room, own.room)
        is_near = is_named and all(map(operator.le, more, NEAR))
        if (but or is_near) and kinds.get(own) == kinds[best]:
            best = own
        best.placed += 1
        return best
