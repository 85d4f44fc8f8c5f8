"""Resolves a request to its replica."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from starlette.types import Scope

from app.cluster.directory import Directory, name_key, response_key, session_key
from app.cluster.fleet import Fleet, Replica, State
from app.cluster.front.routing.seeking import Seeker
from app.domain.errors import DirectoryAway, ReplicaAway
from app.domain.homes import home_of, home_of_response

logger = logging.getLogger(__name__)


Seek = Callable[[], Awaitable[Replica | None]]


@dataclass(frozen=True, slots=True)
class Owner:
    """The replica of a request, and the directory's key for it. Without a key any replica may answer."""

    replica: Replica
    key: str | None = None
    is_new: bool = False
    """Whether the replica was chosen just now, so that another one is as good."""
    seek: Seek | None = None
    """Asks all replicas which of them has it."""
    is_name: bool = False
    """Whether it is a name that a client chose. If no replica has it, a new session gets the name."""


REMEMBERED = 100_000
"""Places that are known without asking the directory."""


class Owners:
    """Finds the owner of a session, a response or a name. Used on the event loop only.

    An id names its owner, so most requests need no lookup. The home of a moved session says where it is, and the front
    door remembers that. If the home is away, the front door asks the directory and then all replicas: the home may have
    handed the session on before.
    """

    def __init__(
        self, fleet: Fleet, directory: Directory, seeker: Seeker, old_names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`old_names` are those that tenants had in entries of the directory that an older version has made."""
        self._fleet = fleet
        self._directory = directory
        self._seeker = seeker
        self._old_names = old_names
        self._known: OrderedDict[str, str] = OrderedDict()

    async def of_session(self, session_id: str, scope: Scope) -> Owner:
        """The replica that has the session, for the client whose request has that `scope`. Raises `ReplicaAway` and
        `DirectoryAway`.
        """
        return await self._of_id(
            session_key(session_id), home_of(session_id), partial(self._seeker.session, session_id, scope)
        )

    async def of_response(self, response_id: str, scope: Scope) -> Owner:
        """The replica that has the response. Raises `ReplicaAway` and `DirectoryAway`."""
        return await self._of_id(
            response_key(response_id), home_of_response(response_id), partial(self._seeker.response, response_id, scope)
        )

    async def of_name(self, owner: str | None, name: str, scope: Scope) -> Owner:
        """The replica with the session of that name or id. The front door places a new one by room, and also one whose
        replica is gone, if no replica has it. Raises `ReplicaAway` and `DirectoryAway`.
        """
        if (home := home_of(name)) is not None:
            return await self._of_id(session_key(name), home, partial(self._seek_called, name, scope))
        key = name_key(owner, name)
        known = self._recall(key) or await self._directory.find(key)
        if known is None and (old_name := self._old_names.get(owner or "")) is not None:
            known = await self._directory.find(name_key(old_name, name))
            if known is not None:
                await self._directory.put(key, known)
        if known is None:
            known = await self._directory.bind(key, self._fleet.place().name)
            self._remember(key, known)
            return Owner(self._fleet.reachable(known), key, is_new=True)
        self._remember(key, known)
        seek = partial(self._seeker.named, name, scope)
        if self._fleet.find(known) is None and await seek() is None:
            return await self._replaced(key, known)
        return Owner(await self._replica_of_id(key, known, seek), key, seek=seek, is_name=True)

    async def followed(self, response_id: str, scope: Scope) -> Replica:
        """The replica that has the response now, for what can be sent to one replica alone. Raises `ReplicaAway` and
        `DirectoryAway`.
        """
        owner = await self.of_response(response_id, scope)
        found = await self._seeker.followed(response_id, owner.replica, scope)
        if found is not owner.replica:
            await self.moved(response_key(response_id), found.name)
        return self._fleet.reachable(found.name)

    async def replaced(self, owner: Owner) -> Owner:
        """Another replica for what is new, as the first one takes nothing. Raises `ReplicaAway` and `DirectoryAway`."""
        if owner.key is None:
            return Owner(self._fleet.place())
        return await self._replaced(owner.key, owner.replica.name)

    async def anew(self, owner: Owner) -> Owner:
        """Another replica for a name that no replica has: the first one goes on answering that the session has moved.
        Raises `ReplicaAway` if there is no other, and `DirectoryAway`.
        """
        assert owner.key is not None
        found = self._fleet.place(but=owner.replica.name)
        await self._directory.put(owner.key, found.name)
        self._remember(owner.key, found.name)
        return Owner(found, owner.key, is_new=True)

    async def _replaced(self, key: str, old: str) -> Owner:
        found = await self._directory.find(key)
        if found in (None, old):  # no other request was quicker
            found = self._fleet.place().name
            await self._directory.put(key, found)
        assert found is not None
        self._remember(key, found)
        return Owner(self._fleet.reachable(found), key, is_new=True)

    async def moved(self, key: str, replica: str) -> None:
        """Note that a replica has said where something is."""
        self._remember(key, replica)
        try:
            await self._directory.put(key, replica)
        except DirectoryAway as error:
            logger.warning("%s; a session that moved is known here alone", error.message)

    async def _seek_called(self, name: str, scope: Scope) -> Replica | None:
        """An id may be a name too: that of the session which the first call with it has opened."""
        return await self._seeker.session(name, scope) or await self._seeker.named(name, scope)

    async def _of_id(self, key: str, home: str | None, seek: Seek) -> Owner:
        """Without an id there is no lookup."""
        asked = None if home is None else seek
        return Owner(await self._replica_of_id(key, home, asked), key, seek=asked)

    async def _replica_of_id(self, key: str, home: str | None, seek: Seek | None) -> Replica:
        known = self._recall(key) or home
        replica = self._fleet.find(known)
        if replica is not None and replica.state is not State.AWAY:
            return replica
        found = await self._asked(key, home)
        other = self._fleet.find(found)
        if found is not None and found != known and other is not None and other.state is not State.AWAY:
            self._remember(key, found)
            return other
        try:
            sought = None if seek is None else await seek()
        except ReplicaAway:
            if replica is None:
                raise
            sought = None  # below it is told which one is away
        if sought is not None:
            await self.moved(key, sought.name)
            return sought
        if found is not None and found != known:
            return self._fleet.reachable(found)
        if replica is not None or found is not None:
            assert known is not None
            return self._fleet.reachable(known)
        # No known replica has made it: any replica says whether the caller may ask, and that it is not there.
        return self._fleet.any()

    async def _asked(self, key: str, home: str | None) -> str | None:
        try:
            return await self._directory.find(key)
        except DirectoryAway:
            if home is None:
                raise
            raise ReplicaAway(
                f"replica {home} is away, and so is the directory, which would know of a move: try again"
            ) from None

    def _recall(self, key: str) -> str | None:
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        return None

    def _remember(self, key: str, replica: str) -> None:
        self._known[key] = replica
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
