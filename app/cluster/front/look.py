"""Looks at every replica, again and again: does it answer, does it take new work, how much room has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from app.cluster import load
from app.cluster.fleet import Fleet, Replica, State
from app.cluster.front.upstream.fetch import fetch
from app.cluster.front.upstream.pool import Pool
from app.domain.errors import ReplicaAway
from app.tenants.tenancy import LOOKOUT

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
AWAY_INTERVAL_S = 0.2
"""Between two looks at a replica that is away: clients wait for it. The next look at all replicas finds one that takes
longer to answer.
"""
PATIENCE_S = 3.0
"""How long a replica may take. It answers without its engine."""
MISSES = 2
"""Looks without an answer before a replica that was there is taken to be away: one may be busy for a moment."""


class Lookout:
    """Used on the event loop only."""

    def __init__(
        self, fleet: Fleet, pool: Pool, host: str | None, proof: Callable[[str], Mapping[str, str]] = lambda name: {}
    ) -> None:
        """Replicas answer to `host`; None: to any, or to their own. `proof` gives the headers by which the replica of
        that name knows who looks: it tells its load to no strangers.
        """
        self._fleet = fleet
        self._pool = pool
        self._host = host
        self._proof = proof
        self._missed: dict[str, int] = {}

    async def run(self) -> None:
        """Look for ever."""
        async with asyncio.TaskGroup() as looking:
            looking.create_task(self._look_at_all())
            looking.create_task(self._look_at_those_away())

    async def look(self) -> None:
        """Look at all of them once."""
        await asyncio.gather(*(self._look_at(each, PATIENCE_S) for each in self._fleet))

    async def _look_at_all(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def _look_at_those_away(self) -> None:
        """Beside the looks at all, for which one replica that hangs is waited for."""
        while True:
            await asyncio.sleep(AWAY_INTERVAL_S)
            away = [each for each in self._fleet if each.state is State.AWAY]
            await asyncio.gather(*(self._look_at(each, AWAY_INTERVAL_S) for each in away))

    async def _look_at(self, replica: Replica, patience_s: float) -> None:
        host = self._host or f"{replica.host}:{replica.port}"
        headers = [(b"host", host.encode()), (b"user-agent", LOOKOUT)]
        headers += [(name.encode(), value.encode()) for name, value in self._proof(replica.name).items()]
        try:
            found = await fetch(self._pool, replica, b"/ready", headers, patience_s)
        except ReplicaAway:
            missed = self._missed[replica.name] = self._missed.get(replica.name, 0) + 1
            if missed >= MISSES:
                _tell(replica, State.AWAY, None)
            return
        self._missed[replica.name] = 0
        told = dict(found.headers).get(load.HEADER.lower().encode())
        state = State.READY if found.status == 200 else State.REFUSES
        if load.LEFT.lower().encode() in dict(found.headers):
            state = State.AWAY  # before it is: a connection that closes may take a request with it
        _tell(replica, state, None if told is None else load.Load.of(told.decode("latin-1")))


def _tell(replica: Replica, state: State, found: load.Load | None) -> None:
    before = replica.state
    replica.told(state, found)
    if state is not before:
        logger.info("replica %s at %s: %s, was %s", replica.name, replica.url, state.value, before.value)
