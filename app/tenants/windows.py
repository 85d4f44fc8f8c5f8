"""What each tenant has used of its minute, in windows of the `limits` package."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from limits import RateLimitItemPerMinute
from limits.storage import Storage
from limits.strategies import FixedWindowRateLimiter

from app.domain.errors import RateLimited


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
