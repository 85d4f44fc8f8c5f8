"""What every request passes on its way to a route: its id and its records, other sites, the lease.

Anthropic's API calls the header of the id otherwise; its paths answer with both. `traceresponse` is in the editors'
draft of W3C Trace Context: the recommendation has no header for answers.

A site can let its own name point to any address (DNS rebinding), and any page can send a form to http://127.0.0.1:8000.
A server without keys would take both for its user. `Host` tells the first, and `Origin` the second.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import Fenced, ForeignHost
from app.domain.text import ANY_HOST, PRIVATE_HOSTS, is_private_name
from app.logs import REQUEST, method_of, route_of, session_of
from app.telemetry.turn_metrics import TRACE_RESPONSE
from app.web.bodies import matched
from app.web.errors import REQUEST_ID_HEADER, TRY_AGAIN_LATER, close_socket, end_with, error_response, is_of_anthropic

logger = logging.getLogger(__name__)

MESSAGES_HEADER = "Request-Id"
HOP = "hop"
"""Where the state of a request has the name of the replica that has sent it on: that has judged its page and host, and
counted it for its tenant. Who only says so is none.
"""
ANSWERS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
"""The messages that have the headers of an answer."""
SESSION_HEADER = "X-Session-ID"
"""Names the session that an answer of the OpenAI routes is from."""
TOKEN_HEADER = "x-session-token"
"""The same. A client that sends it back reaches the same server through routers such as llm-d's."""
SANE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CURL = "curl/"
"""The beginning of the user agent of curl, which writes answers to terminals."""
JSON_TYPE = "application/json"


def new_request_id() -> str:
    """One that no other answer has."""
    return f"req_{secrets.token_hex(12)}"


SWITCHING_PROTOCOLS, INTERNAL_ERROR = 101, 500
"""The status of an answer that names none: a WebSocket's, and that of a bug before the first header."""


@dataclass(slots=True)
class Answer:
    """Its `status`, and the `session` that it named: empty if it named none."""

    status: int = INTERNAL_ERROR
    session: str = ""


Record = Callable[[Scope, Answer, float], None]
"""Is called when a request is over, after so many seconds: a stream's when it has ended, a WebSocket's when it has
closed. One that another replica has sent on is recorded there.
"""


class RequestMiddleware:
    """What each request has from its beginning to its end: an id, the headers that name it and the span of its turn,
    and `records`.

    Sets `request.state.request_id`. Lines of the log name the request from here on.
    """

    def __init__(self, app: ASGIApp, records: Sequence[Record] = ()) -> None:
        self.app = app
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        _normalize(scope)
        asked = Headers(scope=scope)
        if asked.get("user-agent", "").startswith(CURL):
            send = _ended_by_line(scope, send)
        given = asked.get(REQUEST_ID_HEADER, "")
        request_id = given if SANE.fullmatch(given) else new_request_id()
        state, answer = scope.setdefault("state", {}), Answer()
        state["request_id"] = request_id
        REQUEST.set(scope)  # the task is this request's alone

        async def send_named(message: Message) -> None:
            if message["type"] in ANSWERS:
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                answer.status = message.get("status", SWITCHING_PROTOCOLS)
                answer.session = headers.get(SESSION_HEADER, "")
                headers[REQUEST_ID_HEADER] = request_id
                if is_of_anthropic(scope):
                    headers[MESSAGES_HEADER] = request_id
                if TRACE_RESPONSE in state:
                    headers[TRACE_RESPONSE] = state[TRACE_RESPONSE]
            await send(message)

        began = time.perf_counter()
        try:
            await self.app(scope, receive, send_named)
        finally:
            for record in self._records if HOP not in state else ():
                record(scope, answer, time.perf_counter() - began)


def _ended_by_line(scope: Scope, send: Send) -> Send:
    """The same as `send`, but JSON ends with a line end, so that the shell's prompt starts on a new line. Where a
    request passes two replicas, only the first one adds it.
    """
    is_json = False

    async def send_ended(message: Message) -> None:
        nonlocal is_json
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            length = headers.get("content-length", "")
            is_plain = headers.get("content-type") == JSON_TYPE and "content-encoding" not in headers
            is_json = is_plain and length.isdigit() and HOP not in scope["state"]
            if is_json:
                headers["content-length"] = str(int(length) + 1)
        elif is_json and not message.get("more_body"):
            message = {**message, "body": message.get("body", b"") + b"\n"}
        await send(message)

    return send_ended


ABSOLUTE = re.compile(r"https?://[^/?]*", re.IGNORECASE)
"""What stands before the path in a request that was meant for a proxy (RFC 9112, 3.2.2)."""
JOINED_PATHS = frozenset(
    f"/v1/{name}"
    for name in (
        *("chat/completions", "completions", "embeddings", "models", "responses", "responses/compact"),
        *("responses/input_tokens", "messages", "messages/count_tokens", "conversations", "files", "batches"),
    )
)
"""Those of other APIs that may end in a slash. Behind others an empty id may stand, which means nothing."""


def _normalize(scope: Scope) -> None:
    """Take the path of an absolute target, and `/v1/models` for `/v1/models/`: clients join them as they like."""
    path: str = scope["path"]
    if not path.startswith("/"):
        path = ABSOLUTE.sub("", path, count=1) or "/"
    if path.rstrip("/") in JOINED_PATHS:
        path = path.rstrip("/")
    if path != scope["path"]:
        scope["path"], scope["raw_path"] = path, quote(path).encode()


def log_access(scope: Scope, answer: Answer, seconds: float) -> None:
    """Log a line of the request, without its content."""
    about, duration_ms = matched(scope), seconds * 1000
    client = scope["client"][0] if scope.get("client") else None
    named = {"client": client, "method": method_of(scope), "path": route_of(about)}
    fields = {**named, "status": answer.status, "duration_ms": round(duration_ms, 3)}
    extra = {"fields": fields, "session": session_of(about, answer.session)}
    words = (each or "-" for each in named.values())  # of no route
    logger.info("%s %s %s %d %.1f ms", *words, answer.status, duration_ms, extra=extra)


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
READABLE = (
    "Retry-After",
    "X-Request-Id",
    "Request-Id",
    "X-Session-ID",
    TOKEN_HEADER,
    "X-Djinn-Ignored",
    "Idempotent-Replayed",
    "Djinn-Missing",
    TRACE_RESPONSE,
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Headers of answers that a page may read. Those of requests are not held to a list: SDKs send many of their own."""


def cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """What answers browsers for pages of `origins`; nothing without any. Keys are in headers, never in cookies."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=READABLE,
            allow_private_network=True,  # the server may be on the machine of the browser
        )
    ]


SCHEMES = {"ws": "http", "wss": "https"}
"""What the page of a WebSocket has."""
PORTS = {"http": 80, "https": 443}
FLAGS = {"Host": "--allowed-hosts names those", "Origin": "--cors-origin names others"}


class Sites:
    """The hosts that the server answers to: names without ports, `ANY_HOST` or `PRIVATE_HOSTS`.

    Without keys it also refuses requests of pages, by their `Origin`, unless the server itself has served the page, or
    it is one of `origins`. With keys it does not look: a browser adds no key to what another page sends.
    """

    def __init__(self, hosts: Iterable[str], origins: Iterable[str], *, needs_key: bool) -> None:
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        self._origins = frozenset(origins)
        self._needs_key = needs_key

    def require(self, scheme: str, headers: Headers) -> None:
        """Raise `ForeignHost` for a request to another host, or of another page."""
        if (wrong := self._wrong(scheme, headers)) is not None:
            message = f"this server does not answer to that {wrong}; {FLAGS[wrong]} that it answers to"
            raise ForeignHost(message, param=wrong)

    def _wrong(self, scheme: str, headers: Headers) -> str | None:
        """The header that names another host. Browsers send both; programs need not."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._answers_to(host):
            return "Host"
        if origin is None or self._needs_key or not self._origins.isdisjoint((origin, ANY_HOST)):
            return None
        own = None if host is None else _site(f"{SCHEMES.get(scheme, scheme)}://{host}")
        return None if own is not None and own == _site(origin) else "Origin"

    def _answers_to(self, host: str) -> bool:
        if ANY_HOST in self._hosts:
            return True
        parts = _split(f"//{host}")
        name = None if parts is None else parts.hostname
        if name is None:
            return False
        return name in self._hosts or (PRIVATE_HOSTS in self._hosts and is_private_name(name))


def _site(url: str) -> tuple[str, str, int] | None:
    """The scheme, name and port of a page: one site may do nothing in the name of another. None if there is none."""
    parts = _split(url)
    if parts is None or parts.hostname is None:
        return None
    port = PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    return parts.scheme, parts.hostname, port


def _split(url: str) -> SplitResult | None:
    """None if it is no URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # read last, so it is checked last
    except ValueError:
        return None
    return parts


OF_SESSIONS = "/v1/"
"""What is below tells of sessions, or changes them. The rest tells of the server itself, or keeps nothing."""


class LeaseGate:
    """Lets a request pass while the server may answer for its sessions, and its answer too: a process can be frozen
    between the two. What has begun is cut off, so that no client takes it for whole.
    """

    def __init__(self, app: ASGIApp, rights: Sequence[Callable[[], None]]) -> None:
        """`rights` raise `Fenced` unless it has all that it needs: the lease of its folder, its name in a cluster."""
        self.app = app
        self._rights = rights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" or not scope["path"].startswith(OF_SESSIONS):
            await self.app(scope, receive, send)
            return
        has_begun = is_over = False

        async def send_held(message: Message) -> None:
            """The same as `send` while the lease is held. Afterwards one last message goes out, and no more."""
            nonlocal has_begun, is_over
            if is_over:
                return
            try:
                self._require()
            except Fenced:
                is_over = True
            if not is_over:
                has_begun = True
                await send(message)
            elif scope["type"] == "websocket":
                await close_socket(send, TRY_AGAIN_LATER, Fenced.code)
            else:
                error = Fenced("the lease of the state folder ran out meanwhile: whether this was done is not known")
                await end_with(error, scope, receive, send, has_begun=has_begun)

        try:
            self._require()
        except Fenced as error:
            await error_response(error, scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send_held)

    def _require(self) -> None:
        for require in self._rights:
            require()
