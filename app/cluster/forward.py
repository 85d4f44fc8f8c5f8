"""Every replica is a door: it answers requests for what it has, and sends all others one hop on, to the replica that
has it.

This runs after the check of the key and the limits of bodies. A request first goes where its owner is believed to be.
That replica answers it, or says that it has done nothing: the session has moved or is moving, or the replica takes
nothing new. Then the request goes to another replica, as long as its body is kept.
"""

import asyncio
import math
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from itertools import chain
from tempfile import SpooledTemporaryFile

from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.cluster.fleet import Fleet
from app.cluster.gather import Gathered
from app.cluster.hop import GONE, Hops, content_of, moved_to, not_done
from app.cluster.owners import OWNED, About, Owner, Owners, Target, is_turn, target_of
from app.cluster.sockets import ANSWER_S, pass_socket
from app.cluster.wires import Headers
from app.domain.errors import DiskShort, DjinnError, ReplicaAway, ReplicaLost, ReplicaMoving
from app.web.errors import end_with, known_error
from app.web.middleware import HOP

PATIENCE_S = 12.0
"""How long a request waits for a session that is on its way, and looks for a replica that answers."""
KEPT_BYTES = 1 << 20
"""How much of a body is kept while it is sent on. A longer one cannot be sent to a second replica."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.5
"""Between two tries, growing by half each time. Most moves take less than a second."""
WAYS = HERE, HOPPED, FOLLOWED, MOVING_ON, AWAY, LOST = "here", "hop", "followed", "moving_on", "away", "lost"
"""How a request came to its owner, or why it did not: `docs/reference/cluster.md` says what each means."""
FAILED: dict[type[Exception], str] = {ReplicaAway: AWAY, ReplicaLost: LOST, ReplicaMoving: MOVING_ON}
MOVED, MOVES, REFUSED = "moved", "moving", ("draining", "stalled")
"""Why a replica has done nothing: the session has moved, it is moving, or the replica takes nothing new."""


class Body:
    """What a client sends: the body of a request, or the messages of a WebSocket. It passes as it comes. The body, or
    the handshake and the first message, is kept while the request may have to be repeated.
    """

    def __init__(self, receive: Receive) -> None:
        self.can_repeat = True
        """Whether all that has come is still here."""
        self._receive = receive
        self._kept: list[Message] = []
        self._room: float = KEPT_BYTES
        self._is_whole = False

    def drop(self) -> None:
        """Keep nothing any more: it will not be repeated."""
        self._kept, self.can_repeat = [], False

    async def whole(self) -> bytes:
        """All of it, which is kept whatever its length. Raises `ClientDisconnect`."""
        self._room = math.inf
        while not self._is_whole:
            content_of(await self.receive())
        return b"".join(map(content_of, self._kept))

    async def receive(self) -> Message:
        """What the client sends next. It is kept if it is of the body."""
        message = await self._receive()
        if not self._is_whole and message["type"] not in GONE:
            self._room -= len(content_of(message))
            if self._room < 0:
                self.drop()
            if self.can_repeat:
                self._kept.append(message)
            self._is_whole = message["type"] != "websocket.connect" and not message.get("more_body", False)
        return message

    def again(self) -> Receive:
        """An ASGI `receive` that begins with the body again."""
        return _after(iter(list(self._kept)), self.receive)


def _after(messages: Iterator[Message], receive: Receive) -> Receive:
    """An ASGI `receive` that begins with these messages."""

    async def receive_next() -> Message:
        return next(messages, None) or await receive()

    return receive_next


class Forwarding:
    """The middleware. Used on the event loop only."""

    def __init__(self, app: ASGIApp, fleet: Fleet, owners: Owners, hops: Hops, requests: Counter) -> None:
        """`requests` counts them, by whether they start a turn, and by one of `WAYS`."""
        hops.inside = self.app = app
        self.fleet, self.owners, self.hops, self.requests = fleet, owners, hops, requests
        self._gathered = Gathered(fleet, owners, hops)
        for turn in ("yes", "no"):  # a series that begins with its first event has no rate of it
            for way in WAYS:
                self.requests.labels(turn, way)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        if scope["type"] == "lifespan" or HOP in scope["state"] or (target := target_of(scope))[0] is About.HERE:
            await self.app(scope, receive, send)
            return
        is_socket, has_begun = scope["type"] == "websocket", False

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
                await body.receive()
                if target[0] is About.CREATE_RESPONSE:  # its first message may name one, which has an owner
                    await send_noted({"type": "websocket.accept"})
            if target[0] is About.GATHERED:
                await self._gathered.serve(scope, receive, send_noted)
            elif target[0] is About.EVERY:
                await self._ask_every(scope, receive, send_noted)
            else:
                await self._forward(scope, target, body, send_noted)
        except ClientDisconnect:
            return
        except (DjinnError, HTTPException) as raised:
            if type(raised) in FAILED:
                self._count(scope, target, FAILED[type(raised)])
            await end_with(known_error(raised, scope), scope, receive, send, has_begun=has_begun)

    async def _ask_every(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask every replica in turn; asking twice does no harm. The answer is that of the first replica that refuses,
        or of the last. A DELETE goes to all, because one may lack what another has: it is 404 only if none had it.
        Raises `ReplicaAway` if one is away and would miss the change, and `DiskShort`.
        """
        is_delete, answers, lost = scope["method"] == "DELETE", list[Response](), None
        has = "gets each vector, dictionary, lens and probe as all do"
        with SpooledTemporaryFile(KEPT_BYTES) as kept:
            try:
                async for part in Request(scope, receive).stream():
                    kept.write(part)
                kept.flush()
            except OSError as error:
                raise DiskShort(f"the body cannot be kept for all replicas: {error.strerror}") from error
            others = sorted(self.owners.names.known - {self.fleet.here})
            for replica in [self.fleet.own, *(self.fleet.reachable(name, has) for name in others)]:
                kept.seek(0)
                pieces = chain(iter(partial(kept.read, KEPT_BYTES), b""), [b""])
                parts = ({"type": "http.request", "body": each, "more_body": each != b""} for each in pieces)
                try:
                    answers.append(await self.hops.answer(replica, scope, _after(parts, receive)))
                except (ReplicaAway, ReplicaLost) as error:
                    if not is_delete:
                        raise
                    lost = error
                if not is_delete and answers[-1].status_code >= HTTPStatus.BAD_REQUEST:
                    break
        if lost is not None:
            raise lost
        if is_delete:  # a refusal counts most, then a success, then 404
            answers.sort(key=lambda each: (each.status_code != HTTPStatus.NOT_FOUND, each.status_code))
        await answers[-1](scope, receive, send)

    async def _forward(self, scope: Scope, target: Target, body: Body, send: Send) -> None:
        """Have a request answered by its owner, also if that changes meanwhile. Raises what the client gets instead."""
        fleet, owners, clock = self.fleet, self.owners, asyncio.get_running_loop().time
        is_socket = scope["type"] == "websocket"
        waits_until, wait_s, asked = clock() + PATIENCE_S, FIRST_WAIT_S, set[str]()
        # Whether a replica has refused the request untouched, and whether all replicas were asked for the session.
        is_followed = has_sought = False
        # Why the last replica has done nothing, so that another try makes sense, and where the session moved.
        turned = list[tuple[str, str | None]]()
        owner = await owners.of(scope, target, body.whole)

        async def send_unless_turned(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                headers: Headers = message.get("headers", [])
                why, home, can_repeat = not_done(headers), moved_to(headers), body.can_repeat
                if message["status"] == HTTPStatus.MISDIRECTED_REQUEST:
                    why, is_known = MOVED, owners.trusted(home) is not None
                    goes_on = is_known or (can_repeat and owner.path != b"" and not has_sought)
                elif why == MOVES:
                    goes_on = can_repeat and clock() < waits_until
                else:
                    is_last = all(each.name in asked for each in fleet.answering)
                    goes_on = why in REFUSED and can_repeat and owner.is_new and not is_last
                if why is not None and goes_on:
                    turned.append((why, home))
                else:
                    body.drop()
                    way = FOLLOWED if is_followed else HERE if owner.replica is fleet.own else HOPPED
                    self._count(scope, target, way)
            elif message["type"] == "websocket.accept":
                body.drop()
            if not turned:
                await send(message)

        while True:
            asked.add(owner.replica.name)
            turned.clear()
            try:
                if target[0] is About.CREATE_RESPONSE and is_socket and owner.path and not has_sought:
                    # A first message goes to one replica alone, so this says before whether the session has moved.
                    told = await self.hops.get([owner.replica], scope, owner.path, ANSWER_S)
                    homes = [moved_to(answer.raw_headers) for answer, _ in told.values()]
                    turned += [(MOVED, home) for home in homes if home is not None]
                if not turned:
                    app = self.app
                    if owner.replica is not fleet.own:
                        fleet.reachable(owner.replica.name)
                        app = partial(pass_socket if is_socket else Hops.pass_on, self.hops, owner.replica)
                    await app(scope, body.again(), send_unless_turned)
            except ReplicaAway:  # nothing was sent
                if not body.can_repeat or clock() >= waits_until or (has_sought and not owner.is_new):
                    raise
                if owner.is_new:
                    owner = await owners.replaced(owner, asked)
                else:
                    has_sought, owner = True, await owners.of(scope, target, body.whole)
                continue
            if not turned:
                return
            (why, name), is_followed = turned[0], True
            if why in REFUSED:
                owner = await owners.replaced(owner, asked)
            elif why == MOVES:
                await asyncio.sleep(wait_s)
                wait_s = min(1.5 * wait_s, LONGEST_WAIT_S)
            else:
                home = owners.trusted(name)
                if home is None and owner.path:
                    has_sought, home = True, await owners.seek(owner.path, scope)
                if home is None:
                    owner = await owners.replaced(owner, asked) if owner.is_name else owner  # whose answer passes
                    continue
                if owner.key is not None:
                    await owners.moved(owner.key, home.name)
                if not body.can_repeat or home.name in asked:
                    verb = "moves on, now" if body.can_repeat else "has moved"
                    raise ReplicaMoving(f"the session {verb} to replica {home.name}: repeat the request")
                owner = Owner(home, owner.key, path=owner.path)

    def _count(self, scope: Scope, target: Target, way: str) -> None:
        if target[0] in OWNED and scope["type"] == "http":
            self.requests.labels("yes" if is_turn(scope) else "no", way).inc()
