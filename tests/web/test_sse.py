"""A quiet stream of events is kept open until its client leaves."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from app.web.sse import KEEP_ALIVE, EventStream
from tests.waiting import until

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "asgi": {"spec_version": "2.3"}}


class Connection:
    """One ASGI connection: what was sent, and a client that reads up to `stuck_after` and can leave."""

    def __init__(self, stuck_after: bytes | None = None) -> None:
        self.sending: list[bytes] = []
        self.gone = asyncio.Event()
        self.stuck_after = stuck_after

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sending.append(message.get("body", b""))
        if self.sending[-2:-1] == [self.stuck_after]:
            await asyncio.Event().wait()


async def events(closed: asyncio.Event, *parts: bytes, then_wait: bool = False) -> AsyncGenerator[bytes, None]:
    try:
        for part in parts:
            yield part
        if then_wait:
            await asyncio.Event().wait()
    finally:
        closed.set()


@pytest.mark.parametrize(
    ("stuck_after", "parts", "sending"),
    [
        (None, [b"one"], [b"", b"one", KEEP_ALIVE, KEEP_ALIVE]),  # nothing comes
        (b"one", [b"one", b"two", b"three"], [b"", b"one", b"two"]),  # the client does not read
        (b"one", [b"one"], [b"", b"one", b""]),  # nor the end, which no comment follows
    ],
)
async def test_a_quiet_stream_is_kept_alive_by_comments_until_its_client_leaves(
    stuck_after: bytes | None, parts: list[bytes], sending: list[bytes]
) -> None:
    connection, closed = Connection(stuck_after), asyncio.Event()
    stream = EventStream(events(closed, *parts, then_wait=stuck_after is None), keep_alive_s=0.02)
    running = asyncio.create_task(stream(SCOPE, connection.receive, connection.send))
    await until(lambda: connection.sending[: len(sending)] == sending)
    await asyncio.sleep(0.05)
    assert not running.done()
    assert connection.sending[len(sending) :].count(KEEP_ALIVE) == len(connection.sending) - len(sending)
    connection.gone.set()
    await asyncio.wait_for(running, 30)
    assert closed.is_set()
    assert (KEEP_ALIVE[:1], KEEP_ALIVE[-2:]) == (b":", b"\n\n")
