"""One connection to a replica: a request, its answer, and the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

import h11

from app.cluster.front.heads import Headers
from app.cluster.front.upstream.chunks import BadChunks, Chunks

READ_BYTES = 64 << 10
"""Most that one read brings, as with clients."""
WAITING_BYTES = 64 << 10
"""Bytes of an answer that the client has not taken yet: with more, the replica waits."""


class Lost(Exception):
    """The connection ended before the answer did. `is_begun`: something of the answer had come."""

    def __init__(self, message: str, *, is_begun: bool) -> None:
        super().__init__(message)
        self.is_begun = is_begun


class Taker(Protocol):
    """Whom the chunks of an answer pass to."""

    def pass_on(self, data: bytes) -> bool:
        """Send it. False: no more until `Upstream.go_on` is called."""
        ...


class Upstream(asyncio.Protocol):
    """The front door's side of a connection to a replica. Requests and heads of answers are h11's; chunks of an answer
    pass as they came.
    """

    def __init__(self) -> None:
        self.is_reused = False
        """Whether it has carried a request before."""
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._wire = h11.Connection(h11.CLIENT)
        self._events: deque[h11.Event] = deque()
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._unsent = b""
        self._lost: str | None = None
        self._is_begun = False
        self._is_at_head = False
        """Whether what follows the head stays as it came, until it is known who takes it."""
        self._chunks: Chunks | None = None
        self._taker: Taker | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_paused = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's sockets have it
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer."""
        self._is_begun = True
        if self._taker is not None:
            self._pass(data)
            return
        self._wire.receive_data(data)
        self._take_events()

    def eof_received(self) -> None:
        """The replica sends no more: where the end of the answer is the end of the connection, it is that."""
        self._wire.receive_data(b"")
        if self._taker is None:
            self._take_events()

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended."""
        self._fail("the connection to the replica ended" if error is None else f"{error}")
        self._writable.set()

    def pause_writing(self) -> None:
        """The replica takes no more for now."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The replica takes more."""
        self._writable.set()

    # What the front door calls.

    def send_head(self, method: bytes, target: bytes, headers: Headers) -> None:
        """Begin a request: its head goes with what comes next."""
        self._unsent = self._wire.send(h11.Request(method=method, target=target, headers=headers)) or b""

    async def send_body(self, data: bytes) -> None:
        """The next part of its body; returns when the replica takes more. Raises `Lost`."""
        await self._send(h11.Data(data=data))

    async def end_request(self) -> None:
        """The end of the request. Raises `Lost`, and `h11.LocalProtocolError` for a body of another length."""
        await self._send(h11.EndOfMessage())

    async def answer(self) -> h11.Response:
        """The head of the answer. Raises `Lost`."""
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                return event

    async def body(self) -> AsyncIterator[bytes]:
        """What follows, part by part, to the end of the answer. Raises `Lost`."""
        self._is_at_head = False
        self._take_events()
        while True:
            event = await self._next_event()
            if isinstance(event, h11.EndOfMessage):
                return
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def pass_chunks(self, taker: Taker) -> None:
        """Pass the chunks of the answer to `taker` as they come, but for the last, empty one. Raises `Lost`."""
        self._chunks, self._taker = Chunks(), taker
        self._pass(self._wire.trailing_data[0])  # it came with the head
        while not self._chunks.is_over:
            if self._lost is not None:
                raise Lost(self._lost, is_begun=True)
            await self._wait()

    def go_on(self) -> None:
        """Take more of the answer."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent on it."""
        return self._lost is None and self._transport is not None and not self._transport.is_closing()

    def rest(self, now: float) -> bool:
        """Get ready for the next request. False if there cannot be one: it is closed then."""
        is_clean = self._chunks.is_clean if self._chunks is not None else self._wire.their_state is h11.DONE
        if not (self.is_open and is_clean and self._wire.our_state is h11.DONE):
            self.close()
            return False
        self._wire, self._events, self._chunks, self._taker = h11.Connection(h11.CLIENT), deque(), None, None
        self._waiting_bytes, self._is_begun, self._is_at_head = 0, False, False
        self.is_reused, self.idle_since = True, now
        self.go_on()
        return True

    def close(self) -> None:
        """End the connection at once: the replica sees that no client waits for the answer."""
        if self._transport is not None:
            self._transport.abort()

    async def _send(self, event: h11.Event) -> None:
        data, self._unsent = self._unsent + (self._wire.send(event) or b""), b""
        if not self.is_open:
            raise Lost(self._lost or "the connection to the replica ended", is_begun=self._is_begun)
        assert self._transport is not None
        if data:
            self._transport.write(data)
        if not self._writable.is_set():
            await self._writable.wait()

    async def _next_event(self) -> h11.Event:
        while not self._events:
            if self._lost is not None:
                raise Lost(self._lost, is_begun=self._is_begun)
            await self._wait()
        event = self._events.popleft()
        if isinstance(event, h11.Data):
            self._waiting_bytes -= len(event.data)
            if self._waiting_bytes <= WAITING_BYTES:
                self.go_on()
        return event

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _take_events(self) -> None:
        try:
            while not self._is_at_head:
                event = self._wire.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    break
                assert isinstance(event, h11.Event)
                self._events.append(event)
                self._is_at_head = isinstance(event, h11.Response)
                if isinstance(event, h11.Data):
                    self._waiting_bytes += len(event.data)
        except h11.RemoteProtocolError as error:
            has_ended = self._wire.trailing_data[1]
            self._fail("it ended the connection" if has_ended else f"its answer cannot be read: {error}")
        if self._waiting_bytes > WAITING_BYTES:
            self._pause()
        self._news.set()

    def _pass(self, data: bytes) -> None:
        assert self._chunks is not None
        try:
            passing = self._chunks.take(data)
        except BadChunks as error:
            self._fail(f"its answer cannot be read: {error}")
            return
        if passing:
            self._give(passing)
        if self._chunks.is_over:
            self._news.set()

    def _give(self, data: bytes) -> None:
        assert self._taker is not None
        if not self._taker.pass_on(data):
            self._pause()

    def _pause(self) -> None:
        if not self._is_paused and self.is_open:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()

    def _fail(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._news.set()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
