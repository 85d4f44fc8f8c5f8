"""Sends clients' requests to another replica, one hop away, and passes the answers back.

What is for this replica itself, among others, needs no connection: there may be none left, and a server that drains
accepts none.

A request that has come over a hop is answered or turned away, and never sent on. The header `Djinn-Hop` marks it: with
the name of the replica that sent it, and a proof that this has the cluster's key. An answer may take long, and the
connection is silent meanwhile. So the other replica is watched: its requests are cut as soon as it loses its lease, or
misses two checks of its `/health`.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.cluster.fleet import Fleet, Replica
from app.cluster.key import ClusterKey
from app.cluster.wires import Headers, Wire, WireLost
from app.domain.errors import DjinnError, PeerStranger, ReplicaAway, ReplicaLost
from app.domain.tasks import Tasks
from app.web.middleware import HOP
from app.web.sse import disconnected

logger = logging.getLogger(__name__)
LOOK_S, LOOK_PATIENCE_S, MISSES = 1.0, 4.0, 2
"""Seconds between checks of a replica with requests of this one, and for a check; failed checks until it is away."""
SHUNNED_S = 2.0
"""How long a replica that cannot be reached counts as away: longer than it takes to find that another cannot either."""
MOST_IDLE, LARGEST = 256, 64 << 20
"""How many unused connections to each replica are kept, and most bytes of an answer that is read whole."""
REPEATABLE = (b"GET", b"HEAD", b"OPTIONS")
"""Methods of requests that do no harm if they are done twice."""
NOT_OF_A_GET = (b"content-length", b"transfer-encoding", b"sec-websocket")
"""How request headers begin that a GET does not have: of a body, or of a handshake."""
GONE = ("http.disconnect", "websocket.disconnect")
"""The messages that say that the client has gone."""
HOP_HEADER = b"djinn-hop"
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
"""Headers of one connection, not of a request or an answer (RFC 9110, 7.6.1)."""
ADDED = frozenset({b"date", b"server", b"x-request-id", b"request-id"})
"""Headers that this server adds to every answer itself."""
OWN = frozenset({b"expect", b"origin", b"x-request-id", b"x-forwarded-for", HOP_HEADER})
"""Request headers that are not passed on: this server has checked the origin, and names the client itself."""


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers without those of one connection, also those that `Connection` names."""
    found = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in found if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in found if name not in HOP_BY_HOP and name not in named]


def moved_to(headers: Headers) -> str | None:
    """The replica that has what another one has handed on; None if the headers of its answer name none."""
    return dict(headers).get(b"djinn-home", b"").decode("latin-1").partition(" ")[0] or None


def not_done(headers: Headers) -> str | None:
    """Why nothing of a request was done that another replica can do; None: the headers say no such thing."""
    return dict(headers).get(b"djinn-not-done", b"").decode("latin-1") or None


def target_bytes(scope: Scope) -> bytes:
    """Path and query as they came."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def forwarded(scope: Scope) -> Headers:
    """A request's headers for another replica."""
    headers: Headers = list(scope["headers"])
    found = [(name, value) for name, value in end_to_end(headers) if name not in OWN]
    ways = [value for name, value in headers if name == b"x-forwarded-for"]
    client = scope["client"][0].encode() if scope.get("client") else b""
    if client and not (ways and ways[-1].rpartition(b",")[2].strip() == client):  # a proxy may have named it
        ways.append(client)
    if ways:
        found.append((b"x-forwarded-for", b", ".join(ways)))
    if any(name == b"transfer-encoding" for name, _ in headers):
        found = [(name, value) for name, value in found if name != b"content-length"]  # RFC 9112, 6.3
        found.append((b"transfer-encoding", b"chunked"))
    found.append((b"x-request-id", scope["state"]["request_id"].encode()))
    return found


def passed(headers: Headers) -> Headers:
    """A replica's headers for the client. This server counts its requests, and the other one its tokens."""
    return [
        (name, value)
        for name, value in end_to_end(headers)
        if name not in ADDED and not (name.startswith(b"x-ratelimit-") and name.endswith(b"-requests"))
    ]


def content_of(message: Message) -> bytes:
    """The bytes of a part of a body, or of a message of a WebSocket. Raises `ClientDisconnect` if it is none."""
    if message["type"] in GONE:
        raise ClientDisconnect
    found: bytes | str = message.get("text") or message.get("bytes") or message.get("body") or b""
    return found.encode() if isinstance(found, str) else found


def silent() -> Receive:
    """The ASGI `receive` of a client that sends nothing, and stays."""
    messages: list[Message] = [{"type": "http.request"}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return receive


class Hops:
    """Sends requests to other replicas, or to this one itself. Used on the event loop only."""

    def __init__(self, fleet: Fleet, key: ClusterKey, changed: Callable[[], Awaitable[object]]) -> None:
        """`changed` returns when replicas have come or gone."""
        self.fleet, self.key = fleet, key
        self.inside: ASGIApp
        """What answers requests at this server."""
        self.passing_on = 0
        """How many answers are passed to clients. Those to a GET do not count: a live stream has no end."""
        self._idle: defaultdict[tuple[str, int], deque[Wire]] = defaultdict(lambda: deque(maxlen=MOST_IDLE))
        self._changed = changed
        self._under_way: defaultdict[str, set[Callable[[], object]]] = defaultdict(set)
        """Functions that end a connection at once, by the replica's name."""
        self._watched, self._tasks = set[str](), Tasks()

    def proof(self, to: str) -> bytes:
        """The header by which the replica of that name knows whose hop it is."""
        here = self.fleet.here
        return f"{here} {self.key.sign(b'hop', here.encode(), to.encode())}".encode()

    def note(self, scope: Scope) -> None:
        """Note in the scope which replica sent a request on, and its client. Raises `PeerStranger` without proof."""
        headers = dict(scope["headers"])
        if (given := headers.get(HOP_HEADER)) is None:
            return
        name, _, signature = given.partition(b" ")
        if not self.key.has_signed(signature.decode("latin-1"), b"hop", name, self.fleet.here.encode()):
            raise PeerStranger("Djinn-Hop: who sent this request on lacks the key of this cluster")
        scope["state"][HOP] = name.decode("latin-1")
        client = headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip().decode("latin-1")
        scope["client"] = (client, 0) if client else scope.get("client")

    def at(self, replica: Replica) -> ASGIApp:
        """What answers requests there."""
        return self._answer_here if replica is self.fleet.own else partial(self.pass_on, replica)

    async def _answer_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.inside({**scope, "state": dict(scope["state"])}, receive, send)
        except (DjinnError, HTTPException, ClientDisconnect):
            raise
        except Exception as error:  # whatever it is, who waits for the answer must hear that none comes
            logger.exception("this replica could not answer for itself")
            raise ReplicaLost("this replica has not answered to the end") from error

    async def pass_on(self, replica: Replica, scope: Scope, receive: Receive, send: Send) -> None:
        """Have another replica answer. Raises `ClientDisconnect`, `ReplicaAway` (nothing was done), `ReplicaLost`."""
        first, is_whole, is_gone = await receive(), asyncio.Event(), False

        async def parts(message: Message) -> AsyncIterator[bytes]:
            while message.get("more_body", False):
                yield content_of(message)
                message = await receive()
            yield content_of(message)
            is_whole.set()

        async def abort_when_gone(wire: Wire) -> None:
            nonlocal is_gone
            await is_whole.wait()
            await disconnected(receive)
            is_gone = True
            wire.abort()

        content: bytes | AsyncIterator[bytes] = parts(first)
        if not first.get("more_body", False):
            content = content_of(first)
            is_whole.set()
        counts = scope["method"] != "GET"
        self.passing_on += counts
        try:
            method, target = scope["method"].encode(), target_bytes(scope)
            async with self.asking(replica, method, target, forwarded(scope), content, abort_when_gone) as answer:
                headers, is_over = passed(answer.headers), False
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                while not is_over:
                    part, is_over = await answer.part()
                    await send({"type": "http.response.body", "body": part, "more_body": not is_over})
        except ReplicaLost:
            if is_gone:
                raise ClientDisconnect from None
            raise
        finally:
            self.passing_on -= counts

    async def answer(self, replica: Replica, scope: Scope, receive: Receive) -> Response:
        """The whole answer of a replica, or of this one. Raises `ReplicaAway`, `ReplicaLost`, `ClientDisconnect`."""
        messages, size = list[Message](), 0

        async def take(message: Message) -> None:
            nonlocal size
            messages.append(message)
            size += len(message.get("body", b""))
            if size > LARGEST:
                raise ReplicaLost(f"the answer of replica {replica.name} is too large")

        await self.at(replica)(scope, receive, take)
        if len(messages) < 2 or messages[-1].get("more_body", False):
            raise ReplicaLost(f"replica {replica.name} has not answered to the end")
        found = Response(b"".join(each.get("body", b"") for each in messages), messages[0]["status"])
        found.raw_headers = passed(messages[0].get("headers", []))
        return found

    async def get(
        self, replicas: Sequence[Replica], scope: Scope, path: bytes, patience_s: float
    ) -> dict[Replica, tuple[Response, dict[str, Any]]]:
        """The replicas' answers to a GET in the name of the client whose request has that `scope`, and the objects that
        their JSON has. A replica that gives none within `patience_s` seconds, or no JSON object, is left out.
        """
        raw_path, _, query = path.partition(b"?")
        headers = [each for each in scope["headers"] if not each[0].startswith(NOT_OF_A_GET)]
        asked = {**scope, "type": "http", "method": "GET", "headers": headers, "raw_path": raw_path}
        asked |= {"path": unquote(raw_path.decode("latin-1")), "query_string": query}

        async def ask(replica: Replica) -> tuple[Response, dict[str, Any]] | None:
            with contextlib.suppress(OSError, DjinnError, orjson.JSONDecodeError):
                async with asyncio.timeout(patience_s):
                    answer = await self.answer(replica, asked, silent())
                    return (answer, page) if isinstance(page := orjson.loads(answer.body), dict) else None
            return None

        told = await asyncio.gather(*map(ask, replicas))
        return {replica: each for replica, each in zip(replicas, told, strict=True) if each is not None}

    @contextlib.asynccontextmanager
    async def asking(
        self,
        replica: Replica,
        method: bytes,
        target: bytes,
        headers: Headers,
        content: bytes | AsyncIterator[bytes] = b"",
        watch: Callable[[Wire], Coroutine[Any, Any, None]] | None = None,
    ) -> AsyncIterator[Wire]:
        """A connection on which a replica answers. `watch` may cut it too. Raises `ReplicaAway`, `ReplicaLost`."""
        host, port = address = replica.address
        headers.append((HOP_HEADER, self.proof(replica.name)))
        if not any(name == b"host" for name, _ in headers):
            headers.insert(0, (b"host", f"{host}:{port}".encode()))
        may_repeat = method in REPEATABLE and isinstance(content, bytes)
        while True:
            wire = self._unused(address)
            was_used = wire is not None
            try:
                wire = wire or await Wire.open(address)
            except OSError as error:
                replica.shun(SHUNNED_S)
                raise ReplicaAway(f"replica {replica.name} cannot be reached: try again") from error
            watching = None if watch is None else asyncio.create_task(watch(wire))
            with self.cutting(replica, wire.abort):
                try:
                    try:
                        await wire.ask(method, target, headers, content)
                    except WireLost:
                        if may_repeat and was_used and not wire.is_aborted:
                            continue  # it had just closed
                        raise
                    yield wire
                    return
                finally:
                    if watching is not None:
                        watching.cancel()
                    if wire.rest():
                        self._idle[address].append(wire)

    def _unused(self, address: tuple[str, int]) -> Wire | None:
        """An idle connection to that host and port; None if there is none."""
        idle = self._idle[address]
        while idle:
            if (wire := idle.pop()).wake():
                return wire
        return None

    @contextlib.contextmanager
    def cutting(self, replica: Replica, abort: Callable[[], object]) -> Iterator[None]:
        """Within the block, `abort` is called when the replica is lost. Raises `ReplicaLost` for `WireLost`."""
        under_way = self._under_way[replica.name]
        under_way.add(abort)
        if replica.name not in self._watched:
            self._watched.add(replica.name)
            self._tasks.start(self._watch(replica))
        try:
            yield
        except WireLost as error:
            raise ReplicaLost(f"replica {replica.name} {error}; whether the request was done is not known") from error
        finally:
            under_way.discard(abort)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Within the block, requests under way at replicas that lose their lease are cut."""
        self._tasks.start(self._cut_those_gone())
        try:
            yield
        finally:
            await self._tasks.close()
            for wire in itertools.chain(*self._idle.values()):
                wire.abort()

    async def _cut_those_gone(self) -> None:
        while True:
            await self._changed()
            for replica in self.fleet:
                if not replica.is_member:
                    self._cut(replica)

    async def _watch(self, replica: Replica) -> None:
        """Look at a replica as long as it has requests of this one, or counts as away."""
        missed, where = 0, f"replica {replica.name} at {replica.seen.url}"
        try:
            await asyncio.sleep(LOOK_S)
            while replica.is_member and (missed or self._under_way[replica.name]):
                try:
                    async with asyncio.timeout(LOOK_PATIENCE_S), self.asking(replica, b"GET", b"/health", []) as answer:
                        await answer.read(LARGEST)
                    if missed >= MISSES:
                        logger.info("%s answers again", where)
                        replica.shun(0.0)
                    missed = 0
                except (OSError, DjinnError):
                    missed += 1
                    if missed == MISSES:
                        logger.warning("%s does not answer: it is taken to be away", where)
                    if missed >= MISSES:
                        replica.shun(math.inf)
                        self._cut(replica)
                await asyncio.sleep(LOOK_S)
        finally:
            if missed:
                replica.shun(0.0)
            self._watched.discard(replica.name)

    def _cut(self, replica: Replica) -> None:
        for abort in list(self._under_way[replica.name]):
            abort()
