"""Server-sent events, and what to do about clients that go away."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"

T = TypeVar("T")


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
            is_quiet, beating = True, anyio.CancelScope()

            async def beat() -> None:
                nonlocal is_quiet
                with beating:
                    while True:
                        await asyncio.sleep(self.keep_alive_s)
                        if is_quiet:
                            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                        is_quiet = True

            async def cancel_on_disconnect() -> None:
                await disconnected(receive)
                tasks.cancel_scope.cancel()

            tasks.start_soon(beat)
            tasks.start_soon(cancel_on_disconnect)
            async for event in self.events:
                is_quiet = False
                await send({"type": "http.response.body", "body": event, "more_body": True})
            beating.cancel()  # nothing may be sent after the last part, which can wait for a slow client
            await send({"type": "http.response.body", "body": b""})
            tasks.cancel_scope.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone. Call it once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first. Raises `ClientDisconnect` then.

    Call it once the body has been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})
        if not working.cancelled():
            working.exception()  # else asyncio logs an error of the cleanup as never retrieved
