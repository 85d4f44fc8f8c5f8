"""WebSockets by uvicorn and websockets, with bounds for what one read may bring."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.protocol import State

from app.domain.errors import BodiesFull
from app.web.body_limit import Share
from app.web.connections import SmallPieces

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
        """Of the message that the application has, and of the whole frames of the one that comes."""
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
