"""Server-sent events, and what to do about clients that go away."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has gone: no client will read the answer."""


def sse_event(name: str, data: bytes, event_id: str | None = None) -> bytes:
    """One event. `data` is JSON, which has no raw newlines. A client that reads it comes back with the last id."""
    head = b"" if event_id is None else b"id: %b\n" % event_id.encode()
    return b"%bevent: %b\ndata: %b\n\n" % (head, name.encode(), data)


class EventStream(Response):
    """Sends the byte strings of `events`, each one or more whole server-sent events, as they come.

    The generator is closed, its `finally` blocks run, before the response is over: when it ends, when the client
    disconnects, and also when it was waiting for a slow client at that moment, which a plain StreamingResponse leaves
    to the garbage collector. A comment is sent whenever nothing else was for `keep_alive_s`, so that proxies keep the
    connection of a turn that waits in the queue. Unlike a timeout around each event, that costs nothing per token.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self.events = events
        self.keep_alive_s = keep_alive_s
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self.events), anyio.create_task_group() as tasks:
            pulse = _Pulse(send, self.keep_alive_s)
            tasks.start_soon(pulse.run)
            tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
            async for event in self.events:
                await pulse.send({"type": "http.response.body", "body": event, "more_body": True})
            pulse.stop()  # nothing may be sent after the last part, which can wait for a slow client
            await pulse.send({"type": "http.response.body", "body": b""})
            tasks.cancel_scope.cancel()


class _Pulse:
    """Sends a comment after every interval in which nothing was sent."""

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._quiet = True
        self._scope = anyio.CancelScope()

    def stop(self) -> None:
        self._scope.cancel()

    async def send(self, message: Message) -> None:
        self._quiet = False
        await self._send(message)

    async def run(self) -> None:
        with self._scope:
            while True:
                await asyncio.sleep(self._interval_s)
                if self._quiet:
                    await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._quiet = True


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    await disconnected(receive)
    scope.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone. Call it once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first. Raises `ClientDisconnected` then.

    Call it once the body has been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})
