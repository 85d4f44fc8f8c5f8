"""Every replica is a door: it answers what is its own, and sends the rest one hop on, to the replica that has it.

It comes behind the check of the key and the limits of bodies. A request is tried where its owner is believed to be.
That replica, this one or another, answers it, or says that nothing was done because the session has moved or moves, or
because it takes nothing new. Then the request goes to the next, as long as its body is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.cluster.fleet import Fleet
from app.cluster.gather import Gathered
from app.cluster.hop import Answer, Body, Gone, Hops, moved_to, not_done
from app.cluster.owners import Owner, Owners
from app.cluster.sockets import Sockets
from app.cluster.targets import OWNED, About, Target, is_turn, previous_response, target_of
from app.cluster.wires import Headers as RawHeaders
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
"""Between two tries, growing by half each time. Most moves take less than a second."""
NOT_PASSED = frozenset({b"date", b"server", b"x-request-id", b"request-id"})
"""Headers that this server adds to every answer itself."""


class Way(StrEnum):
    """How a request came to its owner."""

    HERE = "here"
    """This replica has it."""
    HOP = "hop"
    """Another replica answered at the first try."""
    FOLLOWED = "followed"
    """A later replica answered, after the first one said where the session has moved."""
    MOVING_ON = "moving_on"
    """Not answered: the request could not follow a session that moves."""
    AWAY = "away"
    """Not answered: the owner is away."""
    LOST = "lost"
    """Not answered: the owner went away meanwhile."""


FAILED = {ReplicaAway: Way.AWAY, ReplicaLost: Way.LOST, ReplicaMoving: Way.MOVING_ON}


MOVED, MOVES, REFUSED = "moved", "moving", ("draining", "stalled")
"""Why a replica has done nothing of a request: where the session is, or as it takes nothing new."""


class Forwarding:
    """The middleware. Used on the event loop only."""

    def __init__(self, app: ASGIApp, fleet: Fleet, owners: Owners, hops: Hops, requests: Counter) -> None:
        """`requests` counts them, by whether they start a turn, and by their `Way`."""
        hops.inside = self.app = app
        self.fleet = fleet
        self.owners = owners
        self.hops = hops
        self.requests = requests
        self._gathered = Gathered(fleet, owners, hops)
        self._sockets = Sockets(app, self.named, owners, hops)
        for turn in ("yes", "no"):  # a series that begins with its first event has no rate of it
            for way in Way:
                self.requests.labels(turn, way.value)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        if scope["type"] == "lifespan" or HOP in scope["state"]:
            await self.app(scope, receive, send)
            return
        is_socket = scope["type"] == "websocket"
        target = Target(About.CALL) if is_socket else target_of(scope["method"], scope["path"])
        if target.about is About.HERE:
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        body = Body(receive)
        try:
            if is_socket:
                await self._sockets.serve(scope, receive, send_noted)
            elif target.about is About.GATHERED:
                await self._gathered.serve(scope, body, send_noted)
            elif target.about is About.EVERY:
                await self._ask_every(scope, body, send_noted)
            else:
                await _Errand(self, scope, target, body, send_noted).run()
        except (DjinnError, Gone) as raised:
            error = body.refusal if isinstance(raised, Gone) else raised
            if error is None:
                return
            if has_begun:
                _cut(scope, error)
            else:
                await error_response(error, scope)(scope, receive, send)

    async def named(self, scope: Scope) -> Owner:
        """The owner that a call's headers name. A call without is placed where there is room."""
        headers, owner = Headers(scope=scope), scope["state"]["owner"]
        names = headers.getlist(SESSION_HEADER)
        if not names and home_of(token := headers.get(TOKEN_HEADER, "")) is not None:
            names = [token]
        if not names or not names[0] or len(names[0]) > MAX_NAME:  # any replica refuses such a name
            return self.placed(scope)
        return await self.owners.of_name(owner, names[0], scope)

    def placed(self, scope: Scope) -> Owner:
        """An owner for something new. With an `Idempotency-Key`, the same as at the first try."""
        key = Headers(scope=scope).get(IDEMPOTENCY_KEY)
        return Owner(self.fleet.place(key=None if key is None else f"{scope['state']['owner'] or ''} {key}"))

    async def _ask_every(self, scope: Scope, body: Body, send: Send) -> None:
        """Have every replica do it, one after the other. Doing it twice does no harm. The answer is that of the first
        replica that refuses, or of the last. A DELETE goes to all, whatever the others answer, as one may lack what
        another has: 404 is the answer only if none had it. Raises `ReplicaAway` if one is away, as it would miss the
        change.
        """
        await body.whole()
        others = sorted(self.owners.known - {self.fleet.here})
        replicas = [self.fleet.own, *(self.fleet.reachable(name) for name in others)]
        is_delete, answers, lost = scope["method"] == "DELETE", list[tuple[Answer, bytes]](), None
        for replica in replicas:
            try:
                async with self.hops.asking(replica, scope, body) as answer:
                    answers.append((answer, await answer.read()))
            except (ReplicaAway, ReplicaLost) as error:
                if not is_delete:
                    raise
                lost = error
            if not is_delete and answers[-1][0].status >= HTTPStatus.BAD_REQUEST:
                break
        if lost is not None:
            raise lost
        answer, content = max(answers, key=lambda each: _weight(each[0].status)) if is_delete else answers[-1]
        await send(_start(answer))
        await send({"type": "http.response.body", "body": content})


class _Errand:
    """One request on its way to its owner, which alone may answer it, wherever it is by then."""

    def __init__(self, door: Forwarding, scope: Scope, target: Target, body: Body, send: Send) -> None:
        self._door = door
        self._scope = scope
        self._target = target
        self._body = body
        self._send = send
        self._began = asyncio.get_running_loop().time()
        self._wait_s = FIRST_WAIT_S
        self._turned: tuple[str, str | None] | None = None
        """Why the last replica did nothing, and where the session has gone."""
        self._is_followed = self._has_sought = False
        """Whether a replica has done nothing, and whether all have been asked who has the session."""
        self._asked = set[str]()
        self._refused = set[str]()
        """Replicas that take nothing new."""

    async def run(self) -> None:
        """Get the request answered. Raises `Gone`, and the `DjinnError` that is to be the answer."""
        try:
            first = await self._find()
            self._asked.add(first.replica.name)
            owner = await self._try(first)
            while owner is not None:
                owner = await self._try(owner)
        except (ReplicaAway, ReplicaLost, ReplicaMoving) as error:
            self._count(FAILED[type(error)])
            raise

    def _count(self, way: Way) -> None:
        if self._target.about in OWNED:
            turn = "yes" if is_turn(self._scope["method"], self._scope["path"]) else "no"
            self._door.requests.labels(turn, way.value).inc()

    async def _find(self) -> Owner:
        owners, scope, target = self._door.owners, self._scope, self._target
        match target.about:
            case About.SESSION:
                return await owners.of_session(target.id, scope)
            case About.RESPONSE:
                return await owners.of_response(target.id, scope)
            case About.FILES:
                return await owners.of_files(scope["state"]["owner"])
            case About.CREATE_RESPONSE if (previous := previous_response(await self._body.whole())) is not None:
                return await owners.of_response(previous, scope)
            case About.CREATE_RESPONSE | About.CALL:
                return await self._door.named(scope)
            case _:
                return self._door.placed(scope)

    async def _try(self, owner: Owner) -> Owner | None:
        """Ask one replica. Passes its answer on, or returns whom to ask next."""
        fleet, replica, self._turned = self._door.fleet, owner.replica, None
        try:
            if replica is fleet.own:
                await self._door.app(self._scope, self._body.again(), self._unless_turned(owner))
            else:
                fleet.reachable(replica.name)
                async with self._door.hops.asking(replica, self._scope, self._body) as answer:
                    if not self._is_turned(owner, answer.status, answer.headers):
                        await _pass(answer, self._send)
        except ReplicaAway:  # nothing was sent
            return await self._elsewhere(owner)
        return None if self._turned is None else await self._next(owner, *self._turned)

    def _unless_turned(self, owner: Owner) -> Send:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._is_turned(owner, message["status"], message.get("headers", []))
            if self._turned is None:
                await self._send(message)

        return send

    def _is_turned(self, owner: Owner, status: int, headers: RawHeaders) -> bool:
        """Whether the head of an answer says that nothing was done, and another try is worthwhile. Else the client gets
        it.
        """
        why, home, can_repeat = not_done(headers), moved_to(headers), self._body.can_repeat
        if status == HTTPStatus.MISDIRECTED_REQUEST:
            why = MOVED
            is_known = self._door.fleet.find(home) is not None
            goes_on = is_known or (can_repeat and owner.seek is not None and not self._has_sought)
        elif why == MOVES:
            goes_on = can_repeat and asyncio.get_running_loop().time() - self._began < PATIENCE_S
        else:
            is_free = owner.key is None or owner.is_new
            goes_on = why in REFUSED and can_repeat and is_free and owner.replica.name not in self._refused
        if why is not None and goes_on:
            self._turned = why, home
            return True
        is_own = owner.replica is self._door.fleet.own
        self._count(Way.FOLLOWED if self._is_followed else Way.HERE if is_own else Way.HOP)
        return False

    async def _next(self, owner: Owner, why: str, name: str | None) -> Owner:
        """Whom to ask next. Raises `ReplicaMoving` if the body cannot be sent again, and for a session that comes back
        to where it was: it is not chased.
        """
        owners, self._is_followed = self._door.owners, True
        if why in REFUSED:
            self._refused.add(owner.replica.name)
            return await owners.replaced(owner)
        if why == MOVES:
            await asyncio.sleep(self._wait_s)
            self._wait_s = min(1.5 * self._wait_s, LONGEST_WAIT_S)
            return owner
        home = self._door.fleet.find(name)
        if home is None:
            assert owner.seek is not None
            self._has_sought = True
            home = await owner.seek()
            if home is None:
                return await owners.replaced(owner) if owner.is_name else owner  # whose answer passes
        if owner.key is not None:
            await owners.moved(owner.key, home.name)
        if not self._body.can_repeat:
            raise ReplicaMoving(f"the session has moved to replica {home.name}: repeat the request")
        if home.name in self._asked:
            raise ReplicaMoving(f"the session moves on, now to replica {home.name}: repeat the request")
        self._asked.add(home.name)
        return Owner(home, owner.key, seek=owner.seek)

    async def _elsewhere(self, owner: Owner) -> Owner:
        """Whom to ask instead of a replica that turns out to be away. Raises `ReplicaAway`."""
        if self._body.can_repeat and (owner.key is None or owner.is_new):
            return await self._door.owners.replaced(owner)
        if not self._body.can_repeat or self._has_sought:
            self._door.fleet.reachable(owner.replica.name)
        self._has_sought = True
        return await self._find()


def _start(answer: Answer) -> Message:
    """The head for the client. Limits of requests are this server's, limits of tokens the other one's."""
    headers = [
        (name, value)
        for name, value in answer.headers
        if name not in NOT_PASSED and not (name.startswith(b"x-ratelimit-") and name.endswith(b"-requests"))
    ]
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def _pass(answer: Answer, send: Send) -> None:
    """Send the replica's answer to the client as it comes. Raises `WireLost` if it ends early."""
    await send(_start(answer))
    is_over = False
    while not is_over:
        part, is_over = await answer.part()
        await send({"type": "http.response.body", "body": part, "more_body": not is_over})


def _cut(scope: Scope, error: DjinnError) -> None:
    """End the client's connection in the middle of an answer."""
    logger.warning("an answer is cut off: %s", error.message)
    cut: Callable[[], None] | None = scope["state"].get("cut")
    if cut is None:
        raise error
    cut()


def _weight(status: int) -> int:
    """Orders answers to a DELETE: a refusal counts most, then a success, then 404."""
    if status == HTTPStatus.NOT_FOUND:
        return 0
    return 1 if status < HTTPStatus.BAD_REQUEST else 2
