"""Connections to the replicas that are open and carry nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from app.cluster.fleet import Replica, State
from app.cluster.front.upstream.connection import Upstream
from app.domain.errors import ReplicaAway

CONNECT_S = 2.0
"""How long a replica may take to take a connection."""
IDLE_S = 20.0
"""How long a connection waits for its next request. Replicas close theirs after 75 s: none is used as it closes."""
MOST_IDLE = 64
"""Idle connections of one replica."""


ProtocolT = TypeVar("ProtocolT", bound=asyncio.Protocol)


class Pool:
    """Used on the event loop only."""

    def __init__(self) -> None:
        self._idle: defaultdict[tuple[str, int], list[Upstream]] = defaultdict(list)

    async def take(self, replica: Replica, *, fresh: bool = False) -> Upstream:
        """A connection to the replica, a new one if `fresh`. Raises `ReplicaAway`."""
        # One that shuts down closes its connections: a request on one would be lost if it does so now.
        fresh = fresh or replica.state is State.REFUSES
        now = asyncio.get_running_loop().time()
        idle = self._idle[replica.host, replica.port]
        while idle and not fresh:
            found = idle.pop()
            if found.is_open and now - found.idle_since < IDLE_S:
                return found
            found.close()
        return await connect(replica, Upstream)

    def give(self, replica: Replica, upstream: Upstream) -> None:
        """Take back a connection whose answer is over, or will not be read to its end."""
        idle = self._idle[replica.host, replica.port]
        if not upstream.rest(asyncio.get_running_loop().time()):
            return
        idle.append(upstream)
        if len(idle) > MOST_IDLE:
            idle.pop(0).close()

    def close(self) -> None:
        """Close all that are idle."""
        for idle in self._idle.values():
            for each in idle:
                each.close()
        self._idle.clear()


async def connect(replica: Replica, make: Callable[[], ProtocolT]) -> ProtocolT:
    """A new connection to the replica, for a protocol that `make` makes. Raises `ReplicaAway`."""
    reason = "no answer in time"
    with contextlib.suppress(TimeoutError):
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                _, made = await loop.create_connection(make, replica.host, replica.port)
                return made
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else "its host is unknown"
    replica.state = State.AWAY  # the next look may find it again
    raise ReplicaAway(f"replica {replica.name} is away ({reason}), and what is there with it: try again")
