from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import Request
from starlette.types import Message

from app.web.sse import KEEP_ALIVE, ClientDisconnected, EventStream, sse_event, unless_disconnected

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/",
    "headers": [],
    "asgi": {"version": "3.0", "spec_version": "2.3"},
}


class Connection:
    """One ASGI connection: what was sent, and a client that reads up to `stuck_after` and can leave."""

    def __init__(self, stuck_after: bytes | None = None) -> None:
        self.sent: list[bytes] = []
        self.gone = asyncio.Event()
        self.stuck_after = stuck_after

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.sent and self.sent[-1] == self.stuck_after:
            await asyncio.Event().wait()
        self.sent.append(message.get("body", b""))


class Events:
    """A source of events that remembers whether it was closed."""

    def __init__(self, *events: bytes, then_wait: bool = False) -> None:
        self.events = events
        self.then_wait = then_wait
        self.closed = False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for event in self.events:
                yield event
            if self.then_wait:
                await asyncio.Event().wait()
        finally:
            self.closed = True


@pytest.fixture
def connection() -> Connection:
    return Connection()


def test_an_event_is_framed_as_the_standard_says() -> None:
    assert sse_event("token", b'{"text":"a\\nb"}') == b'event: token\ndata: {"text":"a\\nb"}\n\n'


async def test_events_go_out_in_order_and_the_response_ends(connection: Connection) -> None:
    events = Events(b"one", b"two")
    await EventStream(events())(SCOPE, connection.receive, connection.send)
    assert connection.sent == [b"", b"one", b"two", b""]
    assert events.closed


async def test_a_client_that_leaves_while_nothing_comes_closes_the_source(connection: Connection) -> None:
    events = Events(b"one", then_wait=True)
    running = asyncio.create_task(EventStream(events())(SCOPE, connection.receive, connection.send))
    await asyncio.sleep(0.01)
    connection.gone.set()
    await asyncio.wait_for(running, 5)
    assert events.closed


async def test_a_client_that_leaves_while_it_does_not_read_closes_the_source() -> None:
    connection, events = Connection(stuck_after=b"one"), Events(b"one", b"two", b"three")
    running = asyncio.create_task(EventStream(events())(SCOPE, connection.receive, connection.send))
    await asyncio.sleep(0.01)
    assert not running.done()
    connection.gone.set()
    await asyncio.wait_for(running, 5)
    assert events.closed
    assert connection.sent[-1] == b"one"


async def test_a_quiet_stream_is_kept_alive_by_comments(connection: Connection) -> None:
    stream = EventStream(Events(then_wait=True)(), keep_alive_s=0.01)
    running = asyncio.create_task(stream(SCOPE, connection.receive, connection.send))
    await asyncio.sleep(0.1)
    assert connection.sent.count(KEEP_ALIVE) >= 3
    connection.gone.set()
    await asyncio.wait_for(running, 5)
    assert KEEP_ALIVE.startswith(b":")
    assert KEEP_ALIVE.endswith(b"\n\n")


async def test_no_comment_follows_the_last_part_while_a_slow_client_takes_it() -> None:
    connection = Connection(stuck_after=b"one")
    sending: list[bytes] = []

    async def send(message: Message) -> None:
        sending.append(message.get("body", b""))
        await connection.send(message)

    stream = EventStream(Events(b"one")(), keep_alive_s=0.01)
    running = asyncio.create_task(stream(SCOPE, connection.receive, send))
    await asyncio.sleep(0.1)
    assert sending == [b"", b"one", b""]
    connection.gone.set()
    await asyncio.wait_for(running, 5)


async def test_work_is_cancelled_when_its_client_leaves(connection: Connection) -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    connection.gone.set()
    with pytest.raises(ClientDisconnected):
        await unless_disconnected(Request(SCOPE, connection.receive), work())
    assert ended.is_set()


async def test_work_that_ends_gives_its_result_or_its_error(connection: Connection) -> None:
    async def give() -> int:
        return 7

    async def fail() -> int:
        raise KeyError("missing")

    request = Request(SCOPE, connection.receive)
    assert await unless_disconnected(request, give()) == 7
    with pytest.raises(KeyError, match="missing"):
        await unless_disconnected(request, fail())
