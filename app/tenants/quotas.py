"""What each tenant may use, and how it stands."""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, nan

from app.domain.errors import RateLimited
from app.domain.values import NO_LIMITS, Limits, Settle
from app.tenants.tenant import Directory, Tenant

REQUESTS, TOKENS = "requests", "tokens"
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
