"""Headers on their way through the front door."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope

CLIENT = "front.client"
"""Where a request's scope has the connection that it came on, in its state."""

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Of one connection, not of a request or an answer (RFC 9110, 7.6.1)."""
OWN = frozenset({b"expect", b"x-request-id", b"x-forwarded-for", b"djinn-home", b"djinn-load", b"djinn-not-done"})
"""Those that the front door answers for, or that are between it and the replicas."""


def moved_to(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The replica that has what another one has handed on; None if the answer names none."""
    home = dict(headers).get(b"djinn-home", b"").decode("latin-1")
    return home.partition(" ")[0] or None


def not_done(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Why a replica has done nothing of a request that another one can do; None: its answer says no such thing."""
    return dict(headers).get(b"djinn-not-done", b"").decode("latin-1") or None


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Without those of one connection, also those that `Connection` names, and the front door's own."""
    headers = list(headers)
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in headers if name not in HOP_BY_HOP | OWN and name not in named]


def peer_of(scope: Scope) -> str | None:
    """The address at the other end of the connection, whatever the request says of those before it."""
    peer: tuple[str, int] | None = scope["state"][CLIENT].client
    return None if peer is None else peer[0]


def target_bytes(scope: Scope) -> bytes:
    """Path and query as they came."""
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def forwarded(scope: Scope, host: str) -> Headers:
    """A request's headers for a replica, who asked among them. `host` is for one without `Host`."""
    headers: Headers = list(scope["headers"])
    client, request_id = peer_of(scope), scope["state"]["request_id"]
    found = end_to_end(headers)
    before = [value for name, value in headers if name == b"x-forwarded-for"]
    ways = [*before, client.encode()] if client is not None else before
    if ways:
        found.append((b"x-forwarded-for", b", ".join(ways)))
    if not any(name == b"host" for name, _ in found):
        found.insert(0, (b"host", host.encode()))
    if any(name == b"transfer-encoding" for name, _ in headers):
        found = [(name, value) for name, value in found if name != b"content-length"]  # RFC 9112, 6.3
        found.append((b"transfer-encoding", b"chunked"))
    found.append((b"x-request-id", request_id.encode()))
    return found


def bodiless(scope: Scope, host: str) -> Headers:
    """`forwarded` for a question of the front door's own, as the client: without what is said of a body, or of a
    WebSocket.
    """
    found = forwarded(scope, host)
    return [
        (name, value)
        for name, value in found
        if name not in (b"content-length", b"transfer-encoding") and not name.startswith(b"sec-websocket")
    ]
