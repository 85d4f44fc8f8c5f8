"""This server as a part of a cluster: what it tells the others, and what it does with them."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from functools import partial

from app.cluster.claims import Load
from app.cluster.fleet import Fleet, State
from app.cluster.hop import Hops
from app.cluster.key import ClusterKey
from app.cluster.membership import Membership, files_key, id_key, name_key
from app.cluster.moves.arrivals import Arrivals
from app.cluster.moves.departures import Departures
from app.cluster.moves.draining import Draining
from app.cluster.owners import Owners
from app.cluster.prefill import Prefill
from app.domain.errors import DirectoryAway, DjinnError
from app.domain.homes import home_of
from app.domain.tasks import Tasks
from app.openai.response_store import ResponseStore
from app.sessions.named import BoundSessions
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.settings import Settings
from app.tenants.tenant import Directory

logger = logging.getLogger(__name__)
SAY_S, SAY_SOON_S = 1.0, 0.1
"""Between two measurements of the load or attempts to tell the store, and two looks at whether new work is taken."""
PATIENCE_S = 0.25
"""How long the engine may take to tell the load: it may be in a long step."""


class Cluster:
    """Used on the event loop only."""

    def __init__(
        self,
        registry: SessionRegistry,
        directory: Directory,
        membership: Membership,
        key: ClusterKey,
        bound: BoundSessions,
        responses: ResponseStore,
        file_owners: Callable[[], Collection[str | None]],
        settings: Settings,
    ) -> None:
        """`directory` is that of the tenants, and `file_owners` returns those that have files here."""
        self.membership = membership
        self.fleet = Fleet(membership.name, lambda: membership.members)
        self.hops = Hops(self.fleet, key, membership.changed)
        self.owners = Owners(membership, self.hops, registry.table, bound, responses)
        self._tasks = Tasks()
        self.arrivals = Arrivals(registry, directory, bound, responses, self._tasks)
        self.departures = Departures(registry, self.hops, responses, membership, self._tasks)
        self.draining = Draining(registry, self.departures, self.fleet)
        self.prefill = Prefill(registry, self.hops, settings)
        self._balances = settings.balance
        self._registry, self._file_owners = registry, file_owners
        registry.table.require_home = self.departures.require_home
        self.arrivals.on_taken = lambda session: self._tasks.start(self._has_come(session))
        membership.held = lambda: itertools.chain(map(files_key, file_owners()), *map(self._keys, registry.table))
        for state in State:
            registry.metrics.cluster_replicas.labels(state.value).set_function(partial(self._count, state))

    @contextlib.asynccontextmanager
    async def running(self, require_ready: Callable[[], None]) -> AsyncIterator[None]:
        """Take part in the cluster within the block. `require_ready` raises a `DjinnError` while no new work is taken.
        Call this when all sessions are open.
        """
        async with self.membership, self.hops.watching():
            self._tasks.start(self._tell(require_ready))
            if self._balances:
                self._tasks.start(self.draining.balance())
            self.departures.settle_all()  # those that were leaving when the server ended
            try:
                yield
            finally:  # the journal has the state of moves
                await self.prefill.tasks.close()
                await self._tasks.close()

    async def _tell(self, require_ready: Callable[[], None]) -> None:
        """Keep telling the others how this replica is."""
        load, told_at, loop = Load(0.0, 0), -SAY_S, asyncio.get_running_loop()
        while True:
            is_ready, pause_s = False, SAY_SOON_S
            try:
                if loop.time() - told_at >= SAY_S:
                    told_at = loop.time()
                    with contextlib.suppress(TimeoutError, DjinnError):  # the last one holds
                        async with asyncio.timeout(PATIENCE_S):
                            load = Load.measured(await self._registry.memory())
                with contextlib.suppress(DjinnError):
                    require_ready()
                    is_ready = True
            except Exception:
                logger.exception("this replica could not look how it is; it tries again")
                pause_s = SAY_S
            self.membership.say(ready=is_ready, left=self.draining.is_over and not self._file_owners(), load=load)
            await asyncio.sleep(pause_s)

    def _count(self, state: State) -> int:
        """How many replicas are in that state, of all that may have sessions."""
        there = {each.name: each.state for each in self.fleet}
        return sum(there.get(name, State.AWAY) is state for name in self.membership.known)

    @property
    def away(self) -> list[str]:
        """Names of replicas that may have sessions, and do not answer."""
        return sorted(self.membership.known - {each.name for each in self.fleet.answering})

    def _keys(self, session: Session) -> Iterator[str]:
        """The session's keys in the store. A session whose id names this replica needs none for its id."""
        if home_of(session.id) != self.membership.name:
            yield id_key(session.id)
        if session.called is not None and not session.ephemeral:
            yield name_key(session.owner, session.called)

    async def _has_come(self, session: Session) -> None:
        """Write to the store that a session has arrived: its former home may be away when somebody asks."""
        for key in [id_key(session.id), *self._keys(session)]:
            while self._registry.table.find(session.id) is session:
                try:
                    await self.membership.put(key, self.membership.name)
                    break
                except DirectoryAway:
                    await asyncio.sleep(SAY_S)
