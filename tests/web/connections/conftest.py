"""A real server with limits of one's own, and plain sockets to it."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi.responses import Response, StreamingResponse
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.main import load_app
from app.web import connections
from app.web.connections import Caps
from app.web.server import Server, bind
from tests.serving import START_TIMEOUT_S, tiny_settings
from tests.waiting import wait_until

PATIENCE_S = 30.0
"""How long a test waits for what must come."""
HEADER = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HEADER + b"\r\n"
QUIET_S = 1.3
"""How long the routes of the tests say nothing: longer than any deadline that the tests set."""
LIMIT = 300_000
"""Bytes that a body or a message may have on the shared server."""
BIG = bytes(range(256)) * (16 << 10)
"""4 MiB."""


async def _quiet_answer(request: Request) -> Response:
    request.app.state.quiet.release()
    await asyncio.sleep(QUIET_S)
    return Response(b"late")


async def _quiet_stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        if not request.query_params:
            yield b"begun "
        await asyncio.sleep(QUIET_S)
        yield b"late"

    return StreamingResponse(parts())


class _Broken(Response):
    """Sends its head, and then fails or returns."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self.body == b"fails":
            raise RuntimeError("on purpose")


async def _break_off(request: Request) -> Response:
    return _Broken(request.query_params["how"])


async def _big(request: object) -> Response:
    return Response(BIG)


ROUTES: dict[str, Any] = {
    "/quiet": _quiet_answer,
    "/quiet-stream": _quiet_stream,
    "/break-off": _break_off,
    "/big": _big,
}


@dataclass
class Edge:
    url: str
    quiet: threading.Semaphore
    """Released by each request for `/quiet` that the server has."""
    _sockets: ExitStack
    address: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        parsed = httpx.URL(self.url)
        self.address = parsed.host, parsed.port or 0

    def connect(self, sent: bytes = b"", *, small_window: bool = False) -> socket.socket:
        """A connection on which `sent` has been sent; it is closed with the test."""
        connection = self._sockets.enter_context(socket.socket())
        connection.settimeout(PATIENCE_S)
        if small_window:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(self.address)
        connection.sendall(sent)
        return connection

    def metric(self, name: str, **labels: str) -> float:
        """One series of `/metrics`, which itself takes a connection."""
        with httpx.Client(timeout=PATIENCE_S) as http:
            text = http.get(f"{self.url}/metrics").raise_for_status().text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise KeyError(name)


Serve = Callable[..., Edge]


@pytest.fixture(scope="package", autouse=True)
def brief_lingering() -> Iterator[None]:
    """Some tests wait until a connection is closed that nobody reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "LINGER_S", 0.3)
        yield


@pytest.fixture
def edge() -> Iterator[Serve]:
    """Starts a server with settings of one's own; it ends with the test."""
    with ExitStack() as ends:
        yield lambda **settings: ends.enter_context(serving(**settings))


@pytest.fixture(scope="package")
def server() -> Iterator[Edge]:
    with serving(max_request_bytes=LIMIT) as server:
        yield server


@contextmanager
def serving(**changed: Any) -> Iterator[Edge]:
    """A server with these settings, and routes that keep a client waiting."""
    settings = tiny_settings(**changed)
    app = load_app(settings)
    app.state.quiet = threading.Semaphore(0)
    for path, route in ROUTES.items():
        app.router.routes.append(Route(path, route))
    server = Server(app, Caps.of(settings, descriptors=4096))
    with bind("127.0.0.1", 0) as bound, ExitStack() as sockets:
        host, port = bound.getsockname()
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started
            yield Edge(f"http://{host}:{port}", app.state.quiet, sockets)
        finally:
            sockets.close()
            server.should_exit = True
            thread.join(START_TIMEOUT_S)
    assert not thread.is_alive()


def read_to_end(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection. Raises `TimeoutError` if it does not."""
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def read_answer(connection: socket.socket) -> bytes:
    """One whole answer whose length is declared."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _some(connection)
    header, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in header.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += _some(connection)
    return header + b"\r\n\r\n" + body


def _some(connection: socket.socket) -> bytes:
    part = connection.recv(1 << 16)
    assert part, "the server has closed the connection"
    return part


def is_refused(connection: socket.socket, sent: bytes) -> bool:
    """Whether the server has closed the connection on which this is sent."""
    try:
        connection.sendall(sent)
    except ConnectionError:
        return True
    return False
