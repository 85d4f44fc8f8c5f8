"""The first message of a WebSocket, found in what the client sends without taking that away."""

from __future__ import annotations

from dataclasses import dataclass

from websockets.frames import CTRL_OPCODES, CloseCode, Opcode
from websockets.utils import apply_mask

LENGTHS = {126: 2, 127: 8}
"""Bytes that the length of a frame has behind its second byte."""
MASK_BYTES = 4


class BadFrame(Exception):
    """What came is nothing that a client may send. `code` is what the connection is closed with."""

    def __init__(self, code: CloseCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Frame:
    opcode: int
    is_last: bool
    data: slice
    mask: bytes


class FirstMessage:
    """Keeps frames until a whole message is there, but for those that belong to no message."""

    def __init__(self, max_bytes: int) -> None:
        self.content: bytes | None = None
        """The message, once it is there."""
        self._frames = bytearray()
        """The message's frames, as they came."""
        self._rest = bytearray()
        """What came behind them."""
        self._message = bytearray()
        self._max_bytes = max_bytes

    @property
    def kept(self) -> bytes:
        """What is still to be sent on."""
        return bytes(self._frames + self._rest)

    @property
    def kept_bytes(self) -> int:
        """How much that is."""
        return len(self._frames) + len(self._rest)

    def take(self, data: bytes) -> bytes:
        """Take what came. Returns frames that may pass at once: pings, pongs, closes. Raises `BadFrame`."""
        self._rest += data
        passing = bytearray()
        while self.content is None and (frame := self._frame()) is not None:
            whole = bytes(self._rest[: frame.data.stop])
            del self._rest[: frame.data.stop]
            if Opcode(frame.opcode) in CTRL_OPCODES:
                passing += whole
                continue
            self._frames += whole
            self._message += apply_mask(whole[frame.data], frame.mask)
            if frame.is_last:
                self.content = bytes(self._message)
        return bytes(passing)

    def _frame(self) -> _Frame | None:
        """The next frame, and where in `_rest` its data is; None if it has not come whole."""
        head = self._rest[:2]
        if len(head) < 2:
            return None
        opcode, length = head[0] & 0xF, head[1] & 0x7F
        if opcode not in set(Opcode) or not head[1] & 0x80:
            raise BadFrame(CloseCode.PROTOCOL_ERROR, "no frame of a client")
        start = 2
        if length in LENGTHS:
            digits = self._rest[start : start + LENGTHS[length]]
            if len(digits) < LENGTHS[length]:
                return None
            start, length = start + LENGTHS[length], int.from_bytes(digits, "big")
        if len(self._frames) + length > self._max_bytes:
            raise BadFrame(CloseCode.MESSAGE_TOO_BIG, f"a message must be at most {self._max_bytes} bytes")
        mask, start = bytes(self._rest[start : start + MASK_BYTES]), start + MASK_BYTES
        if len(self._rest) < start + length:
            return None
        return _Frame(opcode, bool(head[0] & 0x80), slice(start, start + length), mask)


def close_frame(code: CloseCode, reason: str) -> bytes:
    """A server's last frame."""
    content = code.to_bytes(2, "big") + reason.encode()[:120]
    return bytes([0x80 | Opcode.CLOSE, len(content)]) + content
