"""Memory for the log-probabilities that turns report: what all under way take together, and each tenant's share."""

from collections import Counter

from app.domain.errors import FieldOutOfRange, LogprobsFull
from app.domain.fair_room import leaves_as_much
from app.machine.units import size

BYTES_EACH = 256
"""Of one log-probability. Measured: 122 as an object, and 73 as JSON of a chat, which is written while the object is
there. While a prompt is scored, the engine's process has the object too: that one is not counted.
"""
RETRY_AFTER_S = 1


class LogprobRoom:
    """At most `max_bytes` bytes, which tenants share as `leaves_as_much` says, where each call is a thing. Without
    tenants there are no others to leave room to. Used on the event loop only.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taken = Counter[str | None]()
        """Bytes of each tenant that has some."""
        self._total = 0

    def check(self, owner: str | None, count: int) -> None:
        """Raise `LogprobsFull` unless a call may report `count` log-probabilities now, and `FieldOutOfRange` unless one
        ever may.
        """
        more = count * BYTES_EACH
        if more > self._max_bytes:
            raise FieldOutOfRange(
                f"logprobs: this call may report {count:,} log-probabilities, and at most "
                f"{self._max_bytes // BYTES_EACH:,} fit max_logprobs_bytes: ask for fewer of them, or for fewer tokens",
                param="logprobs",
            )
        own = self._taken[owner] if owner is not None else 0
        if more and not leaves_as_much(self._max_bytes, taken=self._total, more=more, besides=own, whole=more):
            whose = f", {size(own)} of it those of this tenant, who leaves others as much" if own else ""
            raise LogprobsFull(
                f"the log-probabilities of calls under way take {size(self._total)} of the {size(self._max_bytes)} of "
                f"max_logprobs_bytes{whose}; those of this call need {size(more)}",
                retry_after_s=RETRY_AFTER_S,
            )

    def take(self, owner: str | None, count: int) -> None:
        """Have room for `count` log-probabilities, which `check` has found."""
        self._add(owner, count * BYTES_EACH)

    def give(self, owner: str | None, count: int) -> None:
        """Give back what was taken."""
        self._add(owner, -count * BYTES_EACH)

    def _add(self, owner: str | None, more: int) -> None:
        self._total += more
        self._taken[owner] += more
        if not self._taken[owner]:
            del self._taken[owner]
