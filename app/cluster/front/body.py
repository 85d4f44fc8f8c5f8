"""The body of a client's request: sent on as it comes, and kept for as long as the request may have to be repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from app.domain.errors import DjinnError, TooLarge

KEPT_BYTES = 1 << 20
"""Of a body that is sent on. One that is longer cannot be sent to a second replica."""


class Gone(Exception):
    """The client has gone, or its body was refused: no client waits for the replica's answer."""


class Body:
    """Used by one request."""

    def __init__(self, receive: Receive) -> None:
        self.refusal: DjinnError | None = None
        """Why the body was refused, if it was."""
        self.is_gone = False
        """Whether the client has gone."""
        self._receive = receive
        self._kept: list[bytes] | None = []
        self._kept_bytes = 0
        self._is_whole = False
        self._most = KEPT_BYTES

    @property
    def can_repeat(self) -> bool:
        """Whether all that has come is still here."""
        return self._kept is not None

    async def whole(self) -> bytes:
        """All of it, which stays here. Raises `Gone`."""
        self._most = 1 << 62  # its limits are those of the server
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        """All of it, from the beginning. Raises `Gone`."""
        assert self._kept is not None
        for part in list(self._kept):
            yield part
        while not self._is_whole:
            part = await self._next()
            if part:
                yield part

    async def watch(self) -> None:
        """Wait until the client goes away. Raises `Gone`."""
        while True:
            await self._next()

    async def next_message(self) -> Message:
        """For those who only want to know whether the client is still there."""
        return await self._receive()

    async def _next(self) -> bytes:
        try:
            message = await self._receive()
        except DjinnError as error:
            self.refusal = error
            raise Gone from error
        except HTTPException as error:
            self.refusal = TooLarge(error.detail)
            raise Gone from error
        if message["type"] == "http.disconnect":
            self.is_gone = True
            raise Gone
        part: bytes = message.get("body", b"")
        self._is_whole = not message.get("more_body", False)
        self._keep(part)
        return part

    def _keep(self, part: bytes) -> None:
        self._kept_bytes += len(part)
        if self._kept_bytes > self._most:
            self._kept = None
        if self._kept is not None and part:
            self._kept.append(part)
