"""Requests of clients on their way to another replica, one hop away, and the answers on their way back.

A request that has come over a hop is answered where it is, or turned away: it is never sent on. `Djinn-Hop` says so,
with the name of the replica that sent it and a proof that it has the cluster's key.

An answer may take long, and the connection says nothing meanwhile. So the replica that has requests under way is
watched instead: they are cut as soon as it has lost its lease, or has not answered two looks at its `/health`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote

import httpcore
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope

from app.cluster.fleet import Fleet, Replica
from app.cluster.key import ClusterKey
from app.cluster.wires import Wires
from app.domain.errors import DjinnError, PeerStranger, ReplicaAway, ReplicaLost, TooLarge
from app.web.middleware import HOP

logger = logging.getLogger(__name__)

CONNECT_S = 1.0
LOOK_S = 1.0
"""Between two looks at a replica that has requests of this one, or is taken to be away."""
LOOK_PATIENCE_S = 4.0
MISSES = 2
"""Looks without an answer before a replica is taken to be away: one may be busy for a moment."""
SHUNNED_S = 0.5
"""How long a replica that refuses connections is asked for nothing: it may be back soon."""
KEPT_BYTES = 1 << 20
"""Of a body that is sent on. One that is longer cannot be sent to a second replica."""
MOST_IDLE, IDLE_S = 256, 30.0
"""Unused connections that are kept, and for how long: servers keep them longer."""
LARGEST = 64 << 20
"""Bytes of an answer that is read whole."""
WAITING = 64
"""Parts of this server's own answer that wait for a reader."""
LOST = (httpcore.NetworkError, httpcore.ProtocolError)
"""What a connection raises that has ended, or brings what is no HTTP."""
REPEATABLE = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that do no harm if they are done twice."""

HOP_HEADER = b"djinn-hop"
Headers = list[tuple[bytes, bytes]]
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Of one connection, not of a request or an answer (RFC 9110, 7.6.1)."""
OWN = frozenset({b"expect", b"origin", b"x-request-id", b"x-forwarded-for", HOP_HEADER})
"""Headers of requests that this server answers for: it has judged the page that asks, and names the client."""
NOT_PASSED = frozenset({b"date", b"server", b"x-request-id", b"request-id"})
"""Headers that each of the client's answers has already."""


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Without those of one connection, also those that `Connection` names."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in headers if name not in HOP_BY_HOP and name not in named]


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


def forwarded(scope: Scope, *, body: bool = True) -> Headers:
    """A request's headers for another replica; without a `body`, those of a question in the client's name."""
    headers: Headers = list(scope["headers"])
    found = [(name, value) for name, value in end_to_end(headers) if name not in OWN]
    ways = [value for name, value in headers if name == b"x-forwarded-for"]
    client = scope["client"][0].encode() if scope.get("client") else b""
    if client and not (ways and ways[-1].rpartition(b",")[2].strip() == client):  # a proxy may have named it
        ways.append(client)
    if ways:
        found.append((b"x-forwarded-for", b", ".join(ways)))
    if not body:
        found = [each for each in found if each[0] != b"content-length" and not each[0].startswith(b"sec-websocket")]
    elif any(name == b"transfer-encoding" for name, _ in headers):
        found = [(name, value) for name, value in found if name != b"content-length"]  # RFC 9112, 6.3
        found.append((b"transfer-encoding", b"chunked"))
    found.append((b"x-request-id", scope["state"]["request_id"].encode()))
    return found


class Gone(Exception):
    """The client has gone, or its body was refused: no client waits for the answer."""


class Body:
    """The body of a client's request: sent on as it comes, and kept for as long as the request may have to be repeated.
    Used by one request.
    """

    def __init__(self, receive: Receive) -> None:
        self.refusal: DjinnError | None = None
        """Why the body was refused, if it was."""
        self.is_whole = asyncio.Event()
        self._receive = receive
        self._kept: list[bytes] | None = []
        self._kept_bytes = 0
        self._is_gone = False

    @property
    def can_repeat(self) -> bool:
        """Whether all that has come is still here."""
        return self._kept is not None

    async def whole(self) -> bytes:
        """All of it, which stays here: its limits are those of the server. Raises `Gone`."""
        parts: list[bytes] = [part async for part in self.parts(keep_all=True)]
        self._kept = [b"".join(parts)]
        return self._kept[0]

    async def parts(self, *, keep_all: bool = False) -> AsyncIterator[bytes]:
        """All of it, from the beginning. Raises `Gone`."""
        assert self._kept is not None
        for part in list(self._kept):
            yield part
        while not self.is_whole.is_set():
            if part := self._took(await self._next(), keep_all=keep_all):
                yield part

    def again(self) -> Receive:
        """What an application of this process receives: the whole body, then what the client does."""
        assert self._kept is not None
        kept = list(self._kept)

        async def receive() -> Message:
            if kept:
                part = kept.pop(0)
                is_last = not kept and self.is_whole.is_set()
                return {"type": "http.request", "body": part, "more_body": not is_last}
            message = await self._receive()
            if message["type"] == "http.request" and not self.is_whole.is_set():
                self._took(message)
            return message

        if self.is_whole.is_set() and not kept:
            kept.append(b"")
        return receive

    async def gone(self) -> None:
        """Return when the client has gone, as far as that is seen: not before its body is whole."""
        await self.is_whole.wait()
        while not self._is_gone:
            self._is_gone = (await self._receive())["type"] == "http.disconnect"

    async def _next(self) -> Message:
        try:
            message = await self._receive()
        except DjinnError as error:
            self.refusal = error
            raise Gone from error
        except HTTPException as error:
            self.refusal = TooLarge(error.detail)
            raise Gone from error
        if message["type"] == "http.disconnect":
            self._is_gone = True
            raise Gone
        return message

    def _took(self, message: Message, *, keep_all: bool = False) -> bytes:
        part: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            self.is_whole.set()
        self._kept_bytes += len(part)
        if self._kept_bytes > KEPT_BYTES and not keep_all:
            self._kept = None
        if self._kept is not None and part:
            self._kept.append(part)
        return part


@dataclass(slots=True)
class Answer:
    """What a replica answers: its head, and what follows as it comes."""

    replica: Replica
    status: int
    headers: Headers
    parts: AsyncIterator[bytes]

    @property
    def moved_to(self) -> str | None:
        """The replica that has what this one has handed on; None if the answer names none."""
        return moved_to(self.headers)

    @property
    def not_done(self) -> str | None:
        """Why nothing of the request was done that another one can do; None: the answer says no such thing."""
        return not_done(self.headers)

    async def read(self) -> bytes:
        """All of it. Raises `ReplicaLost` for more than is read whole."""
        content = bytearray()
        async for part in self.parts:
            content += part
            if len(content) > LARGEST:
                raise ReplicaLost(f"the answer of replica {self.replica.name} is too large")
        return bytes(content)


class Hops:
    """Asks other replicas, and this one where an answer is made of those of all. Used on the event loop only."""

    def __init__(self, fleet: Fleet, key: ClusterKey, changed: Callable[[], Awaitable[object]]) -> None:
        """`changed` returns when replicas have come or gone."""
        self.fleet = fleet
        self.inside: ASGIApp | None = None
        """What answers requests at this server."""
        self._key = key
        self._changed = changed
        # Not a client: that would keep cookies, and follow what is the client's to follow.
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None,
            max_keepalive_connections=MOST_IDLE,
            keepalive_expiry=IDLE_S,
            network_backend=Wires(),
        )
        self._proofs: dict[str, bytes] = {}
        self._under_way: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._passing = 0
        """Requests of clients whose answers pass here."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self._missed: defaultdict[str, int] = defaultdict(int)
        self._looks: dict[str, asyncio.Task[None]] = {}

    # Who has sent a request.

    def proof(self, to: str) -> bytes:
        """The header by which the replica of that name knows whose hop it is."""
        if to not in self._proofs:
            here = self.fleet.here
            self._proofs[to] = f"{here} {self._key.sign(b'hop', here.encode(), to.encode())}".encode()
        return self._proofs[to]

    def note(self, scope: Scope) -> None:
        """Note in the scope's state whether the request has come over a hop, and name its client. Raises `PeerStranger`
        for a header that proves nothing: a replica with another key would send it back and forth.
        """
        headers = dict(scope["headers"])
        if (given := headers.get(HOP_HEADER)) is None:
            return
        name, _, signature = given.partition(b" ")
        if not self._key.has_signed(signature.decode("latin-1"), b"hop", name, self.fleet.here.encode()):
            raise PeerStranger("Djinn-Hop: who sent this request on lacks the key of this cluster")
        scope["state"][HOP] = name.decode("latin-1")
        client = headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip().decode("latin-1")
        scope["client"] = (client, 0) if client else scope.get("client")

    # Requests.

    @contextlib.asynccontextmanager
    async def asking(self, replica: Replica, scope: Scope, body: Body) -> AsyncIterator[Answer]:
        """The replica's answer to a client's request, within the block. The replica is told if the client goes away
        meanwhile, by the end of the connection.

        Raises `Gone`, `ReplicaAway` (nothing was done), `ReplicaLost`.
        """
        headers = forwarded(scope)
        watching = asyncio.create_task(body.gone())
        self._passing += 1
        self.idle.clear()
        try:
            async with self.cut_if_lost(replica) as limit:
                watching.add_done_callback(lambda _: _end(limit))
                is_repeatable = scope["method"] in REPEATABLE and body.can_repeat
                request = (replica, scope["method"], target_bytes(scope), headers)
                try:
                    response = await self._send(*request, body.parts())
                except (httpcore.RemoteProtocolError, httpcore.ReadError, httpcore.WriteError):
                    if not is_repeatable:
                        raise
                    response = await self._send(*request, body.parts())  # a connection that had just closed
                async with contextlib.aclosing(response):
                    yield _answer(replica, response)
        except ReplicaLost:
            if watching.done():
                raise Gone from None
            raise
        finally:
            watching.cancel()
            self._passing -= 1
            if not self._passing:
                self.idle.set()

    @contextlib.asynccontextmanager
    async def getting(self, replica: Replica, scope: Scope, path: bytes = b"") -> AsyncIterator[Answer]:
        """The replica's answer to a question of this server's own, in the name of the client whose request has that
        `scope`: a GET of that request's own path, or of another one. Raises `ReplicaAway`, `ReplicaLost`.
        """
        target, headers = path or target_bytes(scope), forwarded(scope, body=False)
        if replica.name == self.fleet.here:
            async with self._asking_here(replica, scope, target, headers) as answer:
                yield answer
            return
        async with self.cut_if_lost(replica):
            response = await self._send(replica, "GET", target, headers, None)
            async with contextlib.aclosing(response):
                yield _answer(replica, response)

    async def get(self, replica: Replica, scope: Scope, path: bytes, patience_s: float) -> tuple[Answer, bytes]:
        """The whole of such an answer. Raises `ReplicaAway`, also if it takes longer than `patience_s`."""
        try:
            async with asyncio.timeout(patience_s), self.getting(replica, scope, path) as answer:
                return answer, await answer.read()
        except (ReplicaLost, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            raise ReplicaAway(f"replica {replica.name} does not answer ({reason}): try again") from error

    async def _send(
        self, replica: Replica, method: str, target: bytes, headers: Headers, body: AsyncIterator[bytes] | None
    ) -> httpcore.Response:
        host, port = replica.address
        found = [*headers, (HOP_HEADER, self.proof(replica.name))]
        if not any(name == b"host" for name, _ in found):
            found.insert(0, (b"host", f"{host}:{port}".encode()))
        url = httpcore.URL(scheme=b"http", host=host.encode(), port=port, target=target)
        request = httpcore.Request(
            method.encode(), url, headers=found, content=body, extensions={"timeout": {"connect": CONNECT_S}}
        )
        try:
            return await self._pool.handle_async_request(request)
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            replica.shun(SHUNNED_S)
            raise ReplicaAway(f"replica {replica.name} at {replica.url} cannot be reached: try again") from error

    @contextlib.asynccontextmanager
    async def cut_if_lost(self, replica: Replica) -> AsyncIterator[asyncio.Timeout]:
        """Ends the block with `ReplicaLost` when the replica is lost, or the block's connection is."""
        under_way = self._under_way[replica.name]
        try:
            async with asyncio.timeout(None) as limit:
                under_way.add(limit)
                yield limit
        except (TimeoutError, *LOST) as error:
            if isinstance(error, TimeoutError) and not limit.expired():
                raise
            why = "it does not answer any more" if isinstance(error, TimeoutError) else str(error) or repr(error)
            message = f"replica {replica.name} went away before its answer was there: {why}"
            raise ReplicaLost(f"{message}; whether the request was done is not known") from error
        finally:
            under_way.discard(limit)

    @contextlib.asynccontextmanager
    async def _asking_here(
        self, replica: Replica, scope: Scope, target: bytes, headers: Headers
    ) -> AsyncIterator[Answer]:
        """The same of this server, without a connection."""
        assert self.inside is not None
        path, _, query = target.partition(b"?")
        asked = {**scope, "type": "http", "method": "GET", "headers": headers, "state": dict(scope["state"])}
        asked |= {"path": unquote(path.decode("latin-1")), "raw_path": path, "query_string": query}
        messages = asyncio.Queue[Message](WAITING)
        to_come: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if not to_come:
                await asyncio.Event().wait()  # for ever: who asks ends the task instead
            return to_come.pop()

        async def run(inside: ASGIApp) -> None:
            try:
                await inside(asked, receive, messages.put)
            except Exception:  # whatever it is, who waits for the answer must hear that none comes
                logger.exception("this replica could not answer for itself")
            await messages.put({"type": "over"})

        async def parts() -> AsyncIterator[bytes]:
            while (message := await messages.get())["type"] == "http.response.body":
                if content := message.get("body", b""):
                    yield content
                if not message.get("more_body", False):
                    return
            raise ReplicaLost("this replica has not answered to the end")

        running = asyncio.create_task(run(self.inside))
        try:
            start = await messages.get()
            if start["type"] != "http.response.start":
                raise ReplicaLost("this replica has not answered")
            yield Answer(replica, start["status"], end_to_end(start["headers"]), parts())
        finally:
            running.cancel()
            await asyncio.wait([running])

    # Replicas that are lost.

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Within the block, replicas that have requests of this one under way are watched."""
        work = [asyncio.create_task(self._cut_those_gone()), asyncio.create_task(self._look_around())]
        try:
            yield
        finally:
            for task in (*work, *self._looks.values()):
                task.cancel()
            await asyncio.wait([*work, *self._looks.values()])
            await self._pool.aclose()

    async def _cut_those_gone(self) -> None:
        while True:
            await self._changed()
            for replica in self.fleet.others:
                if not replica.is_member:
                    self._cut(replica)

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for replica in self.fleet.others:
                if not replica.is_member:
                    self._missed.pop(replica.name, None)
                    replica.shun(0.0)
                elif replica.name not in self._looks and (self._under_way[replica.name] or self._missed[replica.name]):
                    self._looks[replica.name] = task = asyncio.create_task(self._look_at(replica))
                    task.add_done_callback(lambda _, name=replica.name: self._looks.pop(name, None))  # type: ignore[misc]

    async def _look_at(self, replica: Replica) -> None:
        host, port = replica.address
        try:
            async with asyncio.timeout(LOOK_PATIENCE_S):
                response = await self._send(replica, "GET", b"/health", [(b"host", f"{host}:{port}".encode())], None)
                async with contextlib.aclosing(response):
                    async for _ in response.aiter_stream():
                        pass
        except (TimeoutError, ReplicaAway, *LOST):
            self._missed[replica.name] += 1
            if self._missed[replica.name] == MISSES:
                logger.warning("replica %s at %s does not answer: it is taken to be away", replica.name, replica.url)
            if self._missed[replica.name] >= MISSES:
                replica.shun(math.inf)
                self._cut(replica)
            return
        if self._missed.pop(replica.name, 0) >= MISSES:
            logger.info("replica %s at %s answers again", replica.name, replica.url)
            replica.shun(0.0)

    def _cut(self, replica: Replica) -> None:
        for limit in self._under_way[replica.name]:
            _end(limit)


def _end(limit: asyncio.Timeout) -> None:
    """Cut the block of the timeout at once, unless it has ended already."""
    with contextlib.suppress(RuntimeError):
        limit.reschedule(0.0)


def _answer(replica: Replica, response: httpcore.Response) -> Answer:
    return Answer(replica, response.status, end_to_end(response.headers), response.aiter_stream())
