"""Answers nothing of sessions while the server may not: another one may have them by then."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import Fenced
from app.journal.lease import FolderLease
from app.web.errors.handlers import error_response

OF_SESSIONS = "/v1/"
"""What is below tells of sessions, or changes them. The rest tells of the server itself, or keeps nothing."""
TRY_AGAIN_LATER = 1013
"""The code with which a WebSocket is closed (RFC 6455, 7.4.1)."""


class LeaseGate:
    """Lets a request pass while the lease of the state folder is held, and its answer too: a process can be frozen
    between the two. What has begun is cut off, so that no client takes it for whole.
    """

    def __init__(self, app: ASGIApp, lease: FolderLease) -> None:
        self.app = app
        self._lease = lease

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" or not scope["path"].startswith(OF_SESSIONS):
            await self.app(scope, receive, send)
            return
        try:
            self._lease.require()
        except Fenced as error:
            await error_response(error, scope)(scope, receive, send)
            return
        await self.app(scope, receive, self._held(scope, receive, send))

    def _held(self, scope: Scope, receive: Receive, send: Send) -> Send:
        """The same as `send` while the lease is held. Afterwards one last message goes out, and no more."""
        has_begun = is_over = False

        async def send_held(message: Message) -> None:
            nonlocal has_begun, is_over
            if is_over:
                return
            if self._lease.holds:
                has_begun = True
                await send(message)
                return
            is_over = True
            await self._end(scope, receive, send, has_begun=has_begun)

        return send_held

    async def _end(self, scope: Scope, receive: Receive, send: Send, *, has_begun: bool) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": Fenced.code})
        elif has_begun:
            cut: Callable[[], None] | None = scope["state"].get("cut")
            if cut is not None:  # else the answer that lacks its end is one
                cut()
        else:
            error = Fenced("the lease of the state folder ran out meanwhile: whether this was done is not known")
            await error_response(error, scope)(scope, receive, send)
