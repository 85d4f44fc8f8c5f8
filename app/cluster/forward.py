"""Every replica is a door: it answers what is its own, and sends the rest one hop on, to the replica that has it.

It comes behind the check of the key and the limits of bodies. A request is tried where its owner is believed to be.
That replica, this one or another, answers it, or says that nothing was done because the session has moved or moves, or
because it takes nothing new. Then the request goes to the next, as long as its body is kept.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.cluster.fleet import Fleet, Replica
from app.cluster.gather import Gathered
from app.cluster.hop import NOT_PASSED, Answer, Body, Gone, Hops, moved_to, not_done
from app.cluster.hop import Headers as RawHeaders
from app.cluster.owners import Owner, Owners
from app.cluster.sockets import Sockets
from app.cluster.targets import OWNED, About, Target, is_turn, previous_response, target_of
from app.domain.errors import DjinnError, ReplicaAway, ReplicaLost, ReplicaMoving
from app.domain.homes import home_of
from app.domain.values import MAX_NAME
from app.web.errors import error_response
from app.web.idempotency import HEADER as IDEMPOTENCY_KEY
from app.web.middleware import HOP, SESSION_HEADER, TOKEN_HEADER

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""How long a request waits for a session that is on its way."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.5
"""Between two questions after it: half as long again each time. Most moves take less than a second."""


class Way(StrEnum):
    """How a request came to its owner."""

    HERE = "here"
    """It is this replica."""
    HOP = "hop"
    """It is another one, which answered at the first try."""
    FOLLOWED = "followed"
    """At a later try: the first replica has said where the session has moved."""
    MOVING_ON = "moving_on"
    """Not at all, as the request could not be sent after a session that moves."""
    AWAY = "away"
    """Not at all, as its owner does not answer."""
    LOST = "lost"
    """The owner went away before its answer."""


class Why(enum.Enum):
    """Why nothing of a request was done."""

    MOVED = "moved"
    LOST = "lost"
    """It has moved to a replica that is not known here."""
    MOVES = "moving"
    DRAINS = "draining"
    STALLS = "stalled"
    """Its engine makes no progress."""


@dataclass(frozen=True, slots=True)
class Turned:
    """A request that was turned away. `home` is where the session has gone."""

    why: Why
    home: Replica | None = None


def turned_away(status: int, headers: RawHeaders, fleet: Fleet) -> Turned | None:
    """What the head of a replica's answer says of that; None: it is the answer."""
    if status == HTTPStatus.MISDIRECTED_REQUEST:
        home = fleet.find(moved_to(headers))
        return Turned(Why.LOST if home is None else Why.MOVED, home)
    why = not_done(headers)
    return Turned(Why(why)) if why in (Why.MOVES.value, Why.DRAINS.value, Why.STALLS.value) else None


@dataclass(slots=True)
class Following:
    """How one request has been turned away so far. It began at `began`, a time of the event loop, with `first`."""

    first: str
    began: float
    has_sought: bool = False
    """Whether all replicas have been asked who has the session."""
    is_followed: bool = False
    _asked: set[str] = field(default_factory=set)
    _refused: set[str] = field(default_factory=set)
    _wait_s: float = FIRST_WAIT_S

    def __post_init__(self) -> None:
        """The first replica is the first of those that were asked."""
        self._asked.add(self.first)

    def may_follow(self, turned: Turned, owner: Owner, body: Body, now: float) -> bool:
        """Whether to go on; else the client gets the answer, and repeats its request itself."""
        match turned.why:
            case Why.MOVED:
                return True
            case Why.LOST:
                return body.can_repeat and owner.seek is not None and not self.has_sought
            case Why.MOVES:
                return body.can_repeat and now - self.began < PATIENCE_S
            case _:
                is_free = owner.key is None or owner.is_new
                return body.can_repeat and is_free and owner.replica.name not in self._refused

    def note_refusal(self, name: str) -> None:
        """That replica takes nothing new: it is not asked again."""
        self._refused.add(name)

    def next_wait_s(self) -> float:
        """How long to wait before the same replica is asked again."""
        wait_s, self._wait_s = self._wait_s, min(1.5 * self._wait_s, LONGEST_WAIT_S)
        return wait_s

    def go(self, name: str, body: Body) -> None:
        """Ask that replica next. Raises `ReplicaMoving` if the body cannot be sent again, and for a session that comes
        back to where it was: it is not chased.
        """
        if not body.can_repeat:
            raise ReplicaMoving(f"the session has moved to replica {name}: repeat the request")
        if name in self._asked:
            raise ReplicaMoving(f"the session moves on, now to replica {name}: repeat the request")
        self._asked.add(name)


class Forwarding:
    """The middleware. Used on the event loop only."""

    def __init__(self, app: ASGIApp, fleet: Fleet, owners: Owners, hops: Hops, requests: Counter) -> None:
        """`requests` counts them, by whether they start a turn, and by their `Way`."""
        hops.inside = self._app = app
        self._fleet = fleet
        self._owners = owners
        self._hops = hops
        self._gathered = Gathered(fleet, owners, hops)
        self._sockets = Sockets(app, self._named, owners, hops)
        self._requests = requests
        for turn in ("yes", "no"):  # a series that begins with its first event has no rate of it
            for way in Way:
                self._requests.labels(turn, way.value)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        if scope["type"] == "lifespan" or HOP in scope["state"]:
            await self._app(scope, receive, send)
            return
        target = Target(About.CALL) if scope["type"] == "websocket" else target_of(scope["method"], scope["path"])
        if target.about is About.HERE:
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if scope["type"] == "websocket":
                await self._sockets.serve(scope, receive, send_noted)
            else:
                await self._serve(scope, target, Body(receive), send_noted)
        except DjinnError as error:
            if has_begun:
                _cut(scope, error)
            else:
                await error_response(error, scope)(scope, receive, send)
        except Gone:
            pass

    async def _serve(self, scope: Scope, target: Target, body: Body, send: Send) -> None:
        try:
            if target.about is About.GATHERED:
                await self._gathered.serve(scope, body, send)
            elif target.about is About.EVERY:
                await self._ask_every(scope, body, send)
            else:
                await self._ask_owner(scope, target, body, send)
        except Gone:
            if body.refusal is not None:
                raise body.refusal from None
            raise

    # Requests that have an owner, or get one.

    async def _owner(self, scope: Scope, target: Target, body: Body) -> Owner:
        match target.about:
            case About.SESSION:
                return await self._owners.of_session(target.id, scope)
            case About.RESPONSE:
                return await self._owners.of_response(target.id, scope)
            case About.FILES:
                return await self._owners.of_files(scope["state"]["owner"])
            case About.CREATE_RESPONSE:
                previous = previous_response(await body.whole())
                return await (self._named(scope) if previous is None else self._owners.of_response(previous, scope))
            case About.CALL:
                return await self._named(scope)
            case _:
                return self._placed(scope)

    async def _named(self, scope: Scope) -> Owner:
        """Whom a call is for by its header. One without is placed where there is room."""
        headers, owner = Headers(scope=scope), scope["state"]["owner"]
        names = headers.getlist(SESSION_HEADER)
        if not names and home_of(token := headers.get(TOKEN_HEADER, "")) is not None:
            names = [token]
        if not names or not names[0] or len(names[0]) > MAX_NAME:  # this replica refuses such a name
            return self._placed(scope)
        return await self._owners.of_name(owner, names[0], scope)

    def _placed(self, scope: Scope) -> Owner:
        """Where something new goes. What is asked for again with its key goes to the replica that may have done it."""
        key = Headers(scope=scope).get(IDEMPOTENCY_KEY)
        return Owner(self._fleet.place(key=None if key is None else f"{scope['state']['owner'] or ''} {key}"))

    async def _ask_owner(self, scope: Scope, target: Target, body: Body, send: Send) -> None:
        """Have only the owner answer, wherever it is by then."""
        turn = "yes" if is_turn(scope["method"], scope["path"]) else "no"

        def count(way: Way) -> None:
            if target.about in OWNED:
                self._requests.labels(turn, way.value).inc()

        try:
            owner = await self._owner(scope, target, body)
            following = Following(owner.replica.name, asyncio.get_running_loop().time())
            while True:
                try:
                    turned = await self._ask(scope, owner, body, send, following, count)
                except ReplicaAway:  # nothing was sent
                    owner = await self._elsewhere(scope, target, owner, body, following)
                    continue
                if turned is None:
                    return
                owner = await self._follow(owner, turned, body, following)
        except ReplicaAway:
            count(Way.AWAY)
            raise
        except ReplicaLost:
            count(Way.LOST)
            raise
        except ReplicaMoving:
            count(Way.MOVING_ON)
            raise

    async def _ask(
        self,
        scope: Scope,
        owner: Owner,
        body: Body,
        send: Send,
        following: Following,
        count: Callable[[Way], None],
    ) -> Turned | None:
        """Pass the replica's answer, unless it has turned the request away and another one may do it."""
        replica, loop = owner.replica, asyncio.get_running_loop()

        def turned_on(status: int, headers: RawHeaders) -> Turned | None:
            turned = turned_away(status, headers, self._fleet)
            if turned is not None and following.may_follow(turned, owner, body, loop.time()):
                return turned
            is_own = replica.name == self._fleet.here
            count(Way.FOLLOWED if following.is_followed else Way.HERE if is_own else Way.HOP)
            return None

        if replica.name == self._fleet.here:
            return await self._answer_here(scope, body, send, turned_on)
        self._fleet.reachable(replica.name)
        async with self._hops.asking(replica, scope, body) as answer:
            if (turned := turned_on(answer.status, answer.headers)) is not None:
                return turned
            await pass_answer(answer, send)
        return None

    async def _answer_here(
        self, scope: Scope, body: Body, send: Send, turned_on: Callable[[int, RawHeaders], Turned | None]
    ) -> Turned | None:
        """The same of this replica."""
        turned: Turned | None = None

        async def send_own(message: Message) -> None:
            nonlocal turned
            if message["type"] == "http.response.start":
                turned = turned_on(message["status"], message.get("headers", []))
            if turned is None:
                await send(message)

        await self._app(scope, body.again(), send_own)
        return turned

    async def _follow(self, owner: Owner, turned: Turned, body: Body, following: Following) -> Owner:
        """Whom to ask next."""
        following.is_followed = True
        if turned.why in (Why.DRAINS, Why.STALLS):
            following.note_refusal(owner.replica.name)
            return await self._owners.replaced(owner)
        if turned.why is Why.MOVES:
            await asyncio.sleep(following.next_wait_s())
            return owner
        home = turned.home
        if home is None:
            assert owner.seek is not None
            following.has_sought = True
            home = await owner.seek()
            if home is None:
                return await self._owners.replaced(owner) if owner.is_name else owner  # whose answer passes
        if owner.key is not None:
            await self._owners.moved(owner.key, home.name)
        following.go(home.name, body)
        return Owner(home, owner.key, seek=owner.seek)

    async def _elsewhere(self, scope: Scope, target: Target, owner: Owner, body: Body, following: Following) -> Owner:
        """Whom to ask in place of a replica that has just been found to be away. Raises `ReplicaAway`."""
        if body.can_repeat and (owner.key is None or owner.is_new):
            return await self._owners.replaced(owner)
        if not body.can_repeat or following.has_sought:
            self._fleet.reachable(owner.replica.name)
        following.has_sought = True
        return await self._owner(scope, target, body)

    # Requests that all replicas must do.

    async def _ask_every(self, scope: Scope, body: Body, send: Send) -> None:
        """Have every replica do it, one after the other: what is done twice comes to the same. The answer is that of
        the first that refuses, or of the last. A DELETE is asked of all whatever the others answer, as one may lack
        what another has: 404 is the answer only if none had it. Raises `ReplicaAway` if one is away, which would lack
        it.
        """
        await body.whole()
        others = sorted(self._owners.known - {self._fleet.here})
        replicas = [self._fleet.own, *(self._fleet.reachable(name) for name in others)]
        is_delete, answers, lost = scope["method"] == "DELETE", list[tuple[int, Any, bytes]](), None
        for replica in replicas:
            try:
                answers.append(await self._done_at(replica, scope, body))
            except (ReplicaAway, ReplicaLost) as error:
                if not is_delete:
                    raise
                lost = error
            if not is_delete and answers[-1][0] >= HTTPStatus.BAD_REQUEST:
                break
        if lost is not None:
            raise lost
        status, headers, content = max(answers, key=lambda each: _weight(each[0])) if is_delete else answers[-1]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _done_at(self, replica: Replica, scope: Scope, body: Body) -> tuple[int, Any, bytes]:
        """The whole answer of one replica."""
        if replica.name != self._fleet.here:
            async with self._hops.asking(replica, scope, body) as answer:
                return answer.status, passed_headers(answer), await answer.read()
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._app(scope, body.again(), keep)
        start, *parts = messages
        return start["status"], start["headers"], b"".join(part.get("body", b"") for part in parts)


def passed_headers(answer: Answer) -> list[tuple[bytes, bytes]]:
    """Those that the client gets. This server counts the client's requests, the other one its tokens."""
    return [
        (name, value)
        for name, value in answer.headers
        if name not in NOT_PASSED and not (name.startswith(b"x-ratelimit-") and name.endswith(b"-requests"))
    ]


async def pass_answer(answer: Answer, send: Send) -> None:
    """Send the replica's answer to the client as it comes. If it ends early, so does the client's connection: no client
    takes it for whole. Raises `ReplicaLost`.
    """
    await send({"type": "http.response.start", "status": answer.status, "headers": passed_headers(answer)})
    async for part in answer.parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _cut(scope: Scope, error: DjinnError) -> None:
    """End the client's connection in the middle of an answer."""
    logger.warning("an answer is cut off: %s", error.message)
    cut: Callable[[], None] | None = scope["state"].get("cut")
    if cut is None:
        raise error
    cut()


def _weight(status: int) -> int:
    """Which of several answers to a DELETE tells most: a refusal, then that something was deleted, then that nothing
    was there.
    """
    if status == HTTPStatus.NOT_FOUND:
        return 0
    return 1 if status < HTTPStatus.BAD_REQUEST else 2
