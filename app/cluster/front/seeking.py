"""Finds what a replica has handed on before it went away: whoever has it now says so itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import quote

import orjson
from starlette.types import Scope

from app.cluster.fleet import OWN_NAME, Fleet, Replica, State
from app.cluster.front.fetch import Fetched, fetch
from app.cluster.front.heads import bodiless, moved_to, not_done
from app.cluster.front.pool import Pool
from app.cluster.front.routes import RESPONSES, SESSIONS
from app.domain.errors import ReplicaAway

PATIENCE_S = 3.0
"""How long a replica may take to say whether it has something."""
AT_ONCE = 16
"""Questions at the same time: each costs every replica a request."""
NOBODY_S = 1.0
"""How long nobody is asked again after what nobody had: clients repeat their requests."""
KEYS = (b"authorization", b"x-api-key")

Question = tuple[str, tuple[bytes, ...]]
"""What is asked for, and the keys of the client that wants it: replicas answer each client for itself."""
HasIt = Callable[[Fetched], bool]


class Seeker:
    """Asks all replicas that answer, as the client that wants something. Used on the event loop only."""

    def __init__(self, fleet: Fleet, pool: Pool) -> None:
        self._fleet = fleet
        self._pool = pool
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._asking: dict[Question, asyncio.Task[Replica | None]] = {}
        self._nobody: dict[Question, float] = {}
        """Until when nobody has it, the oldest first."""

    async def session(self, session_id: str, scope: Scope) -> Replica | None:
        """Who has the session, for the client whose request has that `scope`. None: none of those that answer."""
        return await self._find(f"{SESSIONS}/{session_id}", scope, _is_there)

    async def response(self, response_id: str, scope: Scope) -> Replica | None:
        """Who has the response. None: none of those that answer."""
        return await self._find(f"{RESPONSES}/{response_id}", scope, _is_there)

    async def named(self, name: str, scope: Scope) -> Replica | None:
        """Who has the session that the client's calls name so. None: none of those that answer."""
        return await self._find(f"{SESSIONS}?limit=1&name={quote(name, safe='')}", scope, _has_any)

    async def followed(self, response_id: str, first: Replica, scope: Scope) -> Replica:
        """Who has the response, as `first` says, who has had it: for what can be sent to one replica alone."""
        path = f"{RESPONSES}/{response_id}".encode()
        try:
            told = await fetch(self._pool, first, path, bodiless(scope, OWN_NAME), PATIENCE_S)
        except ReplicaAway:
            return first
        return self._fleet.find(moved_to(told.headers)) or first

    async def _find(self, target: str, scope: Scope, has_it: HasIt) -> Replica | None:
        question = target, tuple(value for name, value in scope["headers"] if name in KEYS)
        self._forget(time.monotonic())
        if question in self._nobody:
            return None
        asking = self._asking.get(question)
        if asking is None:
            asking = self._asking[question] = asyncio.create_task(self._ask(target, scope, has_it))
            asking.add_done_callback(lambda task: self._note(question, task))
        return await asyncio.shield(asking)

    async def _ask(self, target: str, scope: Scope, has_it: HasIt) -> Replica | None:
        path, headers = target.encode(), bodiless(scope, OWN_NAME)
        async with self._at_once:
            asked = [
                fetch(self._pool, each, path, headers, PATIENCE_S)
                for each in self._fleet
                if each.state is not State.AWAY
            ]
            told = await asyncio.gather(*asked, return_exceptions=True)
        names = [self._home(each, has_it) for each in told if isinstance(each, Fetched)]
        return next((each for each in names if each is not None and each.state is not State.AWAY), None)

    def _note(self, question: Question, task: asyncio.Task[Replica | None]) -> None:
        del self._asking[question]
        if not task.cancelled() and task.exception() is None and task.result() is None:
            self._nobody[question] = time.monotonic() + NOBODY_S

    def _forget(self, now: float) -> None:
        while self._nobody and next(iter(self._nobody.values())) <= now:
            del self._nobody[next(iter(self._nobody))]

    def _home(self, told: Fetched, has_it: HasIt) -> Replica | None:
        """Where it is by what one replica says."""
        if has_it(told) or not_done(told.headers) == "moving":
            return told.replica
        return self._fleet.find(moved_to(told.headers))


def _is_there(told: Fetched) -> bool:
    """Whether the replica has shown it."""
    return told.status == 200


def _has_any(told: Fetched) -> bool:
    """Whether the replica's list has something."""
    return told.status == 200 and bool(orjson.loads(told.content)["data"])
