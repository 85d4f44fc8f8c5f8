"""Which names the server answers to: a page of another site must not speak for a user of this machine.

A site can let its own name point to any address (DNS rebinding), and any page can send a form to http://127.0.0.1:8000.
A server without keys would take both for its user. `Host` tells the first, and `Origin` the second.
"""

from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.domain.addresses import ANY_HOST, PRIVATE_HOSTS, is_private_name
from app.domain.errors import ForeignHost
from app.web.errors.handlers import error_response

SCHEMES = {"ws": "http", "wss": "https"}
"""What the page of a WebSocket has."""
PORTS = {"http": 80, "https": 443}
FLAGS = {"Host": "--allowed-hosts names those", "Origin": "--cors-origin names others"}


class HostMiddleware:
    """Refuses requests to a `Host` that is none of `hosts`: names without ports, `ANY_HOST` or `PRIVATE_HOSTS`.

    Without keys it also refuses requests of pages, by their `Origin`, unless the server itself has served the page, or
    it is one of `origins`. With keys it does not look: a browser adds no key to what another page sends.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str], *, needs_key: bool) -> None:
        self.app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        self._origins = frozenset(origins)
        self._needs_key = needs_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        wrong = None if scope["type"] == "lifespan" else self._wrong(scope["scheme"], Headers(scope=scope))
        if wrong is None:
            await self.app(scope, receive, send)
            return
        message = f"this server does not answer to that {wrong}; {FLAGS[wrong]} that it answers to"
        await error_response(ForeignHost(message, param=wrong), scope)(scope, receive, send)

    def _wrong(self, scheme: str, headers: Headers) -> str | None:
        """The header that names another host. Browsers send both; programs need not."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._answers_to(host):
            return "Host"
        if origin is None or self._needs_key or not self._origins.isdisjoint((origin, ANY_HOST)):
            return None
        own = None if host is None else _site(f"{SCHEMES.get(scheme, scheme)}://{host}")
        return None if own is not None and own == _site(origin) else "Origin"

    def _answers_to(self, host: str) -> bool:
        if ANY_HOST in self._hosts:
            return True
        parts = _split(f"//{host}")
        name = None if parts is None else parts.hostname
        if name is None:
            return False
        return name in self._hosts or (PRIVATE_HOSTS in self._hosts and is_private_name(name))


def _site(url: str) -> tuple[str, str, int] | None:
    """The scheme, name and port of a page: one site may do nothing in the name of another. None if there is none."""
    parts = _split(url)
    if parts is None or parts.hostname is None:
        return None
    port = PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    return parts.scheme, parts.hostname, port


def _split(url: str) -> SplitResult | None:
    """None if it is no URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # read last, so it is checked last
    except ValueError:
        return None
    return parts
