"""What the other servers of the cluster say of themselves, as a server that gives sessions away looks at them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from app.cluster.fleet import OWN_NAME, Fleet, Replica, State
from app.cluster.front.look import Lookout
from app.cluster.front.upstream.pool import Pool
from app.cluster.load import READY
from app.cluster.moves.key import ClusterKey
from app.cluster.moves.peers import Peers
from app.cluster.moves.signatures import sign_request


class Outlook:
    """The peers' state and load, from their `/ready`. Used on the event loop only."""

    def __init__(self, here: str, peers: Peers, host: str | None, key: ClusterKey) -> None:
        """`here` is the server's own name, `host` a name that it answers to, and so its peers do. Peers tell their load
        to those who have the `key`.
        """
        self._here = here
        self._peers = peers
        self._pool = Pool()
        self._fleet = Fleet({})
        self._lookout = Lookout(self._fleet, self._pool, host, lambda name: sign_request(key, name, READY, b""))

    @property
    def ready(self) -> list[Replica]:
        """Those that take new work, the one with the most free KV first, and last those that only compute prompts."""
        ready = [each for each in self if each.state is State.READY]
        return sorted(ready, key=lambda each: (each.takes_sessions, each.room), reverse=True)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._fleet)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Within the block the peers are looked at, for the first time before it begins."""
        await self.look()
        looking = asyncio.create_task(self._lookout.run())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])
            self.close()

    async def look(self) -> None:
        """Look at all of them once, as the peers file has them."""
        self._fleet.replace({name: url for name, url in self._peers.urls.items() if name not in (self._here, OWN_NAME)})
        await self._lookout.look()

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()
