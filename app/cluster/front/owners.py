"""Who has what a request names."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from app.cluster.directory import Directory, name_key, response_key, session_key
from app.cluster.fleet import Fleet, Replica, State
from app.domain.errors import DirectoryAway, ReplicaAway
from app.domain.session_ids import home_of, home_of_response

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom a request is for, and the key under which that is known. Without one it is for any replica."""

    replica: Replica
    key: str | None = None


REMEMBERED = 100_000
"""Places that are known without asking the directory."""


class Owners:
    """Finds the owner of a session, a response or a name. Used on the event loop only.

    An id names its owner, so most requests ask nobody. A session that has moved is found by what its home says, and
    remembered; the directory is asked where the home is away.
    """

    def __init__(self, fleet: Fleet, directory: Directory) -> None:
        self._fleet = fleet
        self._directory = directory
        self._known: OrderedDict[str, str] = OrderedDict()

    async def of_session(self, session_id: str) -> Owner:
        """The replica that has the session. Raises `ReplicaAway` and `DirectoryAway`."""
        return await self._of_id(session_key(session_id), home_of(session_id))

    async def of_response(self, response_id: str) -> Owner:
        """The replica that has the response. Raises `ReplicaAway` and `DirectoryAway`."""
        return await self._of_id(response_key(response_id), home_of_response(response_id))

    async def of_name(self, owner: str | None, name: str) -> Owner:
        """The replica that has the session that the owner's calls name so: an id, or any name. A new one is placed by
        room. Raises `ReplicaAway` and `DirectoryAway`.
        """
        if home_of(name) is not None:
            return await self.of_session(name)
        key = name_key(owner, name)
        if (known := self._recall(key)) is not None:
            return Owner(self._fleet.reachable(known), key)
        found = await self._directory.find(key) or await self._directory.bind(key, self._fleet.place().name)
        self._remember(key, found)
        return Owner(self._fleet.reachable(found), key)

    async def moved(self, key: str, replica: str) -> None:
        """Note that a replica has said where something is."""
        self._remember(key, replica)
        try:
            await self._directory.put(key, replica)
        except DirectoryAway as error:
            logger.warning("%s; a session that moved is known here alone", error.message)

    async def _of_id(self, key: str, home: str | None) -> Owner:
        return Owner(await self._replica_of_id(key, home), key)

    async def _replica_of_id(self, key: str, home: str | None) -> Replica:
        known = self._recall(key) or home
        replica = self._fleet.find(known)
        if replica is not None and replica.state is not State.AWAY:
            return replica
        found = await self._asked(key, home)
        if found is not None and found != known:
            self._remember(key, found)
            return self._fleet.reachable(found)
        if replica is not None or found is not None:
            assert known is not None
            return self._fleet.reachable(known)
        # Nobody has made it, as far as is known: any replica says whether the caller may ask, and that it is not there.
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
