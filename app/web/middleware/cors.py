"""Pages of other sites: which of them a browser lets read the server's answers."""

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from app.traces.base import TRACE_RESPONSE

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
READABLE = (
    "Retry-After",
    "X-Request-Id",
    "Request-Id",
    "X-Session-ID",
    "X-Djinn-Ignored",
    "Idempotent-Replayed",
    TRACE_RESPONSE,
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Headers of answers that a page may read. Those of requests are not held to a list: SDKs send many of their own."""


def cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """What answers browsers for pages of `origins`; nothing without any. Keys are in headers, never in cookies."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=READABLE,
            allow_private_network=True,  # the server may be on the machine of the browser
        )
    ]
