"""`Idempotency-Key`: a retried request gets the answer of the first, and nothing is done twice.

It follows draft-ietf-httpapi-idempotency-key-header, and Stripe's API where that is silent.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import DjinnError, KeyReused, MalformedRequest, Restated
from app.sessions.keyed import KeptAnswer, KeyedRequest, KeyedRequests
from app.web.errors import error_response, known_error
from app.web.middleware import SESSION_HEADER, TOKEN_HEADER
from app.web.sse import disconnected

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
"""The header of an answer that was made for an earlier request."""
LONGEST_KEY = 255
SESSIONS = "/v1/sessions"
PATHS = frozenset({SESSIONS, "/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/messages"})
OF_SESSION = ("/generate", "/fork")
"""What paths of sessions end with that open a session or start a turn."""
GRACE_S = 30.0
"""How long a turn runs on after its client has disconnected: the client may retry, and a cancelled turn would stay half
done in the history.
"""


class IdempotencyMiddleware:
    """Answers requests with a key. `state.keyed` is where routes note what they have done, or find that it is done.

    A retry that arrives while the first request is being answered streams the same answer.
    """

    def __init__(self, app: ASGIApp, requests: KeyedRequests) -> None:
        self.app = app
        self._requests = requests
        self._running: dict[KeyedRequest, _Running] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        may_have_key = scope["type"] == "http" and scope["method"] == "POST" and _takes_key(scope["path"])
        if not may_have_key or HEADER not in (headers := Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        try:
            key = _key(headers)
            try:
                body = await Request(scope, receive).body()
            except HTTPException as error:
                raise known_error(error, scope) from error
            except ClientDisconnect:
                return
            await self._answer(scope, key, body, receive, send)
        except DjinnError as error:
            is_of_another_api = isinstance(error, KeyReused) and not scope["path"].startswith(SESSIONS)
            error = Restated(error, status=MalformedRequest.status) if is_of_another_api else error
            await error_response(error, scope)(scope, receive, send)

    async def _answer(self, scope: Scope, key: str, body: bytes, receive: Receive, send: Send) -> None:
        """Raises `KeyReused`."""
        owner, digest = scope["state"]["owner"], _digest(scope, body)
        while True:
            request = self._requests.find(owner, key)
            if request is not None and request.digest != digest:
                raise KeyReused(f"another request had this {HEADER}: a key is for one request", param=HEADER)
            running = None if request is None else self._running.get(request)
            if running is None or request is None or not request.is_left:
                break
            await running.is_over.wait()
        if request is not None and request.answer is not None:
            answer = request.answer
            headers = [*answer.headers, (REPLAYED.lower().encode(), b"true")]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.body})
            return
        if running is None:
            request = request or self._requests.begin(owner, key, digest)
            request.is_running, request.is_left = True, False
            running = self._running[request] = _Running(request, body)
            running.task = asyncio.create_task(self._run(scope, request, running))
        await running.follow(receive, send)

    async def _run(self, scope: Scope, request: KeyedRequest, running: _Running) -> None:
        scope["state"]["keyed"] = request
        was_done = request.is_done
        try:
            await self.app(scope, running.receive, _marked(running.send) if was_done else running.send)
        except Exception as error:  # `follow` raises it for each waiting client
            running.error = error
        finally:
            del self._running[request]
            self._requests.end(request, running.answer)
            running.end()


class _Running:
    """A request that is being answered, for all who ask for it."""

    def __init__(self, request: KeyedRequest, body: bytes) -> None:
        self.task: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self.is_over = asyncio.Event()
        self._request = request
        self._body: bytes | None = body
        self._messages: list[Message] = []
        self._followers: set[asyncio.Event] = set()
        """Set when there is something new."""
        self._gone = asyncio.Event()
        self._leaving: asyncio.Handle | None = None

    @property
    def answer(self) -> KeptAnswer | None:
        """The whole answer, if it is there and no error."""
        if self.error is not None or not self._messages or self._messages[-1].get("more_body", False):
            return None
        start, *parts = self._messages
        if not 200 <= start["status"] < 300:
            return None
        body = b"".join(part.get("body", b"") for part in parts)
        return KeptAnswer(start["status"], tuple(start["headers"]), body)

    async def receive(self) -> Message:
        """Give the application the body, and a disconnect once no client is left."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take a part of the answer."""
        self._messages.append(message)
        self._wake()

    def end(self) -> None:
        """The application is done."""
        self.is_over.set()
        self._wake()

    async def follow(self, receive: Receive, send: Send) -> None:
        """Send the answer, from its beginning, until it is over or the client has gone. Raises what it failed with."""
        news, sent = asyncio.Event(), 0
        watching = asyncio.create_task(disconnected(receive))
        watching.add_done_callback(lambda task: news.set())
        self._followers.add(news)
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        try:
            while True:
                while sent < len(self._messages):
                    message = self._messages[sent]
                    if "headers" in message:  # others add theirs on the way to this client
                        message = {**message, "headers": list(message["headers"])}
                    await send(message)
                    sent += 1
                if self.is_over.is_set() or watching.done():
                    break
                news.clear()
                await news.wait()
        finally:
            watching.cancel()
            self._followers.discard(news)
            if not self._followers and not self.is_over.is_set():  # it is cancelled, now or after `GRACE_S`
                self._leaving = asyncio.get_running_loop().call_soon(self._leave)
        if self.error is not None:
            raise self.error

    def _leave(self, *, waited: bool = False) -> None:
        """Cancel what no client waits for. A turn that has begun runs on for `GRACE_S`; none begins from now on."""
        if self._request.outlives_client and not waited:
            self._leaving = asyncio.get_running_loop().call_later(GRACE_S, partial(self._leave, waited=True))
            return
        self._request.is_left = True
        self._gone.set()

    def _wake(self) -> None:
        for news in self._followers:
            news.set()


def _takes_key(path: str) -> bool:
    return path in PATHS or (path.startswith(f"{SESSIONS}/") and path.endswith(OF_SESSION))


def _key(headers: Headers) -> str:
    """Raises `MalformedRequest`."""
    keys = headers.getlist(HEADER)
    if len(keys) != 1 or not 1 <= len(keys[0]) <= LONGEST_KEY or not (keys[0].isascii() and keys[0].isprintable()):
        raise MalformedRequest(f"{HEADER}: one key of 1 to {LONGEST_KEY} printable ASCII characters", param=HEADER)
    return keys[0]


def _digest(scope: Scope, body: bytes) -> bytes:
    """Of all that tells what is asked for."""
    digest = hashlib.blake2b(digest_size=32)
    names = (SESSION_HEADER.lower().encode(), TOKEN_HEADER.encode())
    named = [value for name, value in scope["headers"] if name in names]
    for part in (scope["path"].encode(), scope["query_string"], *named, body):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _marked(send: Send) -> Send:
    """Says of the answer that its request was done before."""

    async def send_marked(message: Message) -> None:
        if message["type"] == "http.response.start" and 200 <= message["status"] < 300:
            MutableHeaders(scope=message)[REPLAYED] = "true"
        await send(message)

    return send_marked
