"""HTTP/1.1 by uvicorn and h11, with an account of what the client still owes, and WebSockets by uvicorn and websockets,
with bounds for what one read may bring. No other file of the server reaches into uvicorn's protocols.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.protocol import State

from app.domain.errors import BodiesFull, DjinnError, MalformedRequest, RequestTimeout
from app.machine.budget import Share
from app.settings import Settings
from app.telemetry.metrics import ConnectionMetrics, Ended
from app.web.connections import Connection, ConnectionTable, SmallPieces
from app.web.errors import error_body
from app.web.middleware import new_request_id

REST_BYTES = 1 << 20
"""A body of at most so many bytes is read to its end after its answer: a new connection would cost more."""
HEAD_BYTES = 16 << 10
"""Most that a request's head may have."""
COMPLAINTS = {
    "receive buffer": f"its head, or the line before a chunk of its body, has more than {HEAD_BYTES} bytes",
    "illegal request": "its first line is not a method, a target and HTTP/1.1",
    "illegal header": "a line of its head is not a name, a colon and a value",
    "illegal chunk": "a chunk of its body does not begin with a length in hexadecimal digits",
    "small chunks": "its body comes in too many small chunks",
    "malformed chunk": "a chunk of its body is longer than it says",
    "conflicting content-length": "it has several headers Content-Length",
    "bad content-length": "its Content-Length is no number of bytes",
    "multiple transfer-encoding": "it has several headers Transfer-Encoding",
    "only transfer-encoding:": "its Transfer-Encoding is not chunked",
    "missing mandatory": "it has no header Host",
    "found multiple": "it has several headers Host",
}
"""What was wrong, by the first two words of the error, which may go on with the client's own bytes."""
CLOSE = (b"connection", b"close")
EMPTY_LINES = re.compile(rb"(?:\r\n)+")
"""Skipped in front of a request (RFC 9112, 2.2): old clients end a body with one. h11 takes one for a request."""


class HttpWire(h11.Connection):
    """The server's side of one connection. Says `Connection: close` where it answers before a large body has come.

    The head of an answer is held back for what follows: each write to a socket wakes the client.
    """

    def __init__(self, on_held: Callable[[], object]) -> None:
        """`on_held` is called whenever a head is held: the caller must take it soon, as nothing may follow for long."""
        super().__init__(h11.SERVER, HEAD_BYTES)
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
        if self.their_state is h11.IDLE:
            if empty := EMPTY_LINES.match(self.trailing_data[0]):
                self._receive_buffer.maybe_extract_at_most(empty.end())
            if self.trailing_data[0] == b"\r":
                return h11.NEED_DATA  # half of another
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                headers = dict(event.headers)
                is_chunked, length = b"transfer-encoding" in headers, headers.get(b"content-length")
                self._rest_is_small = not is_chunked and int(length or b"0") <= REST_BYTES
                self._is_ambiguous = is_chunked and length is not None
            elif (
                isinstance(event, h11.Data)
                and event.chunk_start
                and not self._pieces.take(len(event.data), time.monotonic())
            ):
                raise h11.RemoteProtocolError("small chunks")
        except h11.RemoteProtocolError as error:
            words = str(error).lower().split()
            self.complaint = COMPLAINTS.get(" ".join(words[:2]), "it is not HTTP/1.1 as it should be")
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

    def _leaves_body(self) -> bool:
        """Whether an answer that begins now leaves a body behind that is not worth its reading."""
        if self.their_state is not h11.SEND_BODY:
            return False
        return not self._rest_is_small or self.they_are_waiting_for_100_continue


def last_answer(error: DjinnError, *headers: str) -> bytes:
    """The whole answer, with `headers` after those that each answer has."""
    body = error_body(error)
    status = HTTPStatus(error.status)
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {new_request_id()}",
        "connection: close",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


READ_BYTES = 64 << 10
"""Most that one read brings: all of it is taken before anybody else has a turn. asyncio's own is four times as much."""


class HttpProtocol(H11Protocol):
    """One connection that speaks HTTP. Says to the table whether a request is under way."""

    def __init__(self, connection: Connection, table: ConnectionTable, **uvicorn: Any) -> None:
        """`uvicorn` is what uvicorn's own protocol takes."""
        super().__init__(**uvicorn)
        self.app_state = {**self.app_state, "hand_over": self.hand_over, "cut": self.cut}  # each request has a copy
        self.conn: HttpWire = HttpWire(lambda: self.loop.call_soon(self._send_held))
        self._served, self.app = self.app, self._serve
        self._connection = connection
        self._table = table
        self._owed: Ended | None = None
        """What the client is to send next; None while the server is to answer, and between requests."""
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Wait for the first header."""
        super().connection_made(transport)
        # An answer is sent when the client has read the one before: what waits here can only shrink.
        transport.set_write_buffer_limits(high=0)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's sockets have it
        self._connection.transport = transport
        self._follow()

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        super().data_received(data)
        self._follow()
        if self._owed is Ended.BODY and not self.cycle.response_complete:
            self._since = self.loop.time()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for what is left of a body that the answer did not wait for."""
        super().on_response_complete()
        self._follow()
        self._since = self.loop.time()

    def hand_over(self) -> socket.socket:
        """The socket, in place of an answer: its new owner speaks with the client from now on, and closes it.

        Raises `OSError` if the client has gone, or has sent more than its request.
        """
        if self.transport.is_closing() or self.conn.trailing_data[0]:
            raise ConnectionError("the client has gone, or has not waited for the answer")
        own = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        self.cycle.disconnected = True
        self._connection.abort()  # closes this descriptor alone; the client must not linger and read foreign bytes
        return own

    def cut(self) -> None:
        """End the connection in the middle of an answer: so the client knows that the rest is missing."""
        self._send_held()
        self.cycle.disconnected = True
        self.transport.close()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Have the application answer. A head whose body it has left out goes out too, before uvicorn closes."""
        try:
            await self._served(scope, receive, send)
        finally:
            self._send_held()

    def _send_held(self) -> None:
        if (held := self.conn.take_held()) and not self.transport.is_closing():
            self.transport.write(held)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: to ask for another protocol is no error, and the route may know it."""

    def resume_writing(self) -> None:
        """Go on: the client has read everything."""
        super().resume_writing()
        self._connection.note_sent()
        self._follow()

    def overdue(self, now: float, settings: Settings) -> Ended | None:
        """What the client should have sent by now: a whole header, the first one counted from when the connection was
        made; the next part of a body; or all that is left of it once the answer is complete.
        """
        if self._owed is None or self.transport.is_closing():
            return None
        if self._owed is Ended.BODY and (self.flow.read_paused or self.cycle.waiting_for_100_continue):
            self._since = now  # the server keeps the client waiting
        limit_s = settings.header_timeout_s if self._owed is Ended.HEADER else settings.body_timeout_s
        return self._owed if now - self._since > limit_s else None

    def time_out(self) -> None:
        """End the connection of a client that owes something, with an answer if it has begun a request."""
        begun = self._owed is Ended.BODY or bool(self.conn.trailing_data[0])
        self._end(RequestTimeout(f"the rest of the request's {self._owed} did not come in time") if begun else None)

    def send_400_response(self, msg: str) -> None:
        """End the connection of a client that does not speak HTTP, in the server's own words."""
        self._end(MalformedRequest(f"the request cannot be read: {self.conn.complaint}"))

    def _end(self, error: DjinnError | None) -> None:
        """Answer with `error` unless an answer has begun, and close."""
        self._send_held()
        if error is not None and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(last_answer(error))
        if self.cycle is not None:
            self.cycle.disconnected = True  # an answer that comes now would follow the one above
        self.transport.close()

    def _follow(self) -> None:
        """Note what the client owes after anything that can change it."""
        match self.conn.their_state:
            case _ if self.transport.get_protocol() is not self:
                owed = None  # a WebSocket by now
            case h11.IDLE:
                # Between two requests uvicorn has its own timer. A byte of the next header ends it.
                owed = Ended.HEADER if self.timeout_keep_alive_task is None else None
            case h11.SEND_BODY:
                owed = Ended.BODY
            case _:
                owed = None
        if owed is not self._owed:
            self._owed, self._since = owed, self.loop.time()
        # Who still sends a body after its answer has no request under way either.
        is_answered = owed is Ended.BODY and self.cycle.response_complete
        is_waiting = (self.conn.their_state is h11.IDLE or is_answered) and not self.flow.write_paused
        self._table.set_waiting(self._connection, self.loop.time() if is_waiting else None)


SLICE_BYTES = 4096
"""What is taken at a time: the frames in it are taken at once."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection that speaks WebSocket. What comes behind a message waits until the application has that."""

    def __init__(self, **uvicorn: Any) -> None:
        """`uvicorn` is what uvicorn's own protocol takes."""
        super().__init__(**uvicorn)
        self._pieces = SmallPieces()
        self._kept = b""
        """Of what one read has brought, the part that waits."""
        self._message_bytes = 0
        """Of the message that the application has, and of the whole frames of the next one."""
        self._had_bytes = 0
        """Of the message that the application has."""

    def data_received(self, data: bytes) -> None:
        """Take what the client sent. One that does not wait for the answer to its handshake gets none."""
        if self.handshake_initiated and not self.handshake_complete:
            self.transport.close()
            return
        self._kept += data
        self._take()

    async def receive(self) -> Any:
        """What the client sent next. The application needs the message before no more."""
        self._message_bytes -= self._had_bytes
        self._had_bytes = 0
        if (share := self._share) is not None:
            share.shrink(self._held_bytes)
        message = await super().receive()
        self._had_bytes = self._message_bytes
        self._take()
        return message

    async def send(self, message: Any) -> None:
        """Send a message, or close."""
        await super().send(message)
        self._take()

    def shutdown(self) -> None:
        """Close, as the server ends. A client that closes has said all there is to say, and is not told once more."""
        if self.handshake_complete and self.conn.state is not State.OPEN:
            self.stop_keepalive()
            self.transport.close()
        else:
            super().shutdown()

    def handle_events(self) -> None:
        """Take the frames that have come, or close if there are too many small ones."""
        now = self.loop.time()
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        if all(self._pieces.take(len(frame.data), now) for frame in frames):
            self._message_bytes += sum(len(frame.data) for frame in frames if frame.opcode in DATA_OPCODES)
            super().handle_events()
        else:
            self._refuse(CloseCode.POLICY_VIOLATION, "too many small frames")

    @property
    def _share(self) -> Share | None:
        """What the messages have of the budget of bodies; None before the handshake, or if that is refused."""
        scope: Any = getattr(self, "scope", None)
        share: Share | None = scope and scope["state"].get("share")
        return share

    @property
    def _held_bytes(self) -> int:
        return self._message_bytes + len(self.conn.reader.buffer)

    def _refuse(self, code: CloseCode, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def _take(self) -> None:
        """Go on with what waits, up to the next message."""
        while self._kept and not self.read_paused and not self.transport.is_closing():
            taken, self._kept = self._kept[:SLICE_BYTES], self._kept[SLICE_BYTES:]
            super().data_received(taken)
            if (share := self._share) is not None and not self.close_sent:
                try:
                    share.require(self._held_bytes)
                except BodiesFull:
                    self._refuse(CloseCode.TRY_AGAIN_LATER, "messages under way take as much memory as they may")


LOOKS = 4
"""Looks at every connection within the shortest deadline. A timer for each would be set anew with every packet."""


async def watch(table: ConnectionTable, settings: Settings, metrics: ConnectionMetrics) -> None:
    """End what is overdue, for ever."""
    interval_s = min(settings.header_timeout_s, settings.body_timeout_s, settings.write_timeout_s) / LOOKS
    while True:
        await asyncio.sleep(interval_s)
        now = asyncio.get_running_loop().time()
        for connection in table:
            if connection.stalled_s(now) > settings.write_timeout_s:
                metrics.ended.labels(Ended.UNREAD).inc()
                connection.reset()
                continue
            protocol = None if connection.transport is None else connection.transport.get_protocol()
            if isinstance(protocol, HttpProtocol) and (cause := protocol.overdue(now, settings)) is not None:
                metrics.ended.labels(cause).inc()
                protocol.time_out()
