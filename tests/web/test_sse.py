from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import Request
from starlette.types import Message

from app.web.sse import KEEP_ALIVE, ClientDisconnected, EventStream, sse_event, unless_disconnected

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "asgi": {"spec_version": "2.3"}}


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


def test_an_event_is_framed_as_the_standard_says() -> None:
    assert sse_event("token", b'{"text":"a\\nb"}') == b'event: token\ndata: {"text":"a\\nb"}\n\n'


async def test_events_go_out_in_order_and_the_response_ends() -> None:
    connection, events = Connection(), Events(b"one", b"two")
    await EventStream(events())(SCOPE, connection.receive, connection.send)
    assert connection.sent == [b"", b"one", b"two", b""]
    assert events.closed


@pytest.mark.parametrize(
    ("connection", "events"),
    [
        (Connection(), Events(b"one", then_wait=True)),  # nothing comes
        (Connection(stuck_after=b"one"), Events(b"one", b"two", b"three")),  # it does not read
    ],
)
async def test_a_client_that_leaves_closes_the_source(connection: Connection, events: Events) -> None:
    running = asyncio.create_task(EventStream(events())(SCOPE, connection.receive, connection.send))
    await asyncio.sleep(0.01)
    assert not running.done()
    connection.gone.set()
    await asyncio.wait_for(running, 5)
    assert events.closed
    assert connection.sent[-1] == b"one"


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_quiet_stream_is_kept_alive_by_comments_but_not_behind_its_last_part(is_slow: bool) -> None:
    connection, sending = Connection(stuck_after=b"one"), list[bytes]()

    async def send(message: Message) -> None:
        sending.append(message.get("body", b""))
        await connection.send(message)

    stream = EventStream(Events(b"one")() if is_slow else Events(then_wait=True)(), keep_alive_s=0.01)
    running = asyncio.create_task(stream(SCOPE, connection.receive, send))
    await asyncio.sleep(0.1)
    if is_slow:
        assert sending == [b"", b"one", b""]
    else:
        assert sending.count(KEEP_ALIVE) >= 3
    connection.gone.set()
    await asyncio.wait_for(running, 5)
    assert KEEP_ALIVE.startswith(b":")
    assert KEEP_ALIVE.endswith(b"\n\n")


async def test_work_is_cancelled_when_its_client_leaves() -> None:
    connection, ended = Connection(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    connection.gone.set()
    with pytest.raises(ClientDisconnected):
        await unless_disconnected(Request(SCOPE, connection.receive), work())
    assert ended.is_set()


async def test_work_that_ends_gives_its_result_or_its_error() -> None:
    async def work(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 7

    request = Request(SCOPE, Connection().receive)
    assert await unless_disconnected(request, work(None)) == 7
    with pytest.raises(KeyError, match="missing"):
        await unless_disconnected(request, work(KeyError("missing")))
