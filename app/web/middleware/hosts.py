"""Which names the server answers to: a page of another site must not speak for a user of this machine.

A site can let its own name point to 127.0.0.1 (DNS rebinding), and any page can send a form to http://127.0.0.1:8000. A
server without keys would take both for its user.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.domain.errors import ForeignHost
from app.web.errors.handlers import error_response

ANY = "*"


class HostMiddleware:
    """Refuses requests to a `Host`, or from an `Origin`, that is none of `hosts`: names without ports, `*` for any.
    Pages of `origins` may ask too.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self.app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        wrong = None if scope["type"] == "lifespan" or ANY in self._hosts else self._wrong(Headers(scope=scope))
        if wrong is None:
            await self.app(scope, receive, send)
            return
        message = f"this server does not answer to that {wrong}; --allowed-hosts names those that it answers to"
        await error_response(ForeignHost(message, param=wrong), scope)(scope, receive, send)

    def _wrong(self, headers: Headers) -> str | None:
        """The header that names another host. Browsers send both; programs need not."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and _name(f"//{host}") not in self._hosts:
            return "Host"
        if origin is None or _name(origin) in self._hosts or not self._origins.isdisjoint((origin, ANY)):
            return None
        return "Origin"


def _name(url: str) -> str | None:
    """The host's name in a URL, in small letters; None if there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
