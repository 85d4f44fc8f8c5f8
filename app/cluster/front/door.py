"""The front door as an application: finds whom each request is for, and has it piped there and back."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from app.cluster.directory import session_key
from app.cluster.fleet import Fleet, Replica, State
from app.cluster.front.body import Body, Gone
from app.cluster.front.merged.answers import Merged
from app.cluster.front.pipe import Answer, Pipe, passed_headers
from app.cluster.front.routing.following import Following, Turned, Why, turned_away
from app.cluster.front.routing.metrics import RoutingMetrics, Way
from app.cluster.front.routing.moves import Moves
from app.cluster.front.routing.named import field_of, previous_response
from app.cluster.front.routing.owners import Owner, Owners
from app.cluster.front.routing.targets import SESSIONS, About, Target, is_turn, target_of
from app.cluster.front.upstream.pool import Pool
from app.cluster.front.websockets.sockets import Sockets
from app.domain.errors import DjinnError, NotFound, ReplicaAway, ReplicaLost
from app.domain.homes import home_of
from app.domain.values import MAX_NAME
from app.web.errors import BUG_MESSAGE, error_response
from app.web.idempotency import HEADER as IDEMPOTENCY_KEY
from app.web.middleware import SESSION_HEADER, TOKEN_HEADER

logger = logging.getLogger(__name__)

MOST_PLACED = 100_000
"""Requests with a key whose replica is remembered."""
OWNED = frozenset({About.SESSION, About.RESPONSE, About.CREATE_RESPONSE, About.CALL})
"""What an owner may have to answer."""


class FrontDoor:
    """The ASGI application. Used on the event loop only."""

    def __init__(
        self,
        fleet: Fleet,
        owners: Owners,
        pool: Pool,
        merged: Merged,
        routing: RoutingMetrics,
        tenant_of: Callable[[Headers], str | None],
        max_message_bytes: int,
    ) -> None:
        """`tenant_of` tells whose key a request has: the tenant's name, empty without keys, None for nobody's.
        `max_message_bytes` is for those of WebSockets.
        """
        self._fleet = fleet
        self._owners = owners
        self._pool = pool
        self._merged = merged
        self._routing = routing
        self._moves = Moves()
        self._tenant_of = tenant_of
        self._placed: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        """The replica of each keyed request that opens a session, the oldest first."""
        self._sockets = Sockets(self._named, owners, fleet, max_message_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        began = False

        async def send_noted(message: Any) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            if scope["type"] == "websocket":
                await self._sockets.serve(scope, send_noted)
            else:
                await self._serve(scope, Body(receive), send_noted)
        except DjinnError as error:
            if not began:
                await error_response(error, scope)(scope, receive, send)
        except Gone:
            pass
        except Exception:
            logger.exception("a request failed at the front door")
            if not began:
                await error_response(DjinnError(BUG_MESSAGE), scope)(scope, receive, send)

    async def _serve(self, scope: Scope, body: Body, send: Send) -> None:
        target = target_of(scope["method"], scope["path"])
        try:
            if target.about is About.NOBODY:
                raise NotFound(f"{scope['method']} {scope['path'][:100]}: only servers of the cluster have this")
            if target.about is About.MERGED:
                await self._merged.serve(scope, body.next_message, send)
            elif target.about is About.EVERY and scope["method"] == "DELETE":
                await self._delete_everywhere(scope, body, send)
            elif target.about is About.EVERY:
                await self._ask_all(scope, body, send)
            elif target.about in OWNED:
                with self._routing.failing(turn=is_turn(scope["method"], scope["path"])):
                    await self._ask_settled(scope, target, body, send)
            else:
                await self._ask_owner(scope, target, await self._owner(scope, target, body), body, send)
        except Gone:
            if body.refusal is None:
                raise
            raise body.refusal from None

    async def _ask_settled(self, scope: Scope, target: Target, body: Body, send: Send) -> None:
        """Have the owner answer once the session does not move."""
        await self._moves.over(target.id)
        if not (target.id and _is_move(scope)):
            await self._ask_owner(scope, target, await self._owner(scope, target, body), body, send)
            return
        await body.whole()  # the others do not wait for a slow client
        with self._moves.under_way(target.id):
            await self._ask_owner(scope, target, await self._owner(scope, target, body), body, send)

    async def _owner(self, scope: Scope, target: Target, body: Body) -> Owner:
        match target.about:
            case About.SESSION:
                return await self._owners.of_session(target.id, scope)
            case About.RESPONSE:
                return await self._owners.of_response(target.id, scope)
            case About.NEW:
                return Owner(self._place(Headers(scope=scope)))
            case About.CREATE_RESPONSE:
                previous = previous_response(await body.whole())
                if previous is not None:
                    return await self._owners.of_response(previous, scope)
                return await self._named(scope)
            case About.CALL:
                return await self._named(scope)
            case _:
                return Owner(self._fleet.any())

    async def _named(self, scope: Scope) -> Owner:
        """Whom a call is for by its header. One without is placed where there is room."""
        headers = Headers(scope=scope)
        names = headers.getlist(SESSION_HEADER)
        if not names and home_of(token := headers.get(TOKEN_HEADER, "")) is not None:
            names = [token]
        if not names or not names[0]:
            return Owner(self._place(headers))
        tenant = self._tenant_of(headers)
        if tenant is None or len(names[0]) > MAX_NAME:
            return Owner(self._fleet.any())  # any replica refuses it, and nothing is kept of the name
        return await self._owners.of_name(tenant, names[0], scope)

    def _place(self, headers: Headers) -> Replica:
        """Where a new session goes. A retried request goes to the replica that may have done it.
        Raises `ReplicaAway`.
        """
        name = self._key_of(headers)
        known = None if name is None else self._fleet.find(self._placed.get(name))
        return self._fleet.place() if known is None or known.state is State.AWAY else known

    def _note_placed(self, scope: Scope, owner: Owner) -> None:
        if owner.key is None and (name := self._key_of(Headers(scope=scope))) is not None:
            self._placed[name] = owner.replica.name
            if len(self._placed) > MOST_PLACED:
                self._placed.popitem(last=False)

    def _key_of(self, headers: Headers) -> tuple[str | None, str] | None:
        key = headers.get(IDEMPOTENCY_KEY)
        return None if key is None else (self._tenant_of(headers), key)

    async def _ask_owner(self, scope: Scope, target: Target, owner: Owner, body: Body, send: Send) -> None:
        """Have only the owner answer, wherever it is by then. What has no owner yet finds another replica
        if its first takes nothing.
        """
        following = Following(owner.replica.name, asyncio.get_running_loop().time())
        while True:
            try:
                turned = await self._ask(scope, owner, body, send, following)
            except ReplicaAway:  # nothing was sent
                owner = await self._elsewhere(scope, target, owner, body, following)
                continue
            if turned is None:
                return
            owner = await self._follow(owner, turned, body, following)

    async def _ask(self, scope: Scope, owner: Owner, body: Body, send: Send, following: Following) -> Turned | None:
        """Pass the replica's answer, unless it has turned the request away and another one may do it."""
        if owner.replica.state is State.AWAY:
            self._fleet.reachable(owner.replica.name)
        pipe = Pipe(scope, body, self._pool)
        self._note_placed(scope, owner)
        async with pipe.asking(owner.replica) as answer:
            turned = turned_away(answer.head, self._fleet)
            if turned is None or not following.may_follow(turned, owner, body, asyncio.get_running_loop().time()):
                self._count(scope, owner, following.way)
                await self._pass(scope, pipe, answer, send)
                return None
        return turned

    async def _follow(self, owner: Owner, turned: Turned, body: Body, following: Following) -> Owner:
        """Whom to ask next."""
        following.way = Way.FOLLOWED
        if turned.why in (Why.DRAINS, Why.STALLS):
            owner.replica.told(State.REFUSES, None)
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
                return await self._owners.anew(owner) if owner.is_name else owner  # whose answer passes
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

    def _count(self, scope: Scope, owner: Owner, way: Way) -> None:
        if owner.key is not None:
            self._routing.count(way, turn=is_turn(scope["method"], scope["path"]))

    async def _pass(self, scope: Scope, pipe: Pipe, answer: Answer, send: Send) -> None:
        if not _is_move(scope):
            await pipe.pass_answer(answer, send)
            return
        session_id = target_of(scope["method"], scope["path"]).id
        content = await self._note_move(session_id, answer) if answer.head.status_code == 200 else None
        self._moves.end(session_id)
        if content is None:
            await pipe.pass_answer(answer, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": passed_headers(answer)})
            await send({"type": "http.response.body", "body": content})

    async def _note_move(self, session_id: str, answer: Answer) -> bytes:
        """Remember where a session has been moved to: its home may not be there to say so. Returns the body."""
        content = b""
        async for part in answer.upstream.body():
            content += part
        name = field_of(content, "replica")
        if name is not None and self._fleet.find(name) is not None:
            await self._owners.moved(session_key(session_id), name)
        return content

    async def _ask_all(self, scope: Scope, body: Body, send: Send) -> None:
        """Have every replica do it, one after the other. What the last one answers, or the first that refuses, is the
        answer: what is done twice comes to the same.
        """
        await body.whole()
        replicas = [self._fleet.reachable(each.name) for each in self._fleet]
        if not replicas:
            self._fleet.any()
        pipe = Pipe(scope, body, self._pool)
        for replica in replicas:
            async with pipe.asking(replica) as answer:
                if replica is replicas[-1] or answer.head.status_code >= 400:
                    await pipe.pass_answer(answer, send)
                    return

    async def _delete_everywhere(self, scope: Scope, body: Body, send: Send) -> None:
        """Have every replica delete it, whatever the others answer: one may lack what another has. 404 is the answer
        only if none had it. Any other refusal is the answer, as something may be left.
        """
        await body.whole()
        replicas = [self._fleet.reachable(each.name) for each in self._fleet] or [self._fleet.any()]
        pipe, answers, lost = Pipe(scope, body, self._pool), [], None
        for replica in replicas:
            try:
                async with pipe.asking(replica) as answer:
                    content = b"".join([part async for part in answer.upstream.body()])
                    answers.append((answer.head.status_code, passed_headers(answer), content))
            except (ReplicaAway, ReplicaLost) as error:
                lost = error
        if lost is not None:
            raise lost
        status, headers, content = max(answers, key=lambda answer: _weight(answer[0]))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def _weight(status: int) -> int:
    """Which of several answers to a DELETE tells most: a refusal, then that something was deleted, then that nothing
    was there.
    """
    if status == HTTPStatus.NOT_FOUND:
        return 0
    return 1 if status < HTTPStatus.BAD_REQUEST else 2


def _is_move(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path.startswith(f"{SESSIONS}/") and path.endswith("/move")
