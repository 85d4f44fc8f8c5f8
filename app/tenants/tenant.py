"""Tenants: their keys, roles and limits, what each has used, and the gate in front of every route: who calls, may they,
and not too often.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import ceil, inf, nan

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import DjinnError, RateLimited, Unauthenticated, WrongRole
from app.domain.values import NO_LIMITS, Limits, Settle
from app.web.errors import error_response
from app.web.middleware import ANSWERS, HOP, Sites
from app.web.openapi import is_open

logger = logging.getLogger(__name__)


class Role(StrEnum):
    """What a tenant may see: its own, that of all tenants, or only the server's health and figures."""

    USER = "user"
    OPERATOR = "operator"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Key:
    """One key, known by its SHA-256 digest. It is valid from `not_before` to `not_after`, in Unix seconds."""

    sha256: str
    not_before: float = -inf
    not_after: float = inf

    def is_valid(self, now: float) -> bool:
        """Whether the key may be used at `now`."""
        return self.not_before <= now < self.not_after


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. Its name owns its sessions, so that they outlive its keys."""

    name: str
    keys: tuple[Key, ...]
    role: Role = Role.USER
    limits: Limits = NO_LIMITS


KEY_BYTES = 32
"""Random bytes of a new key."""


def new_key() -> str:
    """A key that cannot be guessed."""
    return f"djinn-{secrets.token_urlsafe(KEY_BYTES)}"


def digest(key: bytes) -> str:
    """The SHA-256 digest in hexadecimal, as a file of tenants has it. It cannot be turned back into the key."""
    return hashlib.sha256(key).hexdigest()


class Directory:
    """The tenants of one server, found by their keys. Without tenants the server asks for no key."""

    def __init__(self, tenants: Iterable[Tenant], clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._clock = clock
        self.replace(tenants)

    def replace(self, tenants: Iterable[Tenant]) -> None:
        """Have these tenants from now on."""
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._by_digest = {key.sha256: (tenant, key) for tenant in self._by_name.values() for key in tenant.keys}
        self._refused: set[str] = set()
        now = self._clock()
        for tenant in self._by_name.values():
            if not any(key.is_valid(now) for key in tenant.keys):
                logger.warning("tenant %s has no key that is valid now", tenant.name)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._by_name)

    def named(self, name: str | None) -> Tenant | None:
        """The tenant of that name."""
        return None if name is None else self._by_name.get(name)

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of the key now; None: unknown.

        It compares digests, never keys. Even if the time reveals part of a digest, that does not reveal its key.
        """
        tenant, found = self._by_digest.get(digest(key), (None, None))
        if tenant is None or found is None:
            return None
        if found.is_valid(now := self._clock()):
            return tenant
        if found.sha256 not in self._refused:  # one line of the log for each key
            self._refused.add(found.sha256)
            why = "is not valid yet" if now < found.not_before else "has expired"
            logger.warning("a key of tenant %s is refused: it %s", tenant.name, why)
        return None


def tenants_of_keys(keys: Iterable[str]) -> tuple[Tenant, ...]:
    """The tenants that the keys of `--api-keys` are, named by their order: a name tells nothing of its key. An only key
    is its server's operator.
    """
    digests = tuple(dict.fromkeys(digest(key.encode()) for key in keys))
    if len(digests) == 1:
        return (Tenant("default", (Key(digests[0]),), Role.OPERATOR),)
    return tuple(Tenant(f"key-{number}", (Key(each),), Role.USER) for number, each in enumerate(digests, 1))


REQUESTS, TOKENS, REFUSED = "requests", "tokens", "refused"
WINDOW_S = 60


class TenantQuotas:
    """The limits of the tenants as they are now. Used on the event loop only.

    Each tenant has a window for requests and one for tokens: a minute that begins with the first use.
    """

    def __init__(self, directory: Directory, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._directory = directory
        self._clock = clock
        self._used: dict[tuple[str, str, int], tuple[int, float]] = {}
        """By tenant, thing and limit: how much, and when the window ends. With another limit begins another window."""

    def limits(self, owner: str | None) -> Limits:
        """Those of the tenant of that name; one that the file has no more has none, and no keys either."""
        tenant = self._directory.named(owner)
        return NO_LIMITS if tenant is None else tenant.limits

    def take_request(self, owner: str | None) -> None:
        """Count a request. Raises `RateLimited`."""
        limit = self.limits(owner).requests_per_minute
        if owner is not None and limit is not None:
            self._take(owner, REQUESTS, limit, 1)

    def reserve(self, owner: str | None, tokens: Sequence[int]) -> list[Settle]:
        """Count the tokens of turns, together at most a whole minute's: a call that needs more waits for a minute in
        which none were used.

        Raises `RateLimited`.
        """
        limit = self.limits(owner).tokens_per_minute
        if owner is None or limit is None:
            return [lambda used: None] * len(tokens)
        left = min(sum(tokens), limit)
        until = self._take(owner, TOKENS, limit, left) if left else nan
        settles = list[Settle]()
        for wanted in tokens:
            share = min(wanted, left)
            left -= share
            settles.append(partial(self._settle, owner, limit, share, until))
        return settles

    def note_refused(self, tenant: str) -> None:
        """A request of that tenant was one too many, by any limit."""
        count, ends_at = self._window(tenant, REFUSED, 0)
        self._used[tenant, REFUSED, 0] = count + 1, ends_at

    def refused(self) -> dict[str, int]:
        """How many requests were refused to each tenant, in the minute that began with the first."""
        found = [(tenant, *use) for (tenant, what, _), use in self._used.items() if what == REFUSED]
        return {tenant: count for tenant, count, ends_at in found if ends_at > self._clock()}

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """How the tenant stands, in the headers that OpenAI's API has."""
        found: dict[str, str] = {}
        limits = tenant.limits
        for what, limit in ((REQUESTS, limits.requests_per_minute), (TOKENS, limits.tokens_per_minute)):
            if limit is not None:
                remaining, reset_s = self._left(tenant.name, what, limit)
                found[f"x-ratelimit-limit-{what}"] = str(limit)
                found[f"x-ratelimit-remaining-{what}"] = str(remaining)
                found[f"x-ratelimit-reset-{what}"] = _duration(reset_s)
        return found

    def _left(self, tenant: str, what: str, limit: int) -> tuple[int, float]:
        """What is left of the limit, and in how many seconds all of it is back."""
        used, ends_at = self._used.get((tenant, what, limit), (0, 0.0))
        reset_s = max(0.0, ends_at - self._clock())
        return max(0, limit - used) if reset_s else limit, reset_s

    def _take(self, tenant: str, what: str, limit: int, cost: int) -> float:
        """Count `cost`, which is at most `limit`, and return when the window ends. Raises `RateLimited`."""
        used, ends_at = self._window(tenant, what, limit)
        if used + cost > limit:
            remaining, reset_s = self._left(tenant, what, limit)
            raise RateLimited(
                f"the limit of this tenant is {limit} {what} in a minute, and {remaining} are left; this call needs "
                f"{cost}",
                retry_after_s=max(1, ceil(reset_s)),
            )
        self._used[tenant, what, limit] = used + cost, ends_at
        return ends_at

    def _settle(self, tenant: str, limit: int, reserved: int, taken_until: float, used: int) -> None:
        """Count the tokens that were used beyond the reserved ones. Those that were not come back, but only in the
        window that ends at `taken_until`.
        """
        counted, ends_at = self._window(tenant, TOKENS, limit)
        if used > reserved or ends_at == taken_until:
            self._used[tenant, TOKENS, limit] = max(0, counted + used - reserved), ends_at

    def _window(self, *key: *tuple[str, str, int]) -> tuple[int, float]:
        """What is used in the window that is open, or in a new one, and when it ends."""
        now = self._clock()
        used, ends_at = self._used.get(key, (0, 0.0))
        return (used, ends_at) if ends_at > now else (0, now + WINDOW_S)


def _duration(seconds: float) -> str:
    """As OpenAI's API writes it: `59.5s`, `1m0s`."""
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:g}m{rest:g}s" if minutes else f"{rest:g}s"


FIGURES = "/metrics"
TOO_MANY = 429
OF_METRICS = frozenset({FIGURES, "/ready", "/health"})
"""All that the role `metrics` may read, and the page, which holds no data."""


class TenantMiddleware:
    """Lets a request pass that is meant for this server, with the key of a tenant whose role may make it, within the
    tenant's limit of requests.

    The key is a bearer token, or the value of `X-Api-Key`, where clients of Anthropic's API have it. The routes find
    the tenant in `request.state.tenant` and its name in `request.state.owner`. Both are None on a server without
    tenants, where all callers may pass. A connection with many requests calls `request.state.admit` for each; an
    answer without an end asks `request.state.may_go_on` now and then.
    """

    def __init__(self, app: ASGIApp, sites: Sites, directory: Directory, quotas: TenantQuotas) -> None:
        self.app = app
        self._sites = sites
        self._directory = directory
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        try:
            if HOP not in state:
                self._sites.require(scope.get("scheme", "http"), headers)
            tenant = authenticate(self._directory, headers)
            state["tenant"], state["owner"] = tenant, tenant and tenant.name
            state["admit"] = lambda: self._admit_again(state["owner"], headers, scope["path"])
            state["may_go_on"] = lambda: self._is_same(tenant, headers)
            if tenant is not None:
                send = self._with_headers(tenant, send)
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
