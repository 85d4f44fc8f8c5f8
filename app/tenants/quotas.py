"""What each tenant may use, and how it stands."""

from collections.abc import Sequence
from functools import partial
from math import nan

from app.domain.limits import NO_LIMITS, Limits, Settle
from app.tenants.directory import Directory
from app.tenants.tenant import Tenant
from app.tenants.windows import Windows, WindowState

REQUESTS, TOKENS = "requests", "tokens"


class TenantQuotas:
    """The limits of the tenants as they are now. Used on the event loop only."""

    def __init__(self, directory: Directory, windows: Windows) -> None:
        self._directory = directory
        self._windows = windows

    def limits(self, owner: str | None) -> Limits:
        """Those of the tenant of that name; one that the file has no more has none, and no keys either."""
        tenant = self._directory.named(owner)
        return NO_LIMITS if tenant is None else tenant.limits

    def take_request(self, owner: str | None) -> None:
        """Count a request. Raises `RateLimited`."""
        limit = self.limits(owner).requests_per_minute
        if owner is not None and limit is not None:
            self._windows.take(owner, REQUESTS, limit)

    def reserve(self, owner: str | None, tokens: Sequence[int]) -> list[Settle]:
        """Count the tokens of turns, together at most a whole minute's: a call that needs more waits for a minute in
        which none were used.

        Raises `RateLimited`.
        """
        limit = self.limits(owner).tokens_per_minute
        if owner is None or limit is None:
            return [lambda used: None] * len(tokens)
        left = min(sum(tokens), limit)
        until = self._windows.take(owner, TOKENS, limit, left) if left else nan
        settles = list[Settle]()
        for wanted in tokens:
            share = min(wanted, left)
            left -= share
            settles.append(partial(self._settle, owner, limit, share, until))
        return settles

    def _settle(self, owner: str, limit: int, reserved: int, until: float, used: int) -> None:
        self._windows.settle(owner, TOKENS, limit, used - reserved, until)

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """How the tenant stands, in the headers that OpenAI's API has."""
        found: dict[str, str] = {}
        limits = tenant.limits
        for what, limit in ((REQUESTS, limits.requests_per_minute), (TOKENS, limits.tokens_per_minute)):
            if limit is not None:
                found |= _headers(what, self._windows.state(tenant.name, what, limit))
        return found


def _headers(what: str, state: WindowState) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(state.limit),
        f"x-ratelimit-remaining-{what}": str(state.remaining),
        f"x-ratelimit-reset-{what}": _duration(state.reset_s),
    }


def _duration(seconds: float) -> str:
    """As OpenAI's API writes it: `59.5s`, `1m0s`."""
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:g}m{rest:g}s" if minutes else f"{rest:g}s"
