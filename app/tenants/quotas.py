"""What each tenant may use, and how it stands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, nan

from limits import RateLimitItemPerMinute
from limits.storage import Storage
from limits.strategies import FixedWindowRateLimiter

from app.domain.errors import RateLimited
from app.domain.values import NO_LIMITS, Limits, Settle
from app.tenants.tenant import Directory, Tenant


class _Counters(Storage):
    """The counts of one process, on a clock of the caller's. Used on the event loop only.

    The package's own storage in memory starts a thread after each request to look for what has expired. It also has no
    clock that a test can set.
    """

    STORAGE_SCHEME = None
    base_exceptions = ()

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[str, tuple[int, float]] = {}
        """By key: the count, and when it expires."""

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        count, expires_at = self._counts.get(key, (0, 0.0))
        if expires_at <= self._clock():
            count, expires_at = 0, self._clock() + expiry
        self._counts[key] = max(0, count + amount), expires_at
        return self._counts[key][0]

    def get(self, key: str) -> int:
        count, expires_at = self._counts.get(key, (0, 0.0))
        return count if expires_at > self._clock() else 0

    def get_expiry(self, key: str) -> float:
        return max(self._clock(), self._counts.get(key, (0, 0.0))[1])

    def check(self) -> bool:
        return True

    def reset(self) -> int:
        count = len(self._counts)
        self._counts.clear()
        return count

    def clear(self, key: str) -> None:
        self._counts.pop(key, None)


@dataclass(frozen=True, slots=True)
class WindowState:
    """How a tenant stands: what is left of `limit`, and in how many seconds all of it is back."""

    limit: int
    remaining: int
    reset_s: float


class Windows:
    """One window for each tenant and each kind of thing that is counted: a minute that begins with the first use."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._clock = clock
        self._storage = _Counters(clock)
        self._limiter = FixedWindowRateLimiter(self._storage)

    def state(self, tenant: str, what: str, limit: int) -> WindowState:
        """How the tenant stands."""
        reset_at, remaining = self._limiter.get_window_stats(RateLimitItemPerMinute(limit), tenant, what)
        return WindowState(limit, remaining, max(0.0, reset_at - self._clock()))

    def take(self, tenant: str, what: str, limit: int, cost: int = 1) -> float:
        """Count `cost`, which is at most `limit`, and return when the window ends. Raises `RateLimited`."""
        item = RateLimitItemPerMinute(limit)
        if not self._limiter.test(item, tenant, what, cost=cost):
            state = self.state(tenant, what, limit)
            raise RateLimited(
                f"the limit of this tenant is {limit} {what} in a minute, and {state.remaining} are left; this call "
                f"needs {cost}",
                retry_after_s=max(1, ceil(state.reset_s)),
            )
        self._limiter.hit(item, tenant, what, cost=cost)
        return float(self._storage.get_expiry(item.key_for(tenant, what)))

    def settle(self, tenant: str, what: str, limit: int, difference: int, taken_until: float) -> None:
        """Count `difference` more, or less if it is negative: then only in the window that ends at `taken_until`."""
        item = RateLimitItemPerMinute(limit)
        key = item.key_for(tenant, what)
        if difference > 0 or self._storage.get_expiry(key) == taken_until:
            self._storage.incr(key, item.get_expiry(), difference)


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
