"""Turns as they are counted for their owners: before they begin, while they run, and when they have ended."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from app.domain.errors import BeyondTenantLimit, TenantLimit
from app.domain.limits import Quotas
from app.sessions.charges.logprob_room import LogprobRoom
from app.sessions.charges.turn_charge import TurnCharge
from app.sessions.table import SessionTable

RETRY_AFTER_S = 1
MOST_RESERVED = 4096
"""Generated tokens of one turn that are reserved: few turns make use of all that they may generate."""


@dataclass(frozen=True, slots=True)
class TurnNeed:
    """Tokens of a turn that is to begin: its `context`, of these the `sent` ones that it may have to compute, and the
    `most` that it may generate. It may report `logprobs` log-probabilities.
    """

    context: int
    sent: int
    most: int
    logprobs: int = 0


def reported(alternatives: int | None, tokens: int) -> int:
    """How many log-probabilities `tokens` tokens have, each with `alternatives` others; None: none are asked for."""
    return 0 if alternatives is None else tokens * (alternatives + 1)


class Charges:
    """Counts the turns of all owners, and those that calls have yet to begin. Used on the event loop only."""

    def __init__(self, table: SessionTable, quotas: Quotas, logprobs: LogprobRoom, kv_bytes_per_token: int) -> None:
        self._table = table
        self._quotas = quotas
        self._logprobs = logprobs
        self._kv_bytes_per_token = kv_bytes_per_token
        self._coming: defaultdict[str | None, dict[TurnCharge, int]] = defaultdict(dict)
        """Each owner's turns that calls have yet to begin, with the tokens of their contexts."""

    def reserve(
        self,
        owner: str | None,
        needs: Sequence[TurnNeed],
        cleanup: contextlib.AsyncExitStack,
        *,
        generated: int = 0,
    ) -> list[TurnCharge]:
        """Count turns that a call will `begin`. What has not begun when `cleanup` unwinds is given back. Copies of a
        paused turn have `generated` some already.

        Raises `TenantLimit`, `RateLimited` and `LogprobsFull` unless the owner may have all of them now, and
        `BeyondTenantLimit` or `FieldOutOfRange` unless it ever may.
        """
        self._require(owner, [need.context for need in needs])
        self._logprobs.check(owner, sum(need.logprobs for need in needs))
        settles = self._quotas.reserve(owner, [need.sent + min(need.most, MOST_RESERVED) for need in needs])
        charges = []
        for settle, need in zip(settles, needs, strict=True):
            self._logprobs.take(owner, need.logprobs)
            give_back = partial(self._logprobs.give, owner, need.logprobs)
            charge = TurnCharge(settle, sent=need.sent, generated=generated, give_back=give_back)
            self._coming[owner][charge] = need.context
            cleanup.callback(self._answered, owner, charge)
            charges.append(charge)
        return charges

    def begin(self, owner: str | None, charge: TurnCharge) -> None:
        """The owner's turn has begun: its session counts from now on, and its end settles."""
        self._forget(owner, charge)

    def _require(self, owner: str | None, new: Sequence[int]) -> None:
        """Raise `TenantLimit` unless the owner may have more turns that wait, run or are paused, with contexts of `new`
        tokens; `BeyondTenantLimit` if it could not even without any others.
        """
        limits = self._quotas.limits(owner)
        if limits.turns_at_once is None and limits.device_bytes is None:
            return
        busy = [len(session.history) for session in self._table.turns.of(owner)]
        busy += self._coming.get(owner, {}).values()
        most = limits.turns_at_once
        if most is not None and len(busy) + len(new) > most:
            limit = f"{most} turn{'s' * (most > 1)} at once"
            raise _refusal(limit, len(busy), len(new), ever=len(new) <= most)
        room, size = limits.device_bytes, self._kv_bytes_per_token
        if room is not None and (sum(busy) + sum(new)) * size > room:
            limit = f"{room} bytes of KV of turns under way"
            raise _refusal(limit, sum(busy) * size, sum(new) * size, ever=sum(new) * size <= room)

    def _answered(self, owner: str | None, charge: TurnCharge) -> None:
        if charge in self._coming.get(owner, {}):
            self._forget(owner, charge)
            charge.drop()
        charge.answered()

    def _forget(self, owner: str | None, charge: TurnCharge) -> None:
        coming = self._coming[owner]
        del coming[charge]
        if not coming:
            del self._coming[owner]


def _refusal(limit: str, held: int, needed: int, *, ever: bool) -> TenantLimit | BeyondTenantLimit:
    """`ever`: whether there can be as much as this call needs."""
    message = f"the limit of this tenant is {limit}: "
    if not ever:
        return BeyondTenantLimit(f"{message}this call alone needs {needed}")
    return TenantLimit(f"{message}they have {held}, and this call needs {needed}", retry_after_s=RETRY_AFTER_S)
