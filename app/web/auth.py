"""API keys: who calls, and that nobody else does."""

import hashlib
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.domain.errors import Unauthenticated
from app.web.error_handlers import error_response

OPEN_PATHS = frozenset({"/health"})


class ApiKeyMiddleware:
    """Lets a request pass with one of `keys`; `request.state.owner` is the key's fingerprint.

    The key is a bearer token, or the value of `X-Api-Key`, where clients of Anthropic's API have it. Without keys
    everybody may pass, and `owner` is None.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self._owners = {key.encode(): fingerprint(key) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        owner = self._authenticate(Headers(scope=scope))
        if self._owners and owner is None and scope["path"] not in OPEN_PATHS:
            error = Unauthenticated("a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY")
            await error_response(error, scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)

    def _authenticate(self, headers: Headers) -> str | None:
        """The key's owner. Compares with every key in constant time, so that the time tells nothing about any."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""]
        keys = [each.encode("latin-1").strip() for each in given]  # the headers' bytes as they came
        found = None
        for key, owner in self._owners.items():
            for each in keys:
                if secrets.compare_digest(key, each):
                    found = owner
        return found


def fingerprint(key: str) -> str:
    """What stands for the key wherever it is stored or compared: it cannot be turned back into the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]
