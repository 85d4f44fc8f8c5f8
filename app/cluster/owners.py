"""Finds the replica that has what a request is about: from its id, from the store, from its former home, or by asking
all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

import orjson
from starlette.types import Scope

from app.cluster.fleet import Fleet, Replica, State
from app.cluster.hop import Hops, moved_to, not_done
from app.cluster.membership import Membership, name_key, response_key, session_key
from app.cluster.targets import CONVERSATIONS, RESPONSES, SESSIONS
from app.domain.errors import DirectoryAway, ReplicaAway
from app.domain.homes import home_of, home_of_response
from app.domain.values import SessionId
from app.openai.response_store import ResponseStore
from app.sessions.named import BoundSessions
from app.sessions.table import SessionTable

logger = logging.getLogger(__name__)

REMEMBERED = 100_000
"""How many places are remembered without asking the store."""
PATIENCE_S = 3.0
"""How long a replica may take to say whether it has something."""
AT_ONCE = 16
"""Questions to all replicas at the same time: each costs every replica a request."""
NOBODY_S = 1.0
"""How long it is remembered that no replica has something, as clients retry."""
KEYS = (b"authorization", b"x-api-key")
DEFINITE = frozenset({200, 401, 403, 404, 421})
"""Statuses that tell whether a replica has it. Others, such as 429, leave that open."""

Seek = Callable[[], Awaitable[Replica | None]]


@dataclass(frozen=True, slots=True)
class Owner:
    """The replica of a request, and the store's key for it. Without a key any replica may answer."""

    replica: Replica
    key: str | None = None
    is_new: bool = False
    """Whether the replica was chosen just now, so that another one is as good."""
    seek: Seek | None = None
    """Asks all replicas which of them has it."""
    is_name: bool = False
    """Whether it is a name that a client chose. If no replica has it, a new session gets the name."""


class _Found(NamedTuple):
    replica: Replica | None
    """The one that has it."""
    is_sure: bool
    """Whether every replica has answered."""
    silent: list[str]
    """Those that have not."""


Question = tuple[bytes, tuple[bytes, ...]]
"""The path that is asked for, and the client's keys, as the answer depends on the client."""


class Owners:
    """Finds the owner of a session, a response or a name. Used on the event loop only.

    An id names its owner, and what is here is known here, so most requests need no lookup. The home of a moved session
    says where it is, and that is remembered. If the home is away, the store is asked, and then all replicas: the home
    may have handed the session on before.
    """

    def __init__(
        self,
        fleet: Fleet,
        names: Membership,
        hops: Hops,
        sessions: SessionTable,
        bound: BoundSessions,
        responses: ResponseStore,
    ) -> None:
        """`sessions`, `bound` and `responses` are this server's own, those on their way to or from it included."""
        self._fleet = fleet
        self._names = names
        self._hops = hops
        self._sessions = sessions
        self._bound = bound
        self._responses = responses
        self._known: OrderedDict[str, str] = OrderedDict()
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._asking: dict[Question, asyncio.Task[_Found]] = {}
        self._nobody: dict[Question, tuple[float, _Found]] = {}
        """Questions to which no replica said yes, and until when that holds, the oldest first."""

    @property
    def known(self) -> set[str]:
        """The names of all replicas that may have sessions, this one too, whether they are there or not."""
        return {*self._names.known, *(each.name for each in self._fleet.answering), self._fleet.here}

    async def of_session(self, session_id: str, scope: Scope) -> Owner:
        """The replica that has the session, for the client whose request has that `scope`. Raises `ReplicaAway`."""
        is_here, path = self._sessions.has(SessionId(session_id)), f"{SESSIONS}/{quote(session_id, safe='')}"
        return await self._of_id(session_key(session_id), home_of(session_id), is_here, path.encode(), scope)

    async def of_response(self, response_id: str, scope: Scope) -> Owner:
        """The replica that has the response or conversation. Raises `ReplicaAway`."""
        is_here, home = self._responses.has(response_id), home_of_response(response_id)
        return await self._of_id(response_key(response_id), home, is_here, path_of(response_id), scope)

    async def of_name(self, owner: str | None, name: str, scope: Scope) -> Owner:
        """The replica that has the session with that name or id. A new name is placed where there is room. So is one
        whose replica is gone for good, if no other has it. Raises `ReplicaAway` and `DirectoryAway`.
        """
        is_id = home_of(name) is not None
        if self._bound.has(owner, name):
            return Owner(self._fleet.own, None if is_id else name_key(owner, name))
        if is_id:
            return await self.of_session(name, scope)
        path = f"{SESSIONS}?limit=1&name={quote(name, safe='')}".encode()
        return await self._of_bound(name_key(owner, name), partial(self._seek, path, scope))

    async def of_files(self, owner: str | None) -> Owner:
        """The replica that keeps the owner's files and batches: all of them are at one. Raises `ReplicaAway` and
        `DirectoryAway`.
        """
        return await self._of_bound(f"files {owner or ''}", None)

    async def replaced(self, owner: Owner) -> Owner:
        """Another replica for something new, as the first takes nothing. Raises `ReplicaAway` and `DirectoryAway`."""
        but = owner.replica.name
        return Owner(self._fleet.place(but)) if owner.key is None else await self._rebound(owner.key, but, but)

    async def moved(self, key: str, replica: str) -> None:
        """Note that a replica has said where something is."""
        self._remember(key, replica)
        try:
            await self._names.put(key, replica)
        except DirectoryAway as error:
            logger.warning("%s; what has moved is known here alone", error.message)

    async def _of_bound(self, key: str, seek: Seek | None) -> Owner:
        """The replica that the store has for a key, or that is chosen now."""
        try:
            known = self._recall(key) or await self._names.find(key)
        except DirectoryAway:  # a session that is there goes on all the same
            with suppress(ReplicaAway):
                if seek is not None and (found := await seek()) is not None:
                    self._remember(key, found.name)
                    return Owner(found, key, seek=seek, is_name=True)
            raise
        if known is None:
            return await self._rebound(key, None)
        self._remember(key, known)
        replica = self._fleet.find(known)
        if replica is not None and replica.state is not State.AWAY:
            return Owner(replica, key, seek=seek, is_name=True)
        if seek is not None and (found := await seek()) is not None:
            await self.moved(key, found.name)
            return Owner(found, key, seek=seek, is_name=True)
        if known not in self._names.known:
            return await self._rebound(key, known)
        return Owner(self._fleet.reachable(known), key)  # raises

    async def _rebound(self, key: str, old: str | None, but: str | None = None) -> Owner:
        """Choose a replica for the key. Of several that do so at the same time, one wins."""
        placed = self._fleet.place(but).name
        found = await self._names.swap(key, old, placed)
        self._remember(key, found)
        return Owner(self._fleet.reachable(found), key, is_new=found == placed)

    async def _of_id(self, key: str, home: str | None, is_here: bool, path: bytes, scope: Scope) -> Owner:
        known = self._recall(key) or home
        if is_here:
            return Owner(self._fleet.own, key)
        if known is None:
            return Owner(self._fleet.own)  # no replica makes such ids: this one says whether the caller may ask
        replica, seek = self._fleet.find(known), partial(self._seek, path, scope)
        if replica is not None and replica.state is not State.AWAY:
            return Owner(replica, key, seek=seek)
        try:
            found = self._fleet.find(await self._names.find(key))
        except DirectoryAway:
            message = f"replica {known} is away, and so is the store, which would know of a move: try again"
            raise ReplicaAway(message) from None
        if found is None or found.name == known or found.state is State.AWAY:
            found = await seek()
        if found is not None:
            await self.moved(key, found.name)
            return Owner(found, key, seek=seek)
        if known in self._names.known:
            return Owner(self._fleet.reachable(known), key)  # raises
        return Owner(self._fleet.own)

    # Questions to all replicas, for what one has handed on before it went away.

    async def _seek(self, path: bytes, scope: Scope) -> Replica | None:
        """The replica that has it; None: no replica does. Raises `ReplicaAway` if one did not answer that may."""
        question = path, tuple(value for name, value in scope["headers"] if name in KEYS)
        now = time.monotonic()
        while self._nobody and next(iter(self._nobody.values()))[0] <= now:
            del self._nobody[next(iter(self._nobody))]
        if question in self._nobody:
            _, found = self._nobody[question]
        else:
            asking = self._asking.get(question)
            if asking is None:
                asking = self._asking[question] = asyncio.create_task(self._ask_all(path, scope))
                asking.add_done_callback(lambda task: self._note(question, task))
            found = await asyncio.shield(asking)
        if found.replica is None and not found.is_sure:
            who = f"replica {', '.join(found.silent)}" if found.silent else "a replica"
            raise ReplicaAway(f"{who} may have it, and does not answer: try again")
        return found.replica

    async def _ask_all(self, path: bytes, scope: Scope) -> _Found:
        asked = [self._hops.get(each, scope, path, PATIENCE_S) for each in self._fleet.answering]
        async with self._at_once:
            gathered = await asyncio.gather(*asked, return_exceptions=True)
        told = [each for each in gathered if not isinstance(each, BaseException)]
        has = [
            answer.replica
            for answer, content in told
            if not_done(answer.headers) == "moving"
            or (answer.status == 200 and orjson.loads(content).get("data") != [])  # a list of those with the name
        ]
        homes = {answer.replica: moved_to(answer.headers) for answer, _ in told}
        left = {replica: self._fleet.find(home) for replica, home in homes.items() if home is not None}
        last = [home for home in left.values() if home is not None and home not in left]  # not handed on since
        silent = set(self._names.known) - {answer.replica.name for answer, _ in told if answer.status in DEFINITE}
        is_told = not silent and all(answer.status in DEFINITE for answer, _ in told)
        if not is_told:  # one that lacks it may have forgotten to whom it has handed it on
            last = [home for home in last if home.state is not State.AWAY and home not in homes]
        found = next(iter([*has, *last]), None)
        return _Found(found, is_told and (not left or None in left.values()), sorted(silent))

    def _note(self, question: Question, task: asyncio.Task[_Found]) -> None:
        del self._asking[question]
        if not task.cancelled() and task.exception() is None and task.result().replica is None:
            self._nobody[question] = time.monotonic() + NOBODY_S, task.result()

    def _recall(self, key: str) -> str | None:
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def _remember(self, key: str, replica: str) -> None:
        self._known[key] = replica
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def path_of(response_id: str) -> bytes:
    """Of the response or conversation."""
    kind = CONVERSATIONS if response_id.startswith("conv_") else RESPONSES
    return f"{kind}/{quote(response_id, safe='')}".encode()
