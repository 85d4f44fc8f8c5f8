"""The front door checks who calls before it asks a replica for anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.domain.errors import Unauthenticated
from app.web.errors import error_response
from app.web.middleware import cross_origin
from app.web.openapi import is_open


class KeyGate:
    """Refuses requests without a valid key, but for the paths that need none. `state.has_key` tells the parts behind
    it whether the caller may see more than strangers do.

    It answers preflights of `origins` too: browsers send no key with them.
    """

    def __init__(self, app: ASGIApp, tenant_of: Callable[[Headers], str | None], origins: Sequence[str]) -> None:
        """`tenant_of` tells whose key a request has; None: nobody's."""
        self.app = app
        self._tenant_of = tenant_of
        self._has_origins = bool(origins)
        self._refuse: ASGIApp = _refuse
        for each in cross_origin(origins):
            self._refuse = each.cls(self._refuse, *each.args, **each.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        headers = Headers(scope=scope)
        scope["state"]["has_key"] = has_key = self._tenant_of(headers) is not None
        if self._is_preflight(scope, headers) or not (has_key or is_open(scope["path"])):
            await self._refuse(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        asks = scope["type"] == "http" and scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        return self._has_origins and asks and "origin" in headers


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = Unauthenticated("a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY")
    await error_response(error, scope)(scope, receive, send)
