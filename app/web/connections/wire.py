"""HTTP/1.1 by h11, with bounds for what h11 would take from a client without end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import h11

from app.web.connections.pieces import SmallPieces

REST_BYTES = 1 << 20
"""A body of at most so many bytes is read to its end after its answer: a new connection would cost more."""
SHOWN_CHARACTERS = 200
"""Of a complaint, which may have the client's own bytes in it."""
CLOSE = (b"connection", b"close")


class HttpWire(h11.Connection):
    """The server's side of one connection. Says `Connection: close` where it answers before a large body has come.

    The head of an answer is held back for what follows: each write to a socket wakes the client.
    """

    def __init__(self, on_held: Callable[[], None]) -> None:
        """`on_held` is called whenever a head is held: the caller must take it soon, as nothing may follow for long."""
        super().__init__(h11.SERVER)
        self.complaint = ""
        """What was wrong with what the client sent, once `next_event` has raised."""
        self._pieces = SmallPieces()
        self._rest_is_small = True
        self._is_ambiguous = False
        """Whether the request has told the length of its body in two ways: what comes behind it may be of it."""
        self._on_held = on_held
        self._held = b""

    def next_event(self) -> Any:
        """The next part of a request. Raises `h11.RemoteProtocolError` for what is not HTTP, and for a body in too many
        small chunks.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._rest_is_small = _is_small(event)
                names = {name for name, _ in event.headers}
                self._is_ambiguous = {b"content-length", b"transfer-encoding"} <= names
            elif isinstance(event, h11.Data) and event.chunk_start:
                self._count(len(event.data))
        except h11.RemoteProtocolError as error:
            self.complaint = str(error)[:SHOWN_CHARACTERS]
            raise
        return event

    def send(self, event: Any) -> Any:
        """The bytes of a part of an answer, behind a head that is held; of a head itself none."""
        if isinstance(event, h11.Response) and (self._is_ambiguous or self._leaves_body()):
            headers = [*event.headers.raw_items(), CLOSE]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        data = super().send(event)
        if isinstance(event, h11.Response):
            self._held = data or b""
            self._on_held()
            return b""
        return self.take_held() + (data or b"")

    def take_held(self) -> bytes:
        """The head that is held back. It is not held afterwards."""
        held, self._held = self._held, b""
        return held

    def _count(self, size: int) -> None:
        if not self._pieces.take(size, time.monotonic()):
            raise h11.RemoteProtocolError("the body comes in too many small chunks")

    def _leaves_body(self) -> bool:
        """Whether an answer that begins now leaves a body behind that is not worth its reading."""
        if self.their_state is not h11.SEND_BODY:
            return False
        return not self._rest_is_small or self.they_are_waiting_for_100_continue


def _is_small(request: h11.Request) -> bool:
    """Whether the request says that its body is small, or has none."""
    headers = dict(request.headers)
    return b"transfer-encoding" not in headers and int(headers.get(b"content-length", b"0")) <= REST_BYTES
