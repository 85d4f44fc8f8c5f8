"""Finds sessions that a replica has handed on before it went away, by asking all other replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

import orjson
from starlette.types import Scope

from app.cluster.fleet import Fleet, Replica, State
from app.cluster.front.heads import bodiless, moved_to, not_done
from app.cluster.front.routing.targets import CONVERSATIONS, RESPONSES, SESSIONS
from app.cluster.front.upstream.fetch import Fetched, fetch
from app.cluster.front.upstream.pool import Pool
from app.domain.errors import ReplicaAway

PATIENCE_S = 3.0
"""How long a replica may take to say whether it has something."""
AT_ONCE = 16
"""Questions at the same time: each costs every replica a request."""
NOBODY_S = 1.0
"""How long the front door remembers that no replica has something: clients retry."""
KEYS = (b"authorization", b"x-api-key")

DEFINITE = frozenset({200, 401, 403, 404, 421})
"""Statuses of answers by which a replica has it, or has not. Others, such as 429, leave that open."""


def _path_of(response_id: str) -> str:
    return f"{CONVERSATIONS if response_id.startswith('conv_') else RESPONSES}/{response_id}"


Question = tuple[str, tuple[bytes, ...]]
"""What is asked for, and the keys of the client that wants it: replicas answer each client for itself."""
HasIt = Callable[[Fetched], bool]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The replica that has it. `is_sure`: every replica has answered."""

    replica: Replica | None
    is_sure: bool


class Seeker:
    """Asks all replicas, as the client that wants something. Used on the event loop only.

    All questions but `followed` return None if no replica has it. They raise `ReplicaAway` if one did not answer.
    """

    def __init__(self, fleet: Fleet, pool: Pool, host: str) -> None:
        """Replicas answer to `host`, for clients that name none."""
        self._fleet = fleet
        self._host = host
        self._pool = pool
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._asking: dict[Question, asyncio.Task[_Answer]] = {}
        self._nobody: dict[Question, tuple[float, _Answer]] = {}
        """Questions without a finder, and until when that holds, the oldest first."""

    async def session(self, session_id: str, scope: Scope) -> Replica | None:
        """The replica with the session, for the client whose request has that `scope`."""
        return await self._find(f"{SESSIONS}/{session_id}", scope, _is_there)

    async def response(self, response_id: str, scope: Scope) -> Replica | None:
        """The replica with the response or conversation."""
        return await self._find(_path_of(response_id), scope, _is_there)

    async def named(self, name: str, scope: Scope) -> Replica | None:
        """The replica with the client's session of that name."""
        return await self._find(f"{SESSIONS}?limit=1&name={quote(name, safe='')}", scope, _has_any)

    async def followed(self, response_id: str, first: Replica, scope: Scope) -> Replica:
        """The replica with the response or conversation, according to `first`, its former one: for requests that are
        sent only once.
        """
        path = _path_of(response_id).encode()
        try:
            told = await fetch(self._pool, first, path, bodiless(scope, self._host), PATIENCE_S)
        except ReplicaAway:
            return first
        return self._fleet.find(moved_to(told.headers)) or first

    async def _find(self, target: str, scope: Scope, has_it: HasIt) -> Replica | None:
        question = target, tuple(value for name, value in scope["headers"] if name in KEYS)
        self._forget(time.monotonic())
        if question in self._nobody:
            _, answer = self._nobody[question]
        else:
            asking = self._asking.get(question)
            if asking is None:
                asking = self._asking[question] = asyncio.create_task(self._ask(target, scope, has_it))
                asking.add_done_callback(lambda task: self._note(question, task))
            answer = await asyncio.shield(asking)
        if answer.replica is None and not answer.is_sure:
            raise ReplicaAway("a replica that may have it does not answer: try again")
        return answer.replica

    async def _ask(self, target: str, scope: Scope, has_it: HasIt) -> _Answer:
        path, headers, fleet = target.encode(), bodiless(scope, self._host), list(self._fleet)
        async with self._at_once:
            asked = [each for each in fleet if each.state is not State.AWAY]
            told = await asyncio.gather(
                *(fetch(self._pool, each, path, headers, PATIENCE_S) for each in asked), return_exceptions=True
            )
        answers = [each for each in told if isinstance(each, Fetched)]
        has = [each.replica for each in answers if has_it(each) or not_done(each.headers) == "moving"]
        left = {each.replica: self._fleet.find(moved_to(each.headers)) for each in answers if moved_to(each.headers)}
        last = [home for home in left.values() if home is not None and home not in left]  # not handed on since
        is_told = len(answers) == len(fleet) and all(each.status in DEFINITE for each in answers)
        if not is_told:  # one that lacks it may have forgotten to whom it has handed it on
            last = [home for home in last if home.state is not State.AWAY and home not in {a.replica for a in answers}]
        found = next(iter([*has, *last]), None)
        return _Answer(found, is_told and (not left or None in left.values()))

    def _note(self, question: Question, task: asyncio.Task[_Answer]) -> None:
        del self._asking[question]
        if not task.cancelled() and task.exception() is None and task.result().replica is None:
            self._nobody[question] = time.monotonic() + NOBODY_S, task.result()

    def _forget(self, now: float) -> None:
        while self._nobody and next(iter(self._nobody.values()))[0] <= now:
            del self._nobody[next(iter(self._nobody))]


def _is_there(told: Fetched) -> bool:
    """Whether the replica has shown it."""
    return told.status == 200


def _has_any(told: Fetched) -> bool:
    """Whether the replica's list has something."""
    return told.status == 200 and bool(orjson.loads(told.content)["data"])
