"""The replicas of one cluster as the front door sees them. Used on the event loop only."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from app.cluster.load import Load
from app.domain.errors import FieldOutOfRange, ReplicaAway
from app.domain.homes import REPLICA_NAME

OWN_NAME = "front"
"""What the front door's own metrics have where those of replicas have their name."""
PLACED_COSTS = 0.02
"""Of a device's KV, what a new session is taken to need until the replica next tells what is free."""


class State(enum.Enum):
    """What the last look at a replica has found."""

    READY = "ready"
    REFUSES = "refuses"
    """It answers, but takes no new work: it drains, or its engine is started again."""
    AWAY = "away"


@dataclass(slots=True, eq=False)
class Replica:
    """One server. It is taken to be away until a first look has found it."""

    name: str
    url: str
    """Without a slash at its end."""
    state: State = State.AWAY
    load: Load | None = None
    placed: int = 0
    """New sessions that went there since it last told its load."""
    host: str = field(init=False)
    port: int = field(init=False)

    def __post_init__(self) -> None:
        """Read the URL. Raises `FieldOutOfRange`."""
        if not REPLICA_NAME.fullmatch(self.name) or self.name == OWN_NAME:
            raise FieldOutOfRange(f"peers: {self.name[:40]!r} is no name of a replica", param="peers")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme != "http" or not parts.hostname or parts.path or parts.query:
            message = f"peers: {self.name} needs a URL such as http://10.0.0.1:8000; got {self.url[:100]!r}"
            raise FieldOutOfRange(message, param="peers")
        self.host, self.port = parts.hostname, port or 80

    def told(self, state: State, load: Load | None) -> None:
        """Note what a look has found. A load that was not told stays as it was."""
        self.state = state
        if load is not None:
            self.load, self.placed = load, 0

    @property
    def takes_sessions(self) -> bool:
        """Whether it is there for sessions: it does not only compute prompts, as far as it has said."""
        return self.load is None or self.load.role != "prefill"

    @property
    def room(self) -> tuple[float, float, int]:
        """Orders replicas by what a new session finds there: free KV, then free host memory, then turns that would be
        before its own. Where all sessions are away from the device, host memory tells who has more of them.
        """
        if self.load is None:
            return (0.0, 0.0, -self.placed)
        free = self.load.kv_free - PLACED_COSTS * self.placed
        return (free, self.load.host_free, -self.load.turns - self.placed)


class Fleet:
    """All replicas, by name."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        """Raises `FieldOutOfRange` for names and URLs that cannot be."""
        self._replicas: dict[str, Replica] = {}
        self.replace(urls)

    def __iter__(self) -> Iterator[Replica]:
        """In the order of their names."""
        return iter([self._replicas[name] for name in sorted(self._replicas)])

    def __len__(self) -> int:
        return len(self._replicas)

    def replace(self, urls: Mapping[str, str]) -> None:
        """Have these replicas from now on; those that stay keep their state. Raises `FieldOutOfRange`."""
        found = {}
        for name, url in urls.items():
            old = self._replicas.get(name)
            found[name] = old if old is not None and old.url == url.rstrip("/") else Replica(name, url.rstrip("/"))
        self._replicas = found

    def find(self, name: str | None) -> Replica | None:
        """The replica of that name."""
        return None if name is None else self._replicas.get(name)

    def reachable(self, name: str) -> Replica:
        """The replica of that name. Raises `ReplicaAway` if it does not answer."""
        replica = self._replicas.get(name)
        if replica is None or replica.state is State.AWAY:
            raise ReplicaAway(f"replica {name} is away, and what is there with it: try again")
        return replica

    def any(self) -> Replica:
        """One that answers. Raises `ReplicaAway` if none does."""
        return self._best(ready_only=False)

    def place(self, but: str | None = None) -> Replica:
        """Where a new session goes: the replica with the most free KV, but for those that only compute prompts, if
        there are others, and for the one of that name. Raises `ReplicaAway` if none answers.

        If none takes new work, one that says so itself.
        """
        replica = self._best(ready_only=True, but=but)
        replica.placed += 1
        return replica

    def _best(self, *, ready_only: bool, but: str | None = None) -> Replica:
        answering = [each for each in self if each.state is not State.AWAY and each.name != but]
        if not answering:
            raise ReplicaAway("no replica answers: try again")
        ready = [each for each in answering if each.state is State.READY]
        if not ready_only:
            return (ready or answering)[0]
        homes = [each for each in ready if each.takes_sessions]
        return max(homes or ready or answering, key=lambda each: each.room)
