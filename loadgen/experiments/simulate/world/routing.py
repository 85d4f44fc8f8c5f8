"""Which replica a turn goes to, by each policy."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from typing import Protocol

from loadgen.experiments.simulate.plan import Policy
from loadgen.experiments.simulate.world.replica import Replica
from loadgen.experiments.simulate.world.session import Session

PLACED_COSTS = 0.02
"""Of a device's KV, what a new session is taken to need until the replica next tells what is free."""
LOOK_S = 1.0
"""How often the front door looks at what is free."""
POINTS = 16
"""Of each replica on the ring."""


class Routing(Protocol):
    """Chooses replicas."""

    def add(self, replica: Replica) -> None:
        """A replica has come."""
        ...

    def choose(self, session: Session, now: float) -> Replica | None:
        """Where the session's next turn goes; None if no replica takes it."""
        ...


class ByRoom:
    """A session stays where it is; a new one goes to the replica with the most free KV, as it was at the last look."""

    def __init__(self) -> None:
        self._replicas: list[Replica] = []
        self._heap: list[tuple[float, int, int, Replica]] = []
        self._looked_s = -LOOK_S

    def add(self, replica: Replica) -> None:
        self._replicas.append(replica)
        self._looked_s = -LOOK_S

    def choose(self, session: Session, now: float) -> Replica | None:
        return self.place(now) if session.place is None else self._replicas[session.place]

    def place(self, now: float) -> Replica | None:
        """The replica with the most room; None if none takes new sessions."""
        if now >= self._looked_s + LOOK_S:
            self._looked_s = now
            told = (each for each in self._replicas if each.up and each.takes)
            self._heap = [(-each.tiers.kv_free, each.turns, each.number, each) for each in told]
            heapq.heapify(self._heap)
        while self._heap:
            used, turns, number, replica = self._heap[0]
            if replica.up and replica.takes:
                heapq.heapreplace(self._heap, (used + PLACED_COSTS, turns + 1, number, replica))
                return replica
            heapq.heappop(self._heap)
        return None


class ByHash:
    """A session goes to the next replica on a ring that is up. KV does not follow it."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._replicas: list[Replica] = []
        self._is_sorted = False

    def add(self, replica: Replica) -> None:
        self._replicas.append(replica)
        self._points += [(_hashed(f"{replica.number}.{point}"), replica.number) for point in range(POINTS)]
        self._is_sorted = False

    def choose(self, session: Session, now: float) -> Replica | None:
        if not self._is_sorted:
            self._points.sort()
            self._is_sorted = True
        first = bisect_left(self._points, (_hashed(f"session {session.number}"), 0))
        for step in range(len(self._points)):
            replica = self._replicas[self._points[(first + step) % len(self._points)][1]]
            if replica.up and not replica.closing:
                return replica
        return None


class ByQueue:
    """A turn goes to the replica with the fewest turns at that moment, of those the one that has been idle longest."""

    def __init__(self) -> None:
        self._order = count()
        self._heap: list[tuple[int, int, Replica]] = []

    def add(self, replica: Replica) -> None:
        replica.on_change = self._note
        self._note(replica)

    def choose(self, session: Session, now: float) -> Replica | None:
        while self._heap:
            turns, _, replica = self._heap[0]
            if replica.turns == turns and replica.up and not replica.closing:
                return replica
            heapq.heappop(self._heap)
        return None

    def _note(self, replica: Replica) -> None:
        if replica.up:
            heapq.heappush(self._heap, (replica.turns, next(self._order), replica))


def routing(policy: Policy, replicas: Sequence[Replica]) -> Routing:
    """The policy, over these replicas, whose numbers count from 0."""
    kinds: dict[Policy, type[Routing]] = {Policy.OWNER: ByRoom, Policy.HASH: ByHash, Policy.SHORTEST: ByQueue}
    made = kinds[policy]()
    for replica in replicas:
        made.add(replica)
    return made


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
