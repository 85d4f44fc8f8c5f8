"""The gate in front of every route: who calls, may they, and not too often."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import DjinnError, Unauthenticated, WrongRole
from app.tenants.tenant import Directory, Role, Tenant, TenantQuotas
from app.web.errors import error_response
from app.web.middleware import ANSWERS, HOP
from app.web.openapi import is_open

FIGURES = "/metrics"
TOO_MANY = 429
OF_METRICS = frozenset({FIGURES, "/ready", "/health"})
"""All that the role `metrics` may read, and the page, which holds no data."""


class TenantMiddleware:
    """Lets a request pass with the key of a tenant whose role may make it, within the tenant's limit of requests.

    The key is a bearer token, or the value of `X-Api-Key`, where clients of Anthropic's API have it. The routes find
    the tenant in `request.state.tenant` and its name in `request.state.owner`. Both are None on a server without
    tenants, where all callers may pass. A connection with many requests calls `request.state.admit` for each; an
    answer without an end asks `request.state.may_go_on` now and then.
    """

    def __init__(self, app: ASGIApp, directory: Directory, quotas: TenantQuotas) -> None:
        self.app = app
        self._directory = directory
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        tenant = authenticate(self._directory, headers)
        state = scope.setdefault("state", {})
        state["tenant"], state["owner"] = tenant, tenant and tenant.name
        state["admit"] = lambda: self._admit_again(state["owner"], headers, scope["path"])
        state["may_go_on"] = lambda: self._is_same(tenant, headers)
        if tenant is not None:
            send = self._with_headers(tenant, send)
        try:
            self._admit(tenant, scope["path"], counts=HOP not in state)
        except DjinnError as error:
            await error_response(error, scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _admit(self, tenant: Tenant | None, path: str, *, counts: bool = True) -> None:
        """Raise `Unauthenticated`, `RateLimited` or `WrongRole` unless the tenant may ask for the path now. A request
        that another replica has sent on does not count: it has counted there.
        """
        if not self._directory or is_open(path):
            return
        if tenant is None:
            raise Unauthenticated("a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY")
        if counts:
            self._quotas.take_request(tenant.name)
        if tenant.role is Role.METRICS and path not in OF_METRICS:
            raise WrongRole(f"the role {tenant.role} may only read {', '.join(sorted(OF_METRICS))}")
        if tenant.role is Role.USER and path == FIGURES:
            raise WrongRole(f"{FIGURES} shows all tenants: only the roles operator and metrics may read it")

    def _admit_again(self, owner: str | None, headers: Headers, path: str) -> None:
        """Like `_admit`, for the next request of a connection that is `owner`'s: its key may be another's by now."""
        tenant = authenticate(self._directory, headers)
        self._admit(tenant if tenant is not None and tenant.name == owner else None, path)

    def _is_same(self, tenant: Tenant | None, headers: Headers) -> bool:
        """Whether the key is still valid, and its tenant may see as much as before."""
        found = authenticate(self._directory, headers)
        return (found and (found.name, found.role)) == (tenant and (tenant.name, tenant.role))

    def _with_headers(self, tenant: Tenant, send: Send) -> Send:
        """Tells the tenant with each answer how it stands."""

        async def send_with_headers(message: Message) -> None:
            if message.get("status") == TOO_MANY:
                self._quotas.note_refused(tenant.name)
            if message["type"] in ANSWERS and (found := self._quotas.headers(tenant)):
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                for name, value in found.items():
                    headers.setdefault(name, value)  # the replica that has computed the answer has counted its tokens
            await send(message)

        return send_with_headers


def authenticate(directory: Directory, headers: Headers) -> Tenant | None:
    """Whose key the headers have, byte by byte as they came; None: unknown, or not needed."""
    if not directory:
        return None
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = (token if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    keys = (each.encode("latin-1").strip() for each in given)
    return next((found for key in keys if key and (found := directory.find(key))), None)


def import_limit(scope: Scope) -> int | None:
    """Most bytes that the caller may import at once, if its tenant has a limit."""
    tenant: Tenant | None = scope["state"]["tenant"]
    return None if tenant is None else tenant.limits.import_bytes
