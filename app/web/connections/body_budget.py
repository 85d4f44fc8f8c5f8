"""Memory of request bodies and messages of WebSockets: what all under way take together, and each client's share."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from app.domain.errors import BodiesFull
from app.domain.fair_room import leaves_as_much
from app.machine.units import size
from app.web.connections.caps import origin_of


class BodyBudget:
    """At most `max_bytes` bytes for all bodies, which clients share as `leaves_as_much` says. Used on the event loop
    only.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taken = Counter[str]()
        """Bytes of each client that has some."""
        self._total = 0

    def take(self, client: str, count: int, held: int = 0) -> None:
        """Take `count` bytes for a body that has `held` so far. Raises `BodiesFull`, and takes none then."""
        besides = self._taken[client] - held
        if not leaves_as_much(self._max_bytes, taken=self._total, more=count, besides=besides, whole=held + count):
            whose = f", {size(self._taken[client])} of it by this client, who leaves others as much" if besides else ""
            raise BodiesFull(
                f"bodies of requests under way take {size(self._total)} of the {size(self._max_bytes)} that they may "
                f"have{whose}; this one needs {size(held + count)}"
            )
        self._taken[client] += count
        self._total += count

    def give(self, client: str, count: int) -> None:
        """Give back what was taken for a body."""
        self._total -= count
        self._taken[client] -= count
        if not self._taken[client]:
            del self._taken[client]


class Share:
    """What one body has of the budget. Used by one request or WebSocket."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.held = 0
        """Bytes that it has."""

    def require(self, count: int) -> None:
        """Have `count` bytes at least. Raises `BodiesFull`."""
        if count > self.held:
            self._budget.take(self._client, count - self.held, self.held)
            self.held = count

    def shrink(self, count: int) -> None:
        """Have no more than `count` bytes."""
        if self.held > count:
            self._budget.give(self._client, self.held - count)
            self.held = count

    def give_back(self) -> None:
        """Have none any more."""
        self.shrink(0)


def client_of(scope: Mapping[str, Any]) -> str:
    """Who sends the request of an ASGI `scope`: its tenant, or where there are none its address."""
    owner: str | None = scope.get("state", {}).get("owner")
    if owner is not None:
        return f"tenant {owner}"
    host, _ = scope.get("client") or ("", 0)
    try:
        return origin_of(host)
    except ValueError:  # a proxy names it
        return f"host {host}"
