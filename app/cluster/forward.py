"""Every replica is a door: it answers requests for what it has, and sends all others one hop on, to the replica that
has it.

This runs after the check of the key and the limits of bodies. A request first goes where its owner is believed to be.
That replica answers it, or says that it has done nothing: the session has moved or is moving, or the replica takes
nothing new. Then the request goes to another replica, as long as its body is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.frames import CloseCode

from app.cluster.fleet import Fleet
from app.cluster.gather import Gathered
from app.cluster.hop import Answer, Body, Gone, Hops, moved_to, not_done
from app.cluster.owners import OWNED, About, Owner, Owners, Target, is_turn, previous_response, target_of
from app.cluster.sockets import ANSWER_S, close_socket, pass_socket
from app.cluster.wires import Headers as RawHeaders
from app.domain.errors import DjinnError, ReplicaAway, ReplicaLost, ReplicaMoving
from app.domain.homes import home_of
from app.domain.text import header_text
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


WAYS = HERE, HOPPED, FOLLOWED, MOVING_ON, AWAY, LOST = "here", "hop", "followed", "moving_on", "away", "lost"
"""How a request came to its owner, or why it did not: `docs/reference/cluster.md` says what each means."""
FAILED: dict[type[Exception], str] = {ReplicaAway: AWAY, ReplicaLost: LOST, ReplicaMoving: MOVING_ON}
MOVED, MOVES, REFUSED = "moved", "moving", ("draining", "stalled")
"""Why a replica has done nothing: the session has moved, it is moving, or the replica takes nothing new."""


class Forwarding:
    """The middleware. Used on the event loop only."""

    def __init__(self, app: ASGIApp, fleet: Fleet, owners: Owners, hops: Hops, requests: Counter) -> None:
        """`requests` counts them, by whether they start a turn, and by one of `WAYS`."""
        hops.inside = self.app = app
        self.fleet = fleet
        self.owners = owners
        self.hops = hops
        self.requests = requests
        self._gathered = Gathered(fleet, owners, hops)
        for turn in ("yes", "no"):  # a series that begins with its first event has no rate of it
            for way in WAYS:
                self.requests.labels(turn, way)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        if scope["type"] == "lifespan" or HOP in scope["state"]:
            await self.app(scope, receive, send)
            return
        target, is_socket = target_of(scope), scope["type"] == "websocket"
        if target[0] is About.HERE:
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            if has_begun and message["type"] == "websocket.http.response.start":
                raise ReplicaMoving("the session is refused there: connect again")
            if not (has_begun and message["type"] == "websocket.accept"):
                has_begun = True
                await send(message)

        body = Body(receive)
        try:
            if is_socket:
                await body.take()
                if target[0] is About.CREATE_RESPONSE:  # its first message may name one, which has an owner
                    await send_noted({"type": "websocket.accept"})
            if target[0] is About.GATHERED:
                await self._gathered.serve(scope, body, send_noted)
            elif target[0] is About.EVERY:
                await self._ask_every(scope, body, send_noted)
            else:
                await self._forward(scope, target, body, send_noted)
        except (DjinnError, Gone) as raised:
            if type(raised) in FAILED:
                self._count(scope, target, FAILED[type(raised)])
            error = body.refusal if isinstance(raised, Gone) else raised
            if error is None:
                return
            if not has_begun:
                await error_response(error, scope)(scope, receive, send)
            elif is_socket:
                await close_socket(send, CloseCode.TRY_AGAIN_LATER, error.message)
            else:
                logger.warning("an answer is cut off: %s", error.message)
                cut: Callable[[], None] | None = scope["state"].get("cut")
                if cut is None:
                    raise error from None
                cut()

    async def named(self, scope: Scope) -> Owner:
        """The owner that a call's headers name. A call that names none goes where there is room."""
        headers, owner = Headers(scope=scope), scope["state"]["owner"]
        names = [header_text(each) for each in headers.getlist(SESSION_HEADER)]
        if not names and home_of(token := headers.get(TOKEN_HEADER, "")) is not None:
            names = [token]
        if not names or not names[0] or len(names[0]) > MAX_NAME:  # any replica refuses such a name
            return self.placed(scope)
        return await self.owners.of_name(owner, names[0], scope)

    def placed(self, scope: Scope) -> Owner:
        """A replica for something new. With an `Idempotency-Key`, it is the same at each try."""
        key = Headers(scope=scope).get(IDEMPOTENCY_KEY)
        return Owner(self.fleet.place(key=None if key is None else f"{scope['state']['owner'] or ''} {key}"))

    async def _ask_every(self, scope: Scope, body: Body, send: Send) -> None:
        """Ask every replica in turn; asking twice does no harm. The answer is that of the first replica that refuses,
        or of the last. A DELETE goes to all, because one may lack what another has: it is 404 only if none had it.
        Raises `ReplicaAway` if one is away and would miss the change.
        """
        await body.whole()
        others = sorted(self.owners.known - {self.fleet.here})
        replicas = [self.fleet.own, *(self.fleet.reachable(name) for name in others)]
        is_delete, answers, lost = scope["method"] == "DELETE", list[tuple[Message, bytes]](), None
        for replica in replicas:
            try:
                async with self.hops.passing(replica, scope, body) as answer:
                    answers.append((_start(answer), await answer.read()))
            except (ReplicaAway, ReplicaLost) as error:
                if not is_delete:
                    raise
                lost = error
            if not is_delete and answers[-1][0]["status"] >= HTTPStatus.BAD_REQUEST:
                break
        if lost is not None:
            raise lost
        if is_delete:  # a refusal counts most, then a success, then 404
            answers.sort(key=lambda each: (each[0]["status"] != HTTPStatus.NOT_FOUND, each[0]["status"]))
        start, content = answers[-1]
        await send(start)
        await send({"type": "http.response.body", "body": content})

    async def _forward(self, scope: Scope, target: Target, body: Body, send: Send) -> None:
        """Have a request answered by its owner, also if that changes meanwhile. Raises `Gone`, and the `DjinnError` for
        the client: `ReplicaMoving` if the body cannot be sent again, or if the session returns to where it was.
        """
        fleet, owners, clock = self.fleet, self.owners, asyncio.get_running_loop().time
        waits_until, wait_s, asked, refused = clock() + PATIENCE_S, FIRST_WAIT_S, set[str](), set[str]()
        # Whether a replica has refused the request untouched, and whether all replicas were asked for the session.
        is_followed = has_sought = False
        # Why the last replica has done nothing, so that another try makes sense, and where the session moved.
        turned = list[tuple[str, str | None]]()
        owner = await self._owner(scope, target, body)
        asked.add(owner.replica.name)

        def note(status: int, headers: RawHeaders) -> None:
            why, home, can_repeat = not_done(headers), moved_to(headers), body.can_repeat
            if status == HTTPStatus.MISDIRECTED_REQUEST:
                why, is_known = MOVED, fleet.find(home) is not None
                goes_on = is_known or (can_repeat and owner.path != b"" and not has_sought)
            elif why == MOVES:
                goes_on = can_repeat and clock() < waits_until
            else:
                is_free = owner.key is None or owner.is_new
                goes_on = why in REFUSED and can_repeat and is_free and owner.replica.name not in refused
            if why is not None and goes_on:
                turned.append((why, home))
            else:
                self._count(scope, target, FOLLOWED if is_followed else HERE if owner.replica is fleet.own else HOPPED)

        async def send_unless_turned(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                note(message["status"], message.get("headers", []))
            if not turned:
                body.drop()
                await send(message)

        while True:
            turned.clear()
            try:
                if owner.replica is fleet.own:
                    await self.app(scope, body.again(), send_unless_turned)
                elif scope["type"] == "http":
                    fleet.reachable(owner.replica.name)
                    async with self.hops.passing(owner.replica, scope, body) as answer:
                        await _pass(answer, send_unless_turned)
                else:
                    fleet.reachable(owner.replica.name)
                    if target[0] is About.CREATE_RESPONSE and owner.path and not has_sought:
                        # A first message goes to one replica alone, so this says before whether the session has moved.
                        told = await self.hops.get([owner.replica], scope, owner.path, ANSWER_S)
                        homes = [moved_to(answer.headers) for answer, _ in told.values()]
                        turned += [(MOVED, home) for home in homes if home is not None]
                    if not turned:
                        await pass_socket(self.hops, owner.replica, scope, body.again(), send_unless_turned)
            except ReplicaAway:  # nothing was sent
                if not body.can_repeat or (has_sought and owner.key is not None and not owner.is_new):
                    raise
                if owner.key is None or owner.is_new:
                    owner = await owners.replaced(owner)
                else:
                    has_sought, owner = True, await self._owner(scope, target, body)
                continue
            if not turned:
                return
            (why, name), is_followed = turned[0], True
            if why in REFUSED:
                refused.add(owner.replica.name)
                owner = await owners.replaced(owner)
            elif why == MOVES:
                await asyncio.sleep(wait_s)
                wait_s = min(1.5 * wait_s, LONGEST_WAIT_S)
            else:
                home = fleet.find(name)
                if home is None and owner.path:
                    has_sought, home = True, await owners.seek(owner.path, scope)
                if home is None:
                    owner = await owners.replaced(owner) if owner.is_name else owner  # whose answer passes
                    continue
                if owner.key is not None:
                    await owners.moved(owner.key, home.name)
                if not body.can_repeat or home.name in asked:
                    verb = "moves on, now" if body.can_repeat else "has moved"
                    raise ReplicaMoving(f"the session {verb} to replica {home.name}: repeat the request")
                asked.add(home.name)
                owner = Owner(home, owner.key, path=owner.path)

    async def _owner(self, scope: Scope, target: Target, body: Body) -> Owner:
        about, named = target
        match about:
            case About.SESSION:
                return await self.owners.of_session(named, scope)
            case About.RESPONSE:
                return await self.owners.of_response(named, scope)
            case About.FILES:
                return await self.owners.of_files(scope["state"]["owner"], scope)
            case About.CREATE_RESPONSE if (previous := previous_response(await body.whole())) is not None:
                return await self.owners.of_response(previous, scope)
            case About.CREATE_RESPONSE | About.CALL:
                return await self.named(scope)
            case _:
                return self.placed(scope)

    def _count(self, scope: Scope, target: Target, way: str) -> None:
        if target[0] in OWNED and scope["type"] == "http":
            turn = "yes" if is_turn(scope) else "no"
            self.requests.labels(turn, way).inc()


def _start(answer: Answer) -> Message:
    """The head for the client. This server counts its requests, and the other one its tokens."""
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
