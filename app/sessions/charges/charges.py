"""Turns as they are counted for their owners: before they begin, while they run, and when they have ended."""

import contextlib
from collections.abc import Sequence

from app.domain.errors import TenantLimit
from app.domain.limits import Quotas
from app.sessions.charges.turn_charge import TurnCharge
from app.sessions.table import SessionTable

RETRY_AFTER_S = 1
MOST_RESERVED = 4096
"""Generated tokens of one turn that are reserved: few turns make use of all that they may generate."""


class Charges:
    """Counts the turns of all owners, and those that calls have yet to begin. Used on the event loop only."""

    def __init__(self, table: SessionTable, quotas: Quotas) -> None:
        self._table = table
        self._quotas = quotas
        self._coming: dict[object, str | None] = {}
        """What stands for a turn that a call has yet to begin, and its owner."""

    def reserve(
        self,
        owner: str | None,
        needs: Sequence[tuple[int, int]],
        cleanup: contextlib.AsyncExitStack,
        *,
        generated: int = 0,
    ) -> list[TurnCharge]:
        """Count turns that a call will `begin`: for each how many tokens it brings, and may generate at most. What has
        not begun when `cleanup` unwinds is given back. Copies of a paused turn have `generated` some already.

        Raises `TenantLimit` and `RateLimited` unless the owner may have all of them.
        """
        self._require(owner, len(needs))
        settles = self._quotas.reserve(owner, [sent + min(most, MOST_RESERVED) for sent, most in needs])
        charges = [
            TurnCharge(settle, sent=sent, generated=generated) for settle, (sent, _) in zip(settles, needs, strict=True)
        ]
        for charge in charges:
            self._coming[charge] = owner
            cleanup.callback(self._drop, charge)
        return charges

    def begin(self, charge: TurnCharge) -> None:
        """The turn has begun: its session counts from now on, and its end settles."""
        del self._coming[charge]

    def _require(self, owner: str | None, count: int) -> None:
        """Raise `TenantLimit` unless the owner may have `count` more turns that wait, run or are paused."""
        limit = self._quotas.limits(owner).turns_at_once
        if limit is None:
            return
        turns = sum(session.busy for session in self._table.owned_by(owner))
        turns += sum(each == owner for each in self._coming.values())
        if turns + count > limit:
            plural = "s" * (limit > 1)
            raise TenantLimit(f"the limit of this tenant is {limit} turn{plural} at once", retry_after_s=RETRY_AFTER_S)

    def _drop(self, charge: TurnCharge) -> None:
        if charge in self._coming:
            del self._coming[charge]
            charge.drop()
